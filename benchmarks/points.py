"""The working points of the training-step benchmark: network, batch, tolerance and precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from banach import Tolerance, WorstPixel, models


@dataclass(frozen=True)
class Point:
    """One of the paper's networks at one batch size, solved to `eps` in the authors' norm (worst pixel)."""

    name: str
    model: str
    batch: int
    eps: float
    max_steps: int
    precision: str  # the fastest of fp32, tf32 and bf16 that can meet eps
    relative: bool = False  # eps is relative to the latent: for banach alone, the peers have no such test

    @property
    def tolerance(self) -> Tolerance:
        atol, rtol = (0.0, self.eps) if self.relative else (self.eps, 0.0)
        return Tolerance(atol=atol, rtol=rtol, max_steps=self.max_steps, norm=WorstPixel())

    @property
    def recipe(self) -> Any:
        return models.recipe(self.model)


# TF32 and bf16 cannot meet SVHN's 1e-4: their rounding leaves a residual of about 1e-3.
POINTS = {
    point.name: point
    for point in (
        Point("mnist100", "mnist", 100, 1e-1, 50, "bf16"),
        Point("svhn100", "svhn", 100, 1e-4, 200, "fp32"),
        Point("cifar100", "cifar10", 100, 1e-1, 50, "bf16"),
        Point("cifar512", "cifar10", 512, 1e-1, 50, "bf16"),
        Point("svhn100-relative", "svhn", 100, 1e-2, 200, "bf16", relative=True),
    )
}
FOUR = ("mnist100", "svhn100", "cifar100", "cifar512")
