"""The settings a network was tuned with, as data: what a training loop is told, not the loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from banach.solve import RMS, Norm, Tolerance


class Schedule(Protocol):
    """How the learning rate changes over a run."""

    def multiplier(self, epoch: float, epochs: int) -> float:
        """What the learning rate is multiplied by when `epoch` of `epochs` epochs are done; fractions count."""
        ...


@dataclass(frozen=True)
class Constant:
    """1 throughout."""

    def multiplier(self, epoch: float, epochs: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Steps:
    """factor^k, k the number of milestones in `at` (in epochs) that are reached."""

    at: tuple[int, ...]
    factor: float

    def __post_init__(self) -> None:
        whole = isinstance(self.at, tuple) and all(type(epoch) is int and epoch >= 0 for epoch in self.at)
        if not whole or list(self.at) != sorted(self.at):
            raise ValueError(f"at must be epochs in ascending order, whole numbers from 0 on, got {self.at!r}")
        check_multiplier("factor", self.factor)

    def multiplier(self, epoch: float, epochs: int) -> float:
        return self.factor ** sum(epoch >= milestone for milestone in self.at)


def check_multiplier(name: str, value: object) -> None:
    """What multiplies a learning rate: a number, finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number, at least 0 and finite, got {value!r}")


@dataclass(frozen=True)
class Cosine:
    """(1 + cos(pi t)) / 2, t the share of the run that is done: from 1 down to 0."""

    def multiplier(self, epoch: float, epochs: int) -> float:
        return (1 + math.cos(math.pi * epoch / epochs)) / 2


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is solved (eps, max_steps, norm) and trained (the rest), with cross entropy.

    `momentum=None` is Adam, and a number is SGD with that momentum. Either way the weight decay is the one
    that is added to the gradient (`torch.optim.Adam`, not `AdamW`).
    """

    lr: float
    epochs: int
    batch_size: int
    weight_decay: float = 0.0
    momentum: float | None = None
    label_smoothing: float = 0.0
    schedule: Schedule = Constant()
    eps: float = 1e-4
    max_steps: int = 50
    norm: Norm = RMS()

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(atol=self.eps, max_steps=self.max_steps, norm=self.norm)
