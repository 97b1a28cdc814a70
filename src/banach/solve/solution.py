"""What a solve found: the value, how far it got, and why each sample stopped."""

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from banach.latent import Latent
from banach.solve.mixing import Fault
from banach.solve.picard import Picard
from banach.solve.solver import Solver
from banach.solve.tolerance import Tolerance


class Status(enum.Enum):
    """Why a sample stopped; the value is a sentence about it. Advice is in `Solution.summary()`."""

    CONVERGED = "converged, the residual met the tolerance"
    MAX_STEPS = "stopped at max_steps above the tolerance"
    STALLED = "stalled above the tolerance, at the rounding error of the arithmetic"
    NONFINITE = "T gave NaN or infinity, or values so large that their norm overflows"


# The per-sample tensors of a solution, which may be made when they are first read.
DEFERRED = ("residual", "converged", "steps", "stalled", "nonfinite", "diverged")


class NotConverged(RuntimeError):
    """Raised by `throw=True` if a sample did not converge; `solution` holds what was found."""

    def __init__(self, solution: "Solution") -> None:
        super().__init__(solution.summary())
        self.solution = solution

    def __reduce__(self) -> "tuple[type[NotConverged], tuple[Solution]]":
        return type(self), (self.solution,)  # an exception is otherwise rebuilt from its message


@dataclass(frozen=True, eq=False, repr=False)
class Solution:
    """What a solve found. Per sample: `value`, `residual`, `steps`, and bools such as `converged`, `diverged`.

    After n steps `value` is z_n and `residual` the norm of T(z_{n-1}) - z_{n-1}. Where a sample `diverged` (its
    residual ended above 10 times its least) or is `nonfinite`, both are those of its best iterate; in captured
    steps with `plan.fused_step` of its last one, which may be NaN. `fault` is what host checks found wrong with T,
    or None. Tensors stay on the device; `status`, `trace`, `summary()` and `print` sync with the host.
    """

    value: Latent
    residual: Tensor
    converged: Tensor
    steps: Tensor
    stalled: Tensor
    nonfinite: Tensor
    diverged: Tensor
    residuals: tuple[Tensor, ...] | None = None
    solver: Solver | None = None
    tolerance: Tolerance | None = None
    failures: frozenset[Status] = frozenset()  # those that host checks saw: no sync is needed to know them
    fault: Fault | None = None

    @classmethod
    def deferred(cls, value: Latent, per_sample: Callable[[], dict[str, Any]], known: dict[str, Any]) -> Self:
        """Return a solution whose tensors `per_sample()`, those of DEFERRED, are made when one is first read."""
        made = object.__new__(cls)
        made.__dict__.update(known, value=value, _per_sample=per_sample)
        return made

    def changed(self, **known: Any) -> Self:
        """Return a copy with other values of these fields; deferred tensors are still made when they are read."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, **known)
        return made

    def __getattr__(self, name: str) -> Any:
        if "_per_sample" not in self.__dict__ or name not in DEFERRED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__.update(self.__dict__["_per_sample"]())
        return self.__dict__[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *DEFERRED})  # for tab completion, before they are read

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def status(self) -> tuple[Status, ...]:
        """One `Status` per sample."""
        kinds = tuple(Status)  # converged, max_steps, stalled, nonfinite
        code = torch.where(self.stalled, 2, torch.where(self.converged, 0, 1))
        return tuple(kinds[c] for c in torch.where(self.nonfinite, 3, code).tolist())

    @property
    def trace(self) -> Tensor | None:
        """(steps.max(), batch) residuals if `record=True`; a frozen sample repeats its last."""
        if self.residuals is None:
            return None
        length = int(self.steps.max()) if self.steps.numel() else 0
        return torch.stack(self.residuals[:length]) if length else self.residual.new_empty(0, len(self.residual))

    def __repr__(self) -> str:
        counts = Counter(status.name for status in self.status)
        ends = ", ".join(f"{count} {name}" for name, count in counts.items()) or "no samples"
        if not len(self.steps):
            return f"Solution({ends})"
        steps, worst = self.steps.aminmax(), float(self.residual.max())
        return f"Solution({ends}; steps {int(steps.min)} to {int(steps.max)}; worst residual {worst:.3g})"

    def summary(self) -> str:
        """Return a few lines: how many samples ended how, the worst residual, and what to try next."""
        status, total = self.status, len(self.steps)
        counts = Counter(status)
        if total == counts[Status.CONVERGED]:
            return f"all {total} samples converged"
        lines = [f"{count} of {total} samples: {kind.value}" for kind, count in counts.items()]
        lines.append(f"worst residual of those that did not converge: {self.residual[~self.converged].max():.3g}")
        return "\n".join([*lines, *(f"try: {advice}" for advice in self._advice(counts))])

    def _advice(self, counts: Counter[Status]) -> list[str]:
        """What to try that was not tried."""
        if self.fault is not None:
            return [self.fault.value]
        advice = []
        if diverged := int(self.diverged.sum()):
            advice.append(
                f"the iteration diverges for {diverged} of {len(self.steps)} samples, whose best iterate is kept: "
                "check that T contracts (banach.contraction_factor)" + _other_solver(self.solver, diverged=True)
            )
        elif counts[Status.MAX_STEPS]:
            falls = "more max_steps if the observed rate is below 1 (banach.diagnose.measure_contraction)"
            advice.append(f"{falls}, or a larger tolerance" + _other_solver(self.solver))
        if counts[Status.STALLED]:
            advice.append("a larger tolerance or a higher precision (TF32 and bfloat16 cannot meet 1e-4)")
        if counts[Status.NONFINITE]:
            check = "check the data for NaN and its size, and that T contracts (banach.contraction_factor)"
            advice.append(check + _other_solver(self.solver, diverged=True))
        return advice


def _other_solver(solver: Any, *, diverged: bool = False) -> str:
    if type(solver) is not Picard:  # Anderson and Broyden may diverge where T contracts
        other = ", or Picard(damping=0.5)" if diverged and solver is not None else ""
        return other or (", or a larger memory" if hasattr(solver, "memory") else "")
    return ", or Anderson()" if solver.damping else ", or Anderson(), or Picard(damping=0.5)"
