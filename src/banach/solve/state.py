"""The state of a running solve: iterates, the numbers kept per sample, and the solver's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from banach.latent import Space
from banach.solve.solution import Solution
from banach.solve.solver import Memory
from banach.solve.tolerance import Tolerance

DIVERGED = 10  # times its least residual: the end of an iteration that diverges
IDLE = 10  # evaluations without a new least residual before a sample may be called stalled


class Seen(NamedTuple):
    """What one host check sees: masks over the samples."""

    active: np.ndarray
    nonfinite: np.ndarray
    idle: np.ndarray  # active, and no new least residual in the last IDLE evaluations
    risen: np.ndarray  # converged, frozen, and above the tolerance at the last evaluation
    now: np.ndarray  # the residual at the last evaluation
    now_test: np.ndarray  # what was compared with atol there
    residual: np.ndarray


@dataclass
class State:
    """One row per sample. The numbers of a sample stand in columns, so one kernel moves all of them:
    `reached`, `best` and `now` have rows (residual, step) and, with a relative tolerance, (excess): residual minus
    its relative part. `reached` stops changing when a sample freezes; `best` is at the least residual; `now` is
    the last evaluation, of frozen samples too.
    """

    z: Tensor  # (samples, width)
    best_z: Tensor  # the iterate whose own residual is least
    active: Tensor  # (samples,)
    stats: Tensor  # (3, 2 or 3, samples): reached, best, now
    memory: Memory
    stalled: Tensor | None = None
    Tz: Tensor | None = None

    def __post_init__(self) -> None:
        # Views, made once: `stats` is only ever written in place.
        self.reached, self.best, self.now = self.stats[0], self.stats[1], self.stats[2]
        self.residual, self.least, self.least_at = self.reached[0], self.best[0], self.best[1]
        self.test = self.reached[2 if self.stats.shape[1] == 3 else 0]  # what is compared with atol
        self.better, self.z_before = self.active, self.z  # of the last evaluation: new least residual; where

    @staticmethod
    def start(z: Tensor, memory: Memory, *, relative: bool) -> State:
        stats = z.new_full((3, 3 if relative else 2, z.shape[0]), torch.inf)
        stats[:, 1] = 0
        active = torch.ones(z.shape[0], dtype=torch.bool, device=z.device)
        return State(z, z.clone(), active, stats, memory)

    def to_carry(self) -> tuple[Tensor, ...]:
        """Return the tensors that `carried` makes this state of; their first axis is the sample."""
        return (self.z, self.best_z, self.active, self.stats.permute(2, 0, 1).contiguous(), *self.memory)

    @staticmethod
    def carried(z: Tensor, best_z: Tensor, active: Tensor, stats: Tensor, *memory: Tensor) -> State:
        """Return the state again, from the tensors of `to_carry` or from some samples of them."""
        best_z, active, *memory_now = (part.clone() for part in (best_z, active, *memory))
        stats = stats.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
        return State(z, best_z, active, stats, tuple(memory_now))

    @property
    def nonfinite(self) -> Tensor:
        """(samples,): the residual was not finite (NaN), or the norm of T(z) was not (minus infinity)."""
        return ~(self.test > -torch.inf)

    def observe(self, step: int | Tensor, residual: Tensor, relative: tuple[Tensor, float] | None) -> None:
        """Record the residual of z at this step for the active samples, and where it is their least."""
        now = self.now
        # Infinity becomes NaN: then `<=`, `<` and `>` are all false for a nonfinite residual.
        torch.nan_to_num(residual, nan=torch.nan, posinf=torch.nan, out=now[0])
        now[1].fill_(step)
        if relative is not None:
            torch.sub(now[0], relative[0], alpha=relative[1], out=now[2])
        torch.where(self.active, now, self.reached, out=self.reached)
        self.better = self.residual < self.least
        torch.where(self.better, self.reached, self.best, out=self.best)

    def keep_best(self) -> None:
        """Remember the iterate that T was evaluated at last, where its residual is the least so far."""
        torch.where(self.better.unsqueeze(1), self.z_before, self.best_z, out=self.best_z)

    def advance(self, proposal: Tensor) -> None:
        """Move the active samples."""
        self.z_before = self.z
        self.z = torch.where(self.active.unsqueeze(1), proposal, self.z)

    def freeze(self, atol: float) -> None:
        """Samples that met the tolerance or left the finite numbers are active no more."""
        torch.gt(self.test, atol, out=self.active)
        if self.stalled is not None:
            self.active &= ~self.stalled

    def on_host(self, step: int, atol: float) -> Seen:
        """Copy the few numbers per sample to the host, once: one round trip whatever is asked of them."""
        stats = to_numpy(self.stats)
        tested = 2 if len(stats[0]) == 3 else 0
        residual, best_step, test, now_test = stats[0, 0], stats[1, 1], stats[0, tested], stats[2, tested]
        active = test > atol
        if self.stalled is not None:
            active &= ~to_numpy(self.stalled)
        idle = active & (best_step <= step - IDLE)
        risen = (test <= atol) & ~(now_test <= atol)
        return Seen(active, ~(test > -np.inf), idle, risen, stats[2, 0], now_test, residual)

    def stall(self, flat: np.ndarray) -> None:
        """Freeze these samples where they are: they move no more, and not because they met the tolerance."""
        mask = on_device(flat, self.active)
        self.stalled = mask if self.stalled is None else self.stalled | mask
        self.active &= ~mask

    def scrub(self) -> None:
        """Put the best finite iterate in place of one at which T was not finite, so T never sees NaN."""
        self.z = torch.where(self.nonfinite[:, None], self.best_z, self.z)

    def take(self, chosen: np.ndarray) -> State:
        """The samples with these numbers, as a state of their own."""
        index = on_device(chosen, self.z)
        return State(
            self.z.index_select(0, index),
            self.best_z.index_select(0, index),
            self.active.index_select(0, index),
            self.stats.index_select(2, index),
            tuple(part.index_select(0, index) for part in self.memory),
            None if self.stalled is None else self.stalled.index_select(0, index),
        )

    def put(self, chosen: np.ndarray, part: State) -> None:
        """Write the samples of `part` back to these numbers; the solver's memory is not needed again."""
        index = on_device(chosen, self.z)
        self.z = self.z.index_copy(0, index, part.z)  # new tensors: `on_step` may have kept the old ones
        self.best_z = self.best_z.index_copy(0, index, part.best_z)
        self.active.index_copy_(0, index, part.active)
        self.stats.index_copy_(2, index, part.stats)
        if part.stalled is not None:
            if self.stalled is None:
                self.stalled = torch.zeros_like(self.active)
            self.stalled.index_copy_(0, index, part.stalled)


