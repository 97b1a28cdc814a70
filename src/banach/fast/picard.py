"""PicardLoop: Picard's iteration on the device, which stops by itself and drops samples that have converged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from banach.latent import Latent, Space, leaves, leaves_like, map_leaves, select
from banach.solve import Picard, Solution, Tolerance
from banach.solve.device import CYCLE, before_loop, device_loop, loop_eagerly
from banach.solve.tolerance import are_finite, measure

LARGE = 1 << 20  # numbers in a latent from which on the batch is halved: a smaller one costs as much as its half
HALVINGS = 2  # each costs about 25 microseconds


@dataclass(frozen=True)
class Samples:
    """Samples that are iterated together, and numbers of all samples of the batch. All are written in place."""

    z: Latent
    v: Latent
    index: Tensor | None  # which samples of the batch these are, None: all
    active: Tensor  # (samples,) of bool; one number if they are coupled
    residual: Tensor
    allowed: Tensor
    steps: Tensor  # of int32

    @staticmethod
    def start(z: Latent, v: Latent, samples: int) -> Samples:
        first = leaves(z)[0]
        kind = torch.float64 if first.dtype == torch.float64 else torch.float32
        numbers = torch.full((2, samples), torch.inf, dtype=kind, device=first.device)
        active = torch.ones(samples, dtype=torch.bool, device=first.device)
        return Samples(z, v, None, active, numbers[0], numbers[1], torch.zeros_like(active, dtype=torch.int32))

    def late(self, count: int) -> Samples:
        """Return copies of so many samples, those that are active among them."""
        index = self.active.sort(descending=True).indices[:count]
        return replace(self, z=select(self.z, index), v=select(self.v, index), index=index)

    def put(self, part: Samples) -> None:
        """Write the iterates of a part of the batch back."""
        assert part.index is not None
        for mine, other in zip(leaves(self.z), leaves(part.z), strict=True):
            mine.index_copy_(0, part.index, other)


class PicardLoop:
    """z <- d z + (1 - d) R(z, v) until every sample meets the tolerance, or `max_steps`, without a host sync.

    A sample stops at its own step, as in `solve`. The loop ends at most CYCLE - 1 steps after the last sample.
    When half of a large batch has stopped, the other half goes on as a batch of its own, and so on.

    Args:
        R: the map.
        solver: gives the damping d.
        tolerance: when a sample stops.
        coupled: the samples stop as one.
        fused: a kernel measures and moves the samples; for independent samples in the norm RMS or Euclidean.
    """

    def __init__(
        self,
        R: Callable[..., Latent],
        solver: Picard,
        tolerance: Tolerance,
        *,
        coupled: bool = False,
        fused: bool = False,
    ) -> None:
        self.R, self.solver, self.tolerance = R, solver, tolerance
        self.coupled, self.fused = coupled, fused

    def __call__(self, z: Latent, v: Latent) -> Solution:
        """Return the fixed point from the start z. Captured inside `loops_by`; else with host syncs."""
        space, most = Space.of(z, coupled=self.coupled), self.tolerance.max_steps
        everyone = Samples.start(map_leaves(_dense_copy, z), v, space.samples)
        first = before_loop(most, CYCLE)
        for _ in range(first):
            self._step(everyone)
        if most > first:
            taken = torch.full((), first, dtype=torch.int32, device=space.device)
            self._go_on(everyone, taken, self._halves(everyone, space))
        return self._solution(everyone, space)

    def _go_on(self, everyone: Samples, taken: Tensor, halves: list[int]) -> None:
        """Iterate until all samples are done, the late ones as smaller batches."""
        samples = everyone
        for least in (*halves, 0):
            self._loop(samples, taken, least)
            if samples is not everyone:
                everyone.put(samples)
            if least:
                samples = everyone.late(least)

    def _loop(self, samples: Samples, taken: Tensor, least: int) -> None:
        def body() -> None:
            for _ in range(CYCLE):
                self._step(samples)

        loop = device_loop() or loop_eagerly
        loop(body, samples.active, taken, cycle=CYCLE, most=self.tolerance.max_steps, least=least)

    def _step(self, samples: Samples) -> None:
        """Evaluate R. Move and measure every sample that is active."""
        Tz, damping = self.R(samples.z, samples.v), self.solver.damping
        parts = list(zip(leaves(samples.z), leaves_like(samples.z, Tz, "R"), strict=True))
        if self.fused:
            from banach.kernels import picard_step

            picard_step(samples, parts, self.tolerance, damping)
            return
        residual, allowed = measure(Space.of(samples.z, coupled=self.coupled), self.tolerance, samples.z, Tz)
        index, active = samples.index, samples.active if samples.index is None else samples.active[samples.index]
        for z, value in parts:
            moved = torch.lerp(value.to(z.dtype), z, damping) if damping else value
            z.copy_(torch.where(active.view(-1, *(1,) * (z.dim() - 1)) if z.dim() else active[0], moved, z))
        goes_on = active & are_finite(residual, allowed) & (residual > allowed)
        _write(samples.residual, index, active, residual)
        _write(samples.allowed, index, active, allowed)
        samples.steps.add_(samples.active)
        _write(samples.active, index, active, goes_on)

    def _halves(self, samples: Samples, space: Space) -> list[int]:
        """Return the sizes of the smaller batches."""
        parts = leaves(samples.z)
        large = sum(part.numel() for part in parts) >= LARGE
        cut = all(part.dim() and len(part) == space.batch for part in (*parts, *leaves(samples.v)))
        sizes = [space.batch >> number for number in range(1, HALVINGS + 1)]
        return sizes if large and cut and not self.coupled and sizes[-1] > 1 else []

    def _solution(self, samples: Samples, space: Space) -> Solution:
        residual, allowed, steps = samples.residual, samples.allowed, samples.steps
        nonfinite = ~are_finite(residual, allowed) & (steps > 0)
        numbers = residual, (residual <= allowed) & (residual < torch.inf), nonfinite, steps.long()
        return solution_of(self, samples.z, *(space.spread(part) for part in numbers))


def solution_of(
    of: Any, value: Latent, residual: Tensor, converged: Tensor, nonfinite: Tensor, steps: Tensor
) -> Solution:
    """Return the Solution of a loop without host checks, which calls no sample stalled or diverged.

    Args:
        of: what has the `solver` and the `tolerance`.
        value, residual, converged, nonfinite, steps: as in `Solution`.
    """
    none = _false(residual.device).expand(len(residual))
    found = value, residual, converged, steps, none, nonfinite, none
    return Solution(*found, solver=of.solver, tolerance=of.tolerance)


def _write(numbers: Tensor, index: Tensor | None, active: Tensor, new: Tensor) -> None:
    """Write the numbers of the active samples."""
    old = numbers if index is None else numbers[index]
    new = torch.where(active, new.to(old.dtype), old)
    numbers.copy_(new) if index is None else numbers.index_copy_(0, index, new)


def _dense_copy(leaf: Tensor) -> Tensor:
    """Return a copy in which every sample is one piece of memory."""
    copy = leaf.clone()
    return copy if not copy.dim() or copy.stride(0) == copy[:1].numel() else copy.contiguous()


_FALSE: dict[torch.device, Tensor] = {}


def _false(device: torch.device) -> Tensor:
    """Return a constant on the device, made once: a captured step needs no kernel for it."""
    if device not in _FALSE:
        with torch.inference_mode(False):
            _FALSE[device] = torch.zeros((), dtype=torch.bool, device=device)
    return _FALSE[device]
