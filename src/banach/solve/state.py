"""The state of a running solve: iterates, the numbers kept per sample, and the solver's memory.

The numbers are NumPy arrays if the host sees every residual, else tensors on the device. NumPy is faster for a few
numbers, and on a GPU it saves the launch of several small kernels per step. The arithmetic is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from banach.solve.solver import Memory

Array = Any  # np.ndarray on the host, Tensor on the device

DIVERGED = 10  # times its least residual: the end of an iteration that diverges
IDLE = 10  # evaluations without a new least residual before a sample may be called stalled


@dataclass
class State:
    """One row per sample. Arrays of numbers are written in place.

    `reached`, `best` and `now` have rows (residual, step) and, with a relative tolerance, (excess): residual minus
    its relative part. `reached` stops changing when a sample freezes. `best` is the evaluation with the least
    residual. `now` is the last evaluation, of frozen samples too. Residuals are in the units of `norm.measure`,
    and NaN if they are not finite: then `<=`, `<` and `>` are all False.
    """

    z: Tensor  # (samples, width)
    best_z: Tensor  # the iterate whose own residual is least, of samples that may still need it
    active: Array  # (samples,)
    stats: Array  # (3, 2 or 3, samples): reached, best, now
    memory: Memory
    stalled: Array | None = None  # None: no sample is
    Tz: Tensor | None = None

    def __post_init__(self) -> None:
        self.on_host = isinstance(self.stats, np.ndarray)
        self.reached, self.best, self.now = self.stats[0], self.stats[1], self.stats[2]
        self.residual, self.least, self.least_at = self.reached[0], self.best[0], self.best[1]
        self.tested = 2 if self.stats.shape[1] == 3 else 0  # the row that is compared with atol
        self.test = self.reached[self.tested]
        self.pending: tuple[Tensor, np.ndarray] | None = None  # T(z) - z and its norm, if T is known at z already
        self._mask: Tensor | None = None
        # The number of active samples, if the host knows it.
        self.count = np.count_nonzero(self.active) if self.on_host else -1

    @staticmethod
    def start(z: Tensor, memory: Memory, *, relative: bool, on_host: bool) -> State:
        rows, samples = 3 if relative else 2, z.shape[0]  # not len(z), which export takes for a constant
        if on_host:
            unknown, everyone = _at_start(rows, samples, np.float64 if z.dtype == torch.float64 else np.float32)
            return State(z, z, everyone.copy(), unknown.copy(), memory)
        stats = z.new_full((3, rows, samples), torch.inf)
        stats[:, 1] = 0
        return State(z, z.clone(), torch.ones(samples, dtype=torch.bool, device=z.device), stats, memory)

    @property
    def nonfinite(self) -> Array:
        """(samples,): the residual was not finite (NaN), or the norm of T(z) was not (minus infinity)."""
        return ~(self.test > -np.inf)

    @property
    def mask(self) -> Tensor:
        """(samples, 1): `active` on the device."""
        if not self.on_host:
            return self.active.unsqueeze(1)
        if self._mask is None:
            self._mask = on_device(self.active[:, None].copy(), self.z)
        return self._mask

    def observe(self, step: int | Tensor, residual: Array, relative: tuple[Tensor, float] | None) -> None:
        """Record the residual of z at this step for the active samples. Keep z where it is their least."""
        if self.on_host:
            self._write_on_host(step, residual, relative)
        else:
            self._write_on_device(step, residual, relative)
        if self.on_host and self.count == len(self.z):
            self.reached[:] = self.now
        else:
            _put(self.reached, self.now, self.active)
        better = self.residual < self.least
        _put(self.best, self.reached, better)
        self._keep_best(better)

    def record(self, step: int, residual: np.ndarray, active: np.ndarray) -> None:
        """Record residuals on the host, all of them finite, and set which samples are active from now on."""
        self.now[0], self.now[1] = residual, step
        np.copyto(self.reached, self.now, where=self.active)
        self.active = active
        self._recount()

    def _write_on_host(self, step: Any, residual: Array, relative: tuple[Tensor, float] | None) -> None:
        now = self.now
        if relative is None:
            now[0] = residual if isinstance(residual, np.ndarray) else to_numpy(residual)
        else:
            now[::2] = to_numpy(torch.stack((residual, torch.sub(residual, relative[0], alpha=relative[1]))))
        now[1] = step
        np.copyto(now, np.nan, where=now == np.inf)

    def _write_on_device(self, step: Any, residual: Array, relative: tuple[Tensor, float] | None) -> None:
        now = self.now
        torch.nan_to_num(residual, nan=torch.nan, posinf=torch.nan, out=now[0])
        now[1].fill_(step)
        if relative is not None:
            torch.sub(now[0], relative[0], alpha=relative[1], out=now[2])

    def _keep_best(self, better: Array) -> None:
        """By reference where it can be: samples that froze at a finite residual do not need their best iterate."""
        if not self.on_host:
            torch.where(better.unsqueeze(1), self.z, self.best_z, out=self.best_z)
            return
        count = np.count_nonzero(better)
        if count == self.count and not np.count_nonzero(self.nonfinite):
            self.best_z = self.z
        elif count:
            self.best_z = torch.where(on_device(better[:, None], self.z), self.z, self.best_z)

    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return residual, least residual and the evaluation that gave it, as tensors on the device."""
        if not self.on_host:
            return self.residual, self.least, self.least_at
        stats = on_device(self.stats[:2].copy(), self.z)  # a solver may keep them; `stats` is written in place
        return stats[0, 0], stats[1, 0], stats[1, 1]

    def advance(self, proposal: Tensor) -> None:
        """Move the active samples."""
        if self.on_host and self.count == len(self.z):
            # A copy of T(z): T may write its next value into the same memory.
            self.z = proposal.clone() if proposal is self.Tz else proposal
        else:
            self.z = torch.where(self.mask, proposal, self.z)

    def freeze(self, atol: float) -> None:
        """Deactivate samples that met the tolerance or whose residual is not finite."""
        if not self.on_host:
            torch.gt(self.test, atol, out=self.active)
            if self.stalled is not None:
                self.active &= ~self.stalled
            return
        np.greater(self.test, atol, out=self.active)
        if self.stalled is not None:
            self.active &= ~self.stalled
        self._recount()

    def stall(self, flat: np.ndarray) -> None:
        """Freeze these samples where they are, above the tolerance."""
        mask = flat if self.on_host else on_device(flat, self.active)
        self.stalled = mask if self.stalled is None else self.stalled | mask
        self.active &= ~mask
        if self.on_host:
            self._recount()

    def _recount(self) -> None:
        count = np.count_nonzero(self.active)
        if count != self.count:  # a sample never becomes active again
            self.count, self._mask = count, None

    def scrub(self) -> None:
        """Put the best finite iterate in place of one at which T was not finite, so T never sees NaN."""
        nonfinite = on_device(self.nonfinite, self.z) if self.on_host else self.nonfinite
        self.z = torch.where(nonfinite[:, None], self.best_z, self.z)

    def take(self, chosen: np.ndarray) -> State:
        """Return the samples with these numbers as a state of their own."""
        index = on_device(chosen, self.z)
        here: Any = chosen if self.on_host else index
        return State(
            self.z.index_select(0, index),
            self.best_z.index_select(0, index),
            self.active[here],
            self.stats[:, :, here],
            tuple(part.index_select(0, index) for part in self.memory),
            None if self.stalled is None else self.stalled[here],
        )

    def put(self, chosen: np.ndarray, part: State) -> None:
        """Write the samples of `part` back to these numbers. The solver's memory is not needed again."""
        index = on_device(chosen, self.z)
        here: Any = chosen if self.on_host else index
        self.z = self.z.index_copy(0, index, part.z)  # new tensors: `on_step` may have kept the old ones
        self.best_z = self.best_z.index_copy(0, index, part.best_z)
        self.active[here] = part.active
        self.stats[:, :, here] = part.stats
        if part.stalled is not None:
            if self.stalled is None:
                self.stalled = self.active ^ self.active
            self.stalled[here] = part.stalled

    def to_carry(self) -> tuple[Tensor, ...]:
        """Return the tensors that `carried` makes this state of; their first axis is the sample."""
        return (self.z, self.best_z, self.active, self.stats.permute(2, 0, 1).contiguous(), *self.memory)

    @staticmethod
    def carried(z: Tensor, best_z: Tensor, active: Tensor, stats: Tensor, *memory: Tensor) -> State:
        """Return the state again, from the tensors of `to_carry` or from some samples of them."""
        best_z, active, *memory_now = (part.clone() for part in (best_z, active, *memory))
        stats = stats.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
        return State(z, best_z, active, stats, tuple(memory_now))


