"""What training steps read: the batches and learning rates of an epoch, for eager and for captured steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from banach.data import Batches
from banach.data.loader import Batch, Loader
from banach.train.checkpoint import Position
from banach.train.state import TrainState


class Feed:
    """What both feeds of a `TrainStep` share; `place` holds the number of the step that runs, from 1."""

    batch: Callable[[], Batch]

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.place = torch.zeros(1, dtype=torch.int64, device=state.device)

    def eager(self) -> Batch:
        batch = self.batch()  # before the place, which it may reset
        self.begin_step()
        return batch

    def begin_step(self) -> None:
        """Set the learning rate and the number of the next step."""
        state = self.state
        rate = state.rate(state.step)
        self.place.fill_(state.step + 1)
        for group in state.optimizer.param_groups:
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate

    def changing(self) -> Iterator[Tensor]:
        yield from (self.place, self.state.metrics.sums, self.state.metrics.most, self.state.counted)
        if self.state.average is not None:
            yield from self.state.average.weights.values()


class ImageFeed(Feed):
    """Batches of images on the device.

    A captured step counts its own steps and reads order, augmentation keys and rates from the device.
    """

    def __init__(self, state: TrainState) -> None:
        super().__init__(state)
        self.batches, device = cast(Batches, state.batches), state.device
        batch, steps = state.settings.batch_size, len(self.batches)
        self.full = len(self.batches.images) // batch  # batches of full size
        self.epoch = -1  # that of order, keys and rates
        self.order = torch.zeros(len(self.batches.images), dtype=torch.int64, device=device)
        self.keys = torch.zeros(steps, dtype=torch.int64, device=device)
        self.rates = torch.zeros(steps, dtype=torch.float32, device=device)
        self.within = torch.arange(batch, device=device)

    @property
    def whole(self) -> bool:
        return self.state.step < self.full

    def count(self) -> int:
        """Return the number of images of the next batch, on all ranks."""
        batch = self.state.settings.batch_size
        return min(batch, len(self.batches.images) - self.state.step * batch)

    def load(self) -> None:
        """Write what steps read, once per epoch."""
        state = self.state
        if self.epoch == state.epoch:
            return
        self.epoch, steps = state.epoch, range(len(self.batches))
        self.order.copy_(self.batches.order(state.epoch))
        self.keys.copy_(torch.tensor([self.batches.key(state.epoch, k) for k in steps], dtype=torch.int64))
        self.rates.copy_(torch.tensor([state.rate(k) for k in steps], dtype=torch.float32))
        self.place.fill_(state.step)

    def batch(self) -> Batch:
        state, batches = self.state, self.batches
        self.load()
        index = batches.index(self.order, state.step)
        images, labels = batches.make(index, batches.key(state.epoch, state.step))
        return (images,), labels

    def captured(self) -> Batch:
        index = self.order.index_select(0, self.place * len(self.within) + self.within)
        images, labels = self.batches.make(index, self.keys.index_select(0, self.place))
        for group in self.state.optimizer.param_groups:
            group["lr"].copy_(self.rates.index_select(0, self.place)[0])
        self.place += 1
        return (images,), labels


class LoaderFeed(Feed):
    """Batches of a `Loader`. A captured step reads copies of those that have the shapes of the first one."""

    full = 1  # at least the first batch has its shapes

    def __init__(self, state: TrainState) -> None:
        super().__init__(state)
        self.loader = cast(Loader, state.batches)
        self.at: Position | None = None  # that of `given`
        self.kept: tuple[Tensor, ...] = ()  # inputs and targets that a captured step reads

    @property
    def whole(self) -> bool:
        return _kinds(_flat(self.batch())) == _kinds(self.kept)

    def count(self) -> int:
        return len(self.batch()[1])

    def load(self) -> None:
        """Write what a captured step reads."""
        given = _flat(self.batch())
        if not self.kept:  # of the first batch, though a resumed epoch may begin with its last one
            self.kept = tuple(one.clone() for one in _flat(self.loader.placed(self.first)))
        self.begin_step()
        if self.whole:
            for kept, one in zip(self.kept, given, strict=True):
                kept.copy_(one)

    def batch(self) -> Batch:
        """Return the next batch, which is loaded once; those that were seen before a resume are skipped."""
        position = self.state.position
        if self.at != position:
            if self.at is None or self.at.epoch != position.epoch:
                self.drawn = enumerate(self.loader.epoch(position.epoch))
            for k, batch in self.drawn:
                if k == 0:
                    self.first = batch
                if k == position.step:
                    break
            self.at, self.given = position, self.loader.placed(batch)
        return self.given

    def captured(self) -> Batch:
        return self.kept[:-1], self.kept[-1]


def _flat(batch: Batch) -> tuple[Tensor, ...]:
    return (*batch[0], batch[1])


def _kinds(tensors: tuple[Tensor, ...]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(one.shape, one.dtype) for one in tensors]
