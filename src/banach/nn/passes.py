"""One forward pass: every evaluation of R sees the same dropout masks and starts from the same buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from banach.latent import Latent


class _Current(threading.local):
    """The pass that is evaluating R in this thread. (Backward threads evaluate too: checkpoint, J-products.)"""

    running: Pass | None = None


_current = _Current()


class Pass:
    """R, evaluated many times in one forward pass as if it were one layer.

    Buffers (running statistics, spectral norm's vectors) start from the same snapshot at every evaluation,
    and only what the last evaluation of the pass left in them is written back: one update per pass.
    Dropout masks are drawn at the first evaluation and held here, not on the module, so that a network can
    be used many times in one graph. Recomputation and J-products after the pass read the same snapshot and
    masks and write nothing.

    `with Pass(R) as one:` is the forward pass; `one.evaluate` is R, then and later.
    """

    def __init__(self, R: Any) -> None:
        modules = list(R.modules()) if isinstance(R, nn.Module) else []
        buffers = dict(R.named_buffers()) if any(module.training for module in modules) else {}
        self.R = R
        self.masks: dict[tuple[int, torch.Size], Tensor] | None = {} if any(map(draws_masks, modules)) else None
        self.snapshot = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        self.latest: dict[str, Tensor] | None = None
        self.index: Tensor | None = None
        self.open = False
        self.outer: Pass | None = None

    def __enter__(self) -> Pass:
        self.open, self.outer, _current.running = True, _current.running, self
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.open, _current.running = False, self.outer
        if self.latest is not None and error is None:
            self._write_back(self.latest)
        self.latest = None

    def evaluate(self, u: Latent, v: Latent, index: Tensor | None = None) -> Latent:
        """R(u, v). `index` says which samples of the batch these are, when some have left it."""
        if self.masks is None or (index is None and _current.running is self):
            return self._call(u, v)
        with self._running(index):
            return self._call(u, v)

    def mask(self, layer: nn.Module, shape: torch.Size, keep: float, device: torch.device) -> Tensor:
        """The mask of this layer, for the samples that are here. Called twice, a layer uses it twice."""
        assert self.masks is not None
        key = (id(layer), shape[1:])
        if key not in self.masks:
            self.masks[key] = torch.rand(shape, device=device) < keep
        mask = self.masks[key]
        return mask if self.index is None else mask.index_select(0, self.index)

    def _call(self, u: Latent, v: Latent) -> Latent:
        if not self.snapshot:
            return self.R(u, v)
        buffers = {name: buffer.clone() for name, buffer in self.snapshot.items()}
        value = torch.func.functional_call(self.R, buffers, (u, v))
        if self.open:
            self.latest = buffers
        return value

    def _write_back(self, buffers: dict[str, Tensor]) -> None:
        own = dict(self.R.named_buffers())
        with torch.no_grad():  # not the decorator: Dynamo cannot trace a decorated method here
            for name, buffer in buffers.items():
                own[name].copy_(buffer)

    @contextmanager
    def _running(self, index: Tensor | None) -> Iterator[None]:
        before, _current.running, self.index = _current.running, self, index
        try:
            yield
        finally:
            _current.running, self.index = before, None


def running_pass() -> Pass | None:
    """The pass that is evaluating R right now in this thread, if any."""
    now = _current.running
    return now if now is not None and now.masks is not None else None


def draws_masks(module: nn.Module) -> bool:
    """Does this module drop at random, in the state it is in?"""
    return module.training and bool(getattr(module, "one_mask_per_pass", False)) and bool(getattr(module, "p", 0))


def uses_batch_statistics(R: Any) -> bool:
    """Does R mix the samples of a batch, in the state it is in? Batch norm does, unless it uses its buffers."""
    if not isinstance(R, nn.Module):
        return False
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and (module.training or (module.running_mean is None and module.running_var is None))
        for module in R.modules()
    )
