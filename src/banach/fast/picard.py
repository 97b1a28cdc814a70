"""PicardLoop: Picard's iteration on the device, which stops by itself and drops samples that have converged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from banach.latent import Latent, Space, leaves, leaves_like, map_leaves
from banach.solve import RMS, Euclidean, Picard, Solution, Tolerance
from banach.solve.device import CYCLE, before_loop, device_loop, loop_eagerly
from banach.solve.tolerance import are_finite, measure

LARGE = 1 << 20  # numbers in a latent from which on the batch is halved: a smaller one costs as much as its half
HALVINGS = 3


@dataclass(frozen=True)
class Samples:
    """Where the samples of a batch are. The tensors are written in place."""

    z: Latent
    v: Latent
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
        return Samples(z, v, active, numbers[0], numbers[1], torch.zeros_like(active, dtype=torch.int32))

    def select(self, index: Tensor) -> Samples:
        """Return copies of some samples."""
        z, v = (map_leaves(lambda leaf: leaf[index], nest) for nest in (self.z, self.v))
        return Samples(z, v, *(part[index] for part in self.numbers))

    def put(self, index: Tensor, part: Samples) -> None:
        """Write the samples of `part` back."""
        pairs = zip((*leaves(self.z), *self.numbers), (*leaves(part.z), *part.numbers), strict=True)
        for mine, other in pairs:
            mine[index] = other

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        return self.active, self.residual, self.allowed, self.steps


class PicardLoop:
    """z <- d z + (1 - d) R(z, v) until every sample meets the tolerance, or `max_steps`, without a host sync.

    A sample stops at its own step, as in `solve`. The loop ends at most CYCLE - 1 steps after the last sample. When
    half of a large batch has stopped, the other half goes on as a batch of its own, and so on.

    Args:
        R: the map.
        solver: gives the damping d.
        tolerance: when a sample stops.
        coupled: the samples stop as one.
    """

    def __init__(
        self, R: Callable[..., Latent], solver: Picard, tolerance: Tolerance, *, coupled: bool
    ) -> None:
        self.R, self.solver, self.tolerance, self.coupled = R, solver, tolerance, coupled
        self.halves = not coupled

    def __call__(self, z: Latent, v: Latent) -> Solution:
        """Return the fixed point from the start z. Captured inside `loops_by`; else with host syncs."""
        space = Space.of(z, coupled=self.coupled)
        everyone = Samples.start(map_leaves(_dense_copy, z), v, space.samples)
        most = self.tolerance.max_steps
        first = before_loop(most, CYCLE)
        for _ in range(first):
            self._step(everyone)
        if most > first:
            taken = torch.full((), first, dtype=torch.int32, device=space.device)
            self._go_on(everyone, taken, self._halvings(z, v, space))
        return self._solution(everyone, space)

    def _go_on(self, samples: Samples, taken: Tensor, halvings: int) -> None:
        """Iterate until all samples are done, the late ones as a smaller batch."""
        size = len(samples.active)
        least = size // 2 if halvings else 0
        loop = device_loop() or loop_eagerly
        limits = {"cycle": CYCLE, "most": self.tolerance.max_steps, "least": least}
        loop(lambda: self._steps(samples), samples.active, taken, **limits)
        if halvings:
            index = samples.active.sort(descending=True, stable=True).indices[:least]
            late = samples.select(index)
            self._go_on(late, taken, halvings - 1)
            samples.put(index, late)

    def _steps(self, samples: Samples) -> None:
        for _ in range(CYCLE):
            self._step(samples)

    def _step(self, samples: Samples) -> None:
        """Evaluate R. Move and measure every sample that is active."""
        Tz, norm = self.R(samples.z, samples.v), type(self.tolerance.norm)
        if samples.active.is_cuda and norm in (RMS, Euclidean) and not self.coupled:
            from banach.kernels import picard_step

            picard_step(samples, leaves_like(samples.z, Tz, "R"), self.tolerance, self.solver.damping)
            return
        space, damping = Space.of(samples.z, coupled=self.coupled), self.solver.damping
        residual, allowed = measure(space, self.tolerance, samples.z, Tz)
        active, finite = samples.active, are_finite(residual, allowed)
        for old, new in zip((samples.residual, samples.allowed), (residual, allowed), strict=True):
            torch.where(active, new.to(old.dtype), old, out=old)
        for old, new in zip(leaves(samples.z), leaves_like(samples.z, Tz, "R"), strict=True):
            moved = torch.lerp(new.to(old.dtype), old, damping) if damping else new
            keep = active.view(-1, *(1,) * (old.dim() - 1)) if old.dim() else active[0]
            old.copy_(torch.where(keep, moved, old))
        samples.steps.add_(active)
        active.logical_and_(finite & (residual > allowed))

    def _halvings(self, z: Latent, v: Latent, space: Space) -> int:
        """Return how often the batch may be halved."""
        parts = leaves(z)
        large = sum(part.numel() for part in parts) >= LARGE
        cut = all(part.dim() and len(part) == space.batch for part in (*parts, *leaves(v)))
        return HALVINGS if self.halves and large and cut and space.batch >= 2 << HALVINGS else 0

    def _solution(self, samples: Samples, space: Space) -> Solution:
        residual, allowed = samples.residual, samples.allowed
        numbers = residual, residual <= allowed, ~are_finite(residual, allowed), samples.steps.long()
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
