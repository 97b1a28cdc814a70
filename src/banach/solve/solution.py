"""What a solve found: the value, how far it got, and why each sample stopped."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from banach.latent import Latent


class Status(enum.Enum):
    """Why a sample stopped; the value is the sentence a user reads."""

    CONVERGED = "converged: the residual met the tolerance"
    MAX_STEPS = "stopped at max_steps above the tolerance: allow more steps, loosen the tolerance or use Anderson"
    STALLED = (
        "stalled at the rounding of the arithmetic, above the tolerance: "
        "loosen the tolerance or compute in higher precision (TF32 and bfloat16 cannot meet 1e-4)"
    )
    NONFINITE = (
        "T gave NaN or infinity: the best finite iterate is kept; "
        "check the data for NaN, and whether T contracts (banach.contraction_factor)"
    )


class NotConverged(RuntimeError):
    """Raised by `solve(..., throw=True)`; `solution` holds what was found."""

    def __init__(self, solution: Solution) -> None:
        super().__init__(solution.summary())
        self.solution = solution

    def __reduce__(self) -> tuple[type[NotConverged], tuple[Solution]]:
        return type(self), (self.solution,)  # an exception is otherwise rebuilt from its message


@dataclass(frozen=True, eq=False)
class Solution:
    """After n steps `value` is z_n and `residual` is the norm of T(z_{n-1}) - z_{n-1}, per sample.

    The tensors stay on the device and cost no host round trip; `status` and `trace` ask the host.
    """

    value: Latent
    residual: Tensor
    converged: Tensor
    steps: Tensor
    stalled: Tensor = field(repr=False)
    nonfinite: Tensor = field(repr=False)
    residuals: tuple[Tensor, ...] | None = field(default=None, repr=False)
    nonfinite_seen: int = field(default=0, repr=False)  # how many the host knows of: costs no round trip

    @property
    def status(self) -> tuple[Status, ...]:
        """One `Status` per sample."""
        code = torch.where(self.converged, 0, 1)
        code = torch.where(self.stalled, 2, code)
        code = torch.where(self.nonfinite, 3, code)
        kinds = (Status.CONVERGED, Status.MAX_STEPS, Status.STALLED, Status.NONFINITE)
        return tuple(kinds[c] for c in code.tolist())

    @property
    def trace(self) -> Tensor | None:
        """(steps.max(), batch) residuals if `record=True`; a frozen sample repeats its last."""
        if self.residuals is None:
            return None
        length = int(self.steps.max()) if self.steps.numel() else 0
        if not length:
            return self.residual.new_empty((0, len(self.residual)))
        return torch.stack(self.residuals[:length])

    def summary(self) -> str:
        """One sentence per kind of end that is not convergence."""
        counts = Counter(status for status in self.status if status is not Status.CONVERGED)
        total = len(self.steps)
        lines = [f"{count} of {total} samples: {kind.value}" for kind, count in counts.items()]
        return "; ".join(lines) or f"all {total} samples converged"
