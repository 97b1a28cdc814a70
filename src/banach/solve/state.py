"""The state of a running solve: iterates, the numbers kept per sample, and the solver's memory.

The numbers are NumPy arrays if the host sees every residual, else tensors on the device. NumPy is faster for a few
numbers, and on a GPU it saves the launch of several small kernels per step. The arithmetic is the same.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from banach.solve.solver import Memory

Array = Any  # np.ndarray on the host, Tensor on the device
# np.count_nonzero without its dispatch in Python, which takes longer than the count.
count_nonzero: Callable[[np.ndarray], int] = (getattr(np, "_core", None) or np.core).multiarray.count_nonzero

# `State.stats[kind, number, sample]`. Kinds: the evaluation at which the sample froze, or the last one until then;
# the one with its least residual; the last one, of frozen samples too; the limit (RESIDUAL only).
REACHED, BEST, NOW, LIMIT = range(4)
# Numbers: the residual; the evaluation's number; with a relative tolerance, residual - rtol * norm(T(z)).
RESIDUAL, STEP, EXCESS = range(3)

DIVERGED = 10  # times its least residual: the end of an iteration that diverges
IDLE = 10  # evaluations without a new least residual before a sample may be called stalled


@dataclass
class State:
    """One row per sample. Arrays of numbers are written in place.

    Residuals are in the units of `norm.measure`, and NaN if they are not finite: then `<=`, `<` and `>` are all
    False. A sample is active while its EXCESS, or without a relative tolerance its RESIDUAL (`tested` says which),
    is above its limit: the absolute tolerance, or infinity once it has stalled.
    """

    z: Tensor  # (samples, width)
    best_z: Tensor  # the iterate whose own residual is least, of samples that may still need it
    active: Array  # (samples,)
    stats: Array  # (4, 2 or 3, samples): REACHED, BEST, NOW and LIMIT, of each RESIDUAL, STEP and EXCESS
    memory: Memory
    Tz: Tensor | None = None

    def __post_init__(self) -> None:
        self.on_host = isinstance(self.stats, np.ndarray)
        self.reached, self.best, self.now = self.stats[REACHED], self.stats[BEST], self.stats[NOW]
        self.residual, self.steps = self.reached[RESIDUAL], self.reached[STEP]
        self.least, self.least_at = self.best[RESIDUAL], self.best[STEP]
        self.tested = EXCESS if self.stats.shape[1] > EXCESS else RESIDUAL
        self.test, self.limit = self.reached[self.tested], self.stats[LIMIT, RESIDUAL]
        self.pending: tuple[Tensor, Tensor] | None = None  # T(z) - z and its norm, if T is known at z already
        # The number of active samples, if the host knows it.
        self.count = count_nonzero(self.active) if self.on_host else -1

    @staticmethod
    def start(z: Tensor, memory: Memory, limit: float, *, relative: bool, on_host: bool) -> "State":
        shape = (4, 3 if relative else 2, z.shape[0])  # not len(z), which export takes for a constant
        if on_host:
            unknown, everyone = _at_start(shape, limit, np.float64 if z.dtype == torch.float64 else np.float32)
            return State(z, z, everyone.copy(), unknown.copy(), memory)
        stats = z.new_full(shape, torch.inf)
        stats[:, STEP], stats[LIMIT] = 0, limit
        return State(z, z.clone(), stats[BEST, RESIDUAL] > 0, stats, memory)

    def read(self) -> "State":
        """Return the state with its numbers on the host: itself, if they are there already."""
        if self.on_host:
            return self
        stats = to_numpy(self.stats)
        return State(self.z, self.best_z, stats[REACHED, self.tested] > stats[LIMIT, RESIDUAL], stats, ())

    @property
    def nonfinite(self) -> Array:
        """(samples,): the residual was not finite (NaN), or the norm of T(z) was not (minus infinity)."""
        return ~(self.test > -np.inf)

    def column(self, chosen: Array) -> Tensor:
        """Return a mask of samples as (samples, 1) on the device. On a CPU it shares the memory of an array."""
        return (on_device(chosen, self.z) if self.on_host else chosen).unsqueeze(1)

    def observe(self, step: Any, residual: Array, relative: tuple[Tensor, float] | None) -> None:
        """Record the residual of z at this step for the active samples. Keep z where it is their least."""
        self._write(step, residual, relative)
        _put(self.reached, self.now, self.active)
        better = self.residual < self.least
        _put(self.best, self.reached, better)
        self._keep_best(better)

    def record(self, step: int | np.ndarray, residual: np.ndarray, test: np.ndarray, active: np.ndarray) -> None:
        """Record finite residuals and who is active now."""
        now = self.now
        now[self.tested], now[RESIDUAL], now[STEP] = test, residual, step
        np.copyto(self.reached, now, where=self.active)
        self.active, self.count = active, count_nonzero(active)

    def _write(self, step: Any, residual: Array, relative: tuple[Tensor, float] | None) -> None:
        """Write the numbers of this evaluation to `now`."""
        now = self.now
        if not self.on_host:
            torch.nan_to_num(residual, nan=torch.nan, posinf=torch.nan, out=now[RESIDUAL])
            now[STEP].fill_(step)
            if relative is not None:
                torch.sub(now[RESIDUAL], relative[0], alpha=relative[1], out=now[EXCESS])
            return
        if relative is not None:
            residual = torch.stack((residual, torch.sub(residual, relative[0], alpha=relative[1])))
        now[RESIDUAL : EXCESS + 1 : EXCESS] = to_numpy(residual)
        now[STEP] = step
        np.copyto(now, np.nan, where=now == np.inf)

    def _keep_best(self, better: Array) -> None:
        """By reference where it can be: samples that froze at a finite residual do not need their best iterate."""
        if not self.on_host:
            torch.where(better.unsqueeze(1), self.z, self.best_z, out=self.best_z)
            return
        count = count_nonzero(better)
        if count == self.count and not count_nonzero(self.nonfinite):
            self.best_z = self.z
        elif count:
            self.best_z = torch.where(self.column(better), self.z, self.best_z)

    def for_solver(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return residual, least residual and the evaluation that gave it, as tensors on the device."""
        if not self.on_host:
            return self.residual, self.least, self.least_at
        stats = on_device(self.stats[: BEST + 1].copy(), self.z)  # a copy: a solver may keep it
        return stats[REACHED, RESIDUAL], stats[BEST, RESIDUAL], stats[BEST, STEP]

    def advance(self, proposal: Tensor) -> None:
        """Move the active samples."""
        if self.on_host and self.count == len(self.z):
            # A copy of T(z): T may write its next value into the same memory.
            self.z = proposal.clone() if proposal is self.Tz else proposal
        else:
            self.z = torch.where(self.column(self.active), proposal, self.z)

    def freeze(self) -> None:
        """Deactivate samples that met the tolerance, stalled, or whose residual is not finite."""
        (np.greater if self.on_host else torch.gt)(self.test, self.limit, out=self.active)
        self.count = count_nonzero(self.active) if self.on_host else -1

    def stall(self, flat: np.ndarray) -> None:
        """Freeze these samples where they are, above the tolerance."""
        self.limit[flat if self.on_host else on_device(flat, self.z)] = np.inf
        self.freeze()

    def take(self, chosen: np.ndarray) -> "State":
        """Return the samples with these indices as a separate state."""
        index = on_device(chosen, self.z)
        here: Any = chosen if self.on_host else index
        z, best_z, *memory = (part.index_select(0, index) for part in (self.z, self.best_z, *self.memory))
        return State(z, best_z, self.active[here], self.stats[:, :, here], tuple(memory))

    def put(self, chosen: np.ndarray, part: "State") -> None:
        """Write the samples of `part` back to these indices. The solver's memory is not needed again."""
        index = on_device(chosen, self.z)
        here: Any = chosen if self.on_host else index
        self.z = self.z.index_copy(0, index, part.z)  # new tensors: `on_step` may have kept the old ones
        self.best_z = self.best_z.index_copy(0, index, part.best_z)
        self.active[here] = part.active
        self.stats[:, :, here] = part.stats

    def to_carry(self) -> tuple[Tensor, ...]:
        """Return the tensors that `carried` makes this state of; their first axis is the sample."""
        return (self.z, self.best_z, self.active, self.stats.permute(2, 0, 1).contiguous(), *self.memory)

    @staticmethod
    def carried(z: Tensor, best_z: Tensor, active: Tensor, stats: Tensor, *memory: Tensor) -> "State":
        """Return the state again, from the tensors of `to_carry` or from some samples of them."""
        best_z, active, *remembered = (part.detach().clone() for part in (best_z, active, *memory))
        stats = stats.detach().permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
        return State(z.detach(), best_z, active, stats, tuple(remembered))