@functools.lru_cache(maxsize=64)
def _at_start(rows: int, samples: int, kind: type) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of a state before the first evaluation, and which samples are active: copy both."""
    stats: np.ndarray = np.full((3, rows, samples), np.inf, kind)
    stats[:, 1] = 0
    return stats, np.ones(samples, bool)


def _put(target: Array, source: Array, where: Array) -> None:
    """Write `source` to `target`, in place, where the mask is True."""
    if isinstance(target, np.ndarray):
        np.copyto(target, source, where=where)
    else:
        torch.where(where, source, target, out=target)


def on_device(values: np.ndarray, like: Tensor) -> Tensor:
    """Return the array where `like` is. It may share the array's memory: do not write to that again."""
    tensor = torch.from_numpy(values)
    if like.is_cpu:
        return tensor
    if like.is_cuda:  # from pinned memory, so that the host does not wait for the copy
        return tensor.pin_memory().to(like.device, non_blocking=True)
    return tensor.to(like.device)


def all_on_device(arrays: Sequence[np.ndarray], like: Tensor) -> list[Tensor]:
    """Return the arrays where `like` is, by one copy if that is another device."""
    if like.is_cpu:
        return [torch.from_numpy(array) for array in arrays]
    if not any(map(len, arrays)):
        return [on_device(array, like) for array in arrays]
    return together(arrays, like)


def together(arrays: Sequence[np.ndarray], like: Tensor) -> list[Tensor]:
    """Return the arrays where `like` is, by one copy, in which the longest numbers come first: all are aligned."""
    order = sorted(range(len(arrays)), key=lambda number: -arrays[number].itemsize)
    parts = [np.ascontiguousarray(arrays[number]).reshape(-1).view(np.uint8) for number in order]
    memory = on_device(np.concatenate(parts), like).split([len(part) for part in parts])
    kinds = [torch.from_numpy(arrays[number]).dtype for number in order]
    # Each in memory of its own: torch.save refuses tensors that share some in several types.
    found = {number: part.view(kind).clone() for number, part, kind in zip(order, memory, kinds, strict=True)}
    return [found[number] for number in range(len(arrays))]


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return the tensor on the host, on a CPU without a copy."""
    try:
        return (tensor if tensor.is_cpu else tensor.cpu()).numpy()
    except RuntimeError:  # inside a torch.func transform a tensor has no storage of its own
        return np.asarray(tensor.tolist())
