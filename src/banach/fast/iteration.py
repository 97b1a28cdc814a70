"""Iteration: Picard or Anderson by fused kernels. It stops by itself and drops samples that have converged."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from banach import kernels
from banach.latent import Latent, Space, leaves, leaves_like, map_leaves, select
from banach.solve import Anderson, Picard, Solution, Tolerance, solve
from banach.solve.context import device_loop
from banach.solve.device import loop_eagerly, steps_before_loop
from banach.solve.solution import DEFERRED
from banach.solve.state import DIVERGED

# Numbers in a latent. In a larger one a step costs more than a test, and a batch twice as much as its half.
LARGE = 1 << 20
CYCLE = 4  # steps between two tests of the loop, in smaller ones
HALVINGS = 2  # each costs a sort and copies of late samples


@dataclass(frozen=True)
class Samples:
    """The samples that are iterated together, z and v, and numbers of the whole batch. All are written in place.

    All tensors but z and v have one entry per sample of the whole batch, and are shared by its parts; `index` maps
    rows of z to these entries.
    """

    z: Latent
    v: Latent
    index: Tensor | None  # which samples of the batch these are, None: all
    active: Tensor  # (samples,) of bool
    residual: Tensor
    least: Tensor  # the least residual so far
    allowed: Tensor
    steps: Tensor  # of int32
    arrived: Tensor  # of int32, zero between two steps: counts the programs of a kernel
    memory: Any = None  # what Anderson's kernels remember

    @staticmethod
    def start(z: Latent, v: Latent, samples: int, solver: Picard | Anderson) -> "Samples":
        first = leaves(z)[0]
        kind = torch.promote_types(first.dtype, torch.float32)
        residual, least, allowed = torch.full((3, samples), torch.inf, dtype=kind, device=first.device)
        active = torch.ones(samples, dtype=torch.bool, device=first.device)
        steps, arrived = torch.zeros((2, samples), dtype=torch.int32, device=first.device)
        memory = kernels.AndersonMemory.start(z, residual, solver.memory) if isinstance(solver, Anderson) else None
        return Samples(z, v, None, active, residual, least, allowed, steps, arrived, memory)


@dataclass(frozen=True)
class Iteration:
    """Iterate R, of independent samples, by kernels until every sample has stopped, without a host sync.

    A sample stops at its own step, as in `solve`; one that diverges keeps its last iterate. The loop ends at most
    CYCLE - 1 steps after the last sample, in a large batch at once. There, with `halves`, when half of the samples
    have stopped, the other half goes on as a smaller batch (Picard only: the memory of Anderson would have to be
    copied).
    """

    R: Callable[..., Latent]
    solver: Picard | Anderson
    tolerance: Tolerance  # in the norm RMS or Euclidean
    halves: bool = True

    def __call__(self, z: Latent, v: Latent) -> Solution:
        """Return the fixed point from the start z. Captured inside `loops_by`; else with host syncs."""
        space, most = Space.of(z), self.tolerance.max_steps
        if space.coupled or (isinstance(self.solver, Anderson) and not isinstance(z, Tensor)):  # no kernels for it
            return solve(self.R, z, self.solver, inputs=(v,), tolerance=self.tolerance)
        cycle = CYCLE if sum(leaf.numel() for leaf in leaves(z)) < LARGE else 1
        # At check_every=0 all steps are taken before the loop, so there is no loop.
        first = most if self.tolerance.check_every == 0 else steps_before_loop(most, cycle)
        Tz = self.R(z, v)
        space.check(Tz)
        everyone = Samples.start(map_leaves(_in_layout_of, z, Tz), v, space.samples, self.solver)
        self._move(everyone, Tz)
        for _ in range(first - 1):
            self._move(everyone, self.R(everyone.z, v))
        if most > first:
            taken = torch.full((), first, dtype=torch.int32, device=space.device)
            splits = self.halves and cycle == 1 and everyone.memory is None
            parts = (*leaves(everyone.z), *leaves(v))
            cut = splits and all(part.shape[:1] == (space.batch,) for part in parts)
            halves = [space.batch >> number for number in range(1, HALVINGS + 1)] if cut else [0]
            self._iterate(everyone, everyone, taken, halves if halves[-1] > 1 else [], cycle)
        return self._solution(everyone)

    def _iterate(self, everyone: Samples, samples: Samples, taken: Tensor, halves: list[int], cycle: int) -> None:
        """Iterate these samples until all are done, the late ones as smaller batches."""
        loop, most = device_loop() or loop_eagerly, self.tolerance.max_steps
        stop_at = halves[0] if halves else 0

        def steps() -> None:
            for _ in range(cycle):
                self._move(samples, self.R(samples.z, samples.v))

        def iterate_late() -> None:
            index = everyone.active.sort(descending=True).indices[:stop_at]  # all active ones are among them
            late = replace(everyone, z=select(everyone.z, index), v=select(everyone.v, index), index=index)
            self._iterate(everyone, late, taken, halves[1:], cycle)

        loop(steps, samples.active, taken, cycle=cycle, max_steps=most, stop_at=stop_at)
        if samples.index is not None:  # a part of the batch, which is written back
            for all_of_them, late in zip(leaves(everyone.z), leaves(samples.z), strict=True):
                all_of_them.index_copy_(0, samples.index, late)
        if halves:  # an `if` on the device, written as a loop: its body leaves no sample active or no step
            loop(iterate_late, everyone.active, taken, cycle=0, max_steps=most, stop_at=0)

    def _move(self, samples: Samples, Tz: Latent) -> None:
        """Measure and move every sample that is active."""
        parts = list(zip(leaves(samples.z), leaves_like(samples.z, Tz, "R"), strict=True))
        if isinstance(self.solver, Anderson):
            kernels.anderson_step(samples, *parts[0], self.solver, self.tolerance)
        else:
            kernels.picard_step(samples, parts, self.tolerance, self.solver.damping)

    def _solution(self, samples: Samples) -> Solution:
        """Return the Solution. Its tensors are made when they are read: most steps never need them."""
        residual, least, allowed, steps = samples.residual, samples.least, samples.allowed, samples.steps

        def per_sample() -> dict[str, Tensor]:
            finite = residual.isfinite() & allowed.isfinite()
            met, none = finite & (residual <= allowed), torch.zeros_like(finite)
            diverged = finite & ~met & (residual > DIVERGED * least)
            parts = residual, met, steps.long(), none, ~finite & (steps > 0), diverged
            return dict(zip(DEFERRED, parts, strict=True))

        return Solution.deferred(samples.z, per_sample, {"solver": self.solver, "tolerance": self.tolerance})


def _in_layout_of(leaf: Tensor, value: Tensor) -> Tensor:
    """Return a copy of z in the memory format of T(z), in which every sample is one piece of memory."""
    dense = value.stride(0) == value[:1].numel()
    copy = torch.empty_like(value, dtype=leaf.dtype) if dense else torch.empty_like(leaf.contiguous())
    return copy.copy_(leaf)