@functools.lru_cache(maxsize=64)
def _at_start(shape: tuple[int, ...], limit: float, kind: type) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of a state before the first evaluation, and which samples are active: copy both."""
    stats: np.ndarray = np.full(shape, np.inf, kind)
    stats[:, STEP], stats[LIMIT] = 0, limit
    return stats, np.ones(shape[2], bool)


def _put(target: Array, source: Array, where: Array) -> None:
    """Write `source` to `target`, in place, where the mask is True."""
    if isinstance(target, np.ndarray):
        np.copyto(target, source, where=where)
    else:
        torch.where(where, source, target, out=target)


def on_device(values: np.ndarray, like: Tensor) -> Tensor:
    """Return the array where `like` is. It may share the array's memory: do not write to that again."""
    tensor = torch.from_numpy(values)
    # CUDA stages small copies from pageable memory, so the host does not wait.
    return tensor if like.is_cpu else tensor.to(like.device, non_blocking=like.is_cuda)


def to_numpy(values: Array) -> np.ndarray:
    """Return the values on the host, on a CPU without a copy."""
    if isinstance(values, np.ndarray):
        return values
    try:
        return (values if values.is_cpu else values.cpu()).numpy()
    except RuntimeError:  # inside a torch.func transform a tensor has no storage; torch 2.6 has no tolist there
        return np.asarray([value.item() for value in values.reshape(-1)]).reshape(tuple(values.shape))
