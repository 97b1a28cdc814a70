"""Loader: the batches of a DataLoader, or of another iterable with a length, in an order that a resume repeats."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from banach.data import counter

Batch = tuple[Tensor, ...]  # (*inputs, targets)


class Loader:
    """Batches (inputs, targets) of `data`.

    `data` is a DataLoader, with or without workers, or another iterable with a length. Batch k of epoch e depends
    on (seed, e, k) alone: they seed what `data` draws from PyTorch, NumPy or `random`, and the generators of
    samplers; `set_epoch(e)` is called where loader, sampler or data set have it.
    """

    augment = None

    def __init__(self, data: Iterable[Any], device: torch.device, seed: int = 0) -> None:
        self.data, self.device, self.seed = data, device, seed
        try:
            self.count = len(data)  # type: ignore[arg-type]
        except TypeError:
            expected = "expected Images, a DataLoader or another iterable of (inputs, targets) with a length"
            raise TypeError(f"{expected}, got {type(data).__name__} without one; collect the batches") from None
        if self.count == 0:
            raise ValueError(f"{type(data).__name__} has no batches, expected at least one")

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        size = getattr(self.data, "batch_size", None)
        return f"{type(self.data).__name__} of {self.count} batches" + (f" of {size}" if size else "")

    def epoch(self, epoch: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, on the device."""
        by_batch = getattr(self.data, "batch_sampler", None)
        inner = [getattr(self.data, name, None) for name in ("dataset", "sampler")]
        for part in (self.data, *inner, by_batch, getattr(by_batch, "sampler", None)):
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(counter.key(self.seed, counter.LOADER, epoch, 0))
            if callable(begin := getattr(part, "set_epoch", None)):
                begin(epoch)
        batches = None
        for k in range(self.count):
            with _seeded(counter.key(self.seed, counter.LOADER, epoch, k)):
                batches = iter(self.data) if batches is None else batches
                given = next(batches, None)
            if given is None:
                raise ValueError(f"the data gave {k} batches, but its length is {self.count}; correct its __len__")
            yield tuple(one.to(self.device, non_blocking=True) for one in _checked(given))

    @cached_property
    def few(self) -> tuple[Tensor, ...]:
        """The inputs of the first batch, on which a network is measured."""
        return next(self.epoch())[:-1]


def _checked(given: Any) -> Batch:
    """Return the batch (inputs, targets) as (*inputs, targets)."""
    kinds = "(inputs, targets): inputs a tensor or a tuple of tensors, targets a tensor"
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        size = f" of {len(given)}" if isinstance(given, (tuple, list)) else ""
        raise TypeError(f"a batch must be {kinds}, got {type(given).__name__}{size}")
    d = tuple(given[0]) if isinstance(given[0], (tuple, list)) else (given[0],)
    if wrong := [type(one).__name__ for one in (*d, given[1]) if not isinstance(one, Tensor)]:
        raise TypeError(f"a batch must be {kinds}, got {wrong[0]} in it")
    if (shape := tuple(given[1].shape))[:1] in ((), (0,)):
        raise ValueError(f"targets need a batch axis of at least one sample, got shape {shape}; correct the data")
    return *d, given[1]


@contextmanager
def _seeded(key: int) -> Iterator[None]:
    """Seed PyTorch's CPU generator, NumPy and `random` for the block, then restore them."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(key)
        random.seed(key)
        np.random.seed(key % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
