"""Found: what a stage of a prediction leaves for the next one, and for the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from banach.solve import Solution


@dataclass(frozen=True, eq=False)
class Found:
    """What a stage leaves, per sample: v = Q(d), iterate z, u = T(z), output, and what a `Solution` says of it.

    `carried`: what the next stage needs to go on. By Picard that is the last iterate, the best one, to keep where
    a sample diverges, and the residual of the best one.
    """

    v: Tensor
    z: Tensor
    u: Tensor
    y: Tensor
    residual: Tensor
    converged: Tensor
    nonfinite: Tensor
    steps: Tensor
    carried: tuple[Tensor, ...] = ()

    def ask(self) -> tuple[Tensor, int]:
        """Which samples are to go on, and how many are not finite: those will not get better. One round trip."""
        converged, nonfinite = torch.stack((self.converged, self.nonfinite)).cpu()
        late = (~converged & ~nonfinite).nonzero()[:, 0]
        return late.to(self.z.device), int(nonfinite.sum())

    def of(self, index: Tensor | slice) -> Found:
        made = self._each(lambda part: part[index])
        return replace(made, carried=tuple(part[index] for part in self.carried))

    def copy(self) -> Found:
        """Without what is carried: the next stage writes over a program's own tensors."""
        return replace(self._each(torch.clone), carried=())

    def put(self, index: Tensor, later: Found) -> None:
        """Samples that have gone on."""
        for mine, other in zip(self._parts(), later._parts(), strict=True):
            mine[index] = other

    def solution(self) -> Solution:
        return Solution(
            value=self.z,
            residual=self.residual,
            converged=self.converged,
            steps=self.steps,
            stalled=torch.zeros_like(self.nonfinite),
            nonfinite=self.nonfinite,
            diverged=torch.zeros_like(self.nonfinite),
        )

    def _each(self, change: Callable[[Tensor], Tensor]) -> Found:
        v, z, u, y, residual, converged, nonfinite, steps = map(change, self._parts())
        return Found(v, z, u, y, residual, converged, nonfinite, steps, self.carried)

    def _parts(self) -> tuple[Tensor, ...]:
        return self.v, self.z, self.u, self.y, self.residual, self.converged, self.nonfinite, self.steps
