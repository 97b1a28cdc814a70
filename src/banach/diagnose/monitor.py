"""A watch on the contraction during training: it measures and warns, and never edits weights."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from banach import checks
from banach.diagnose.contraction import Contraction, measure_contraction, worst
from banach.diagnose.summary import verdict


class ContractionWarning(RuntimeWarning):
    """T does not contract on real data: the paper's Assumption is violated there."""


@dataclass(frozen=True)
class ContractionReading:
    """One measurement in short: at which call, over how many samples, and the worst of each figure."""

    call: int
    samples: int
    violations: int
    sigma: float
    rate: float


class ContractionMonitor:
    """monitor(net, d) in a training loop: measures at every `every`-th call, from the first on.

    Warns with `ContractionWarning` when the contraction is violated on the data (sigma_max(dT/du) >= 1, or
    residuals that do not shrink), once per run (`once=False`: every time). `samples` is how many of the batch
    are measured (None: all). With batch norm in train mode they are normalised by themselves, as a batch of
    that size would be. `history` holds a `ContractionReading` per measurement.
    """

    def __init__(self, *, samples: int | None = 8, every: int = 1, once: bool = True, seed: int = 0) -> None:
        checks.whole("every", every, 1)
        if samples is not None:
            checks.whole("samples", samples, 1)
        self.samples, self.every, self.once, self.seed = samples, every, once, seed
        self.calls = 0
        self.warned = False
        self.history: list[ContractionReading] = []

    def __call__(self, net: Any, d: Any) -> Contraction | None:
        """The measurement, or None at a call between two."""
        self.calls += 1
        if (self.calls - 1) % self.every:
            return None
        few = tree_map_only(Tensor, lambda leaf: leaf[: self.samples], d)
        measured = measure_contraction(net, few, seed=self.seed)
        sigma = float(measured.sigma.max()) if len(measured.sigma) else float("nan")
        figures = len(measured.sigma), measured.violations, sigma, worst(measured.rate)
        self.history.append(ContractionReading(self.calls, *figures))
        if measured.violations and not (self.once and self.warned):
            self.warned = True
            warnings.warn(verdict(measured), ContractionWarning, stacklevel=2)
        return measured