def finish(
    state: State, space: Space, tolerance: Tolerance, trace: list[Tensor] | None = None, **known: Any
) -> Solution:
    """Return the solution a state stands for: scaled residuals, and the best iterate where that is kept.

    `known` are the fields that the host sets.
    """
    scale = tolerance.norm.scale(space)
    nonfinite = state.nonfinite
    stalled = torch.zeros_like(nonfinite) if state.stalled is None else state.stalled
    met = state.test <= tolerance.atol / scale  # minus infinity, too, which is not finite
    converged, diverged = met & ~nonfinite, (state.residual > DIVERGED * state.least) & ~(met | stalled)
    best = nonfinite | diverged
    return Solution(
        value=space.nest(torch.where(best[:, None], state.best_z, state.z)),
        residual=space.spread(torch.where(best, state.least, state.residual) * scale),
        converged=space.spread(converged),
        steps=space.spread(state.reached[1].long()),
        stalled=space.spread(stalled),
        nonfinite=space.spread(nonfinite),
        diverged=space.spread(diverged),
        residuals=None if trace is None else tuple(space.spread(row * scale) for row in trace),
        tolerance=tolerance,
        **known,
    )


def rises_alone(now: np.ndarray, test: np.ndarray, before: np.ndarray, atol: float) -> np.ndarray:
    """Return which frozen samples may be above the tolerance without any other sample.

    Where T expands, the last step of a sample can raise its residual a little, to a value that then stays the same
    at every evaluation. `before` is an earlier value, NaN if there is none.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # samples that diverge have infinite residuals
        steady = np.abs(now - before) <= 1e-3 * np.abs(before)
        return steady & (now <= 10 * (now - test + atol))  # 10 times what the tolerance allows


def on_device(values: np.ndarray, like: Tensor) -> Tensor:
    """The array where `like` is. It may share the array's memory: do not write to that again."""
    tensor = torch.from_numpy(values)
    if like.is_cpu:
        return tensor
    if like.is_cuda:  # from pinned memory, so that nobody waits for the copy
        return tensor.pin_memory().to(like.device, non_blocking=True)
    return tensor.to(like.device)


def all_on_device(arrays: Sequence[np.ndarray], like: Tensor) -> list[Tensor]:
    """The arrays where `like` is, by one copy if that is not here."""
    if like.is_cpu:
        return [torch.from_numpy(array) for array in arrays]
    if not any(map(len, arrays)):
        return [on_device(array, like) for array in arrays]
    return together(arrays, like)


def together(arrays: Sequence[np.ndarray], like: Tensor) -> list[Tensor]:
    """The arrays where `like` is, by one copy, in which the longest numbers come first, so that all lie evenly."""
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
        return tensor.cpu().numpy()
    except RuntimeError:  # inside a torch.func transform a tensor has no storage of its own
        return np.asarray(tensor.tolist())
