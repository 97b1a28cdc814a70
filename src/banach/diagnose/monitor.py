"""What the measurements mean, in a sentence, and a monitor that warns during training and never edits weights."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from banach import checks
from banach.backward import JFB
from banach.diagnose.contraction import STILL, Contraction, measure_contraction, worst
from banach.diagnose.descent import Descent

GOOD = 0.9  # a cosine from which on a cheap gradient is called good
SLOW = 0.9  # a rate from which on a verdict says how many steps a decimal digit takes
TERMS = 20  # a verdict suggests no longer Neumann series: Implicit is exact
REST = 0.05  # the part of the Neumann series that the suggested order leaves out


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
    are measured (None: all); tensors of another length than the first, such as the mask of a sequence, stay
    whole. In train mode batch norm normalises by these samples alone. `history` has a `ContractionReading` each.
    """

    def __init__(self, *, samples: int | None = 8, every: int = 1, once: bool = True, seed: int = 0) -> None:
        checks.whole("every", every, 1)
        if samples is not None:
            checks.whole("samples", samples, 1)
        self.samples, self.every, self.once, self.seed = samples, every, once, seed
        self.calls, self.warned = 0, False
        self.history: list[ContractionReading] = []

    def __call__(self, net: Any, d: Any) -> Contraction | None:
        """The measurement, or None at a call between two."""
        self.calls += 1
        if (self.calls - 1) % self.every:
            return None
        batch = next((leaf.shape[:1] for leaf in tree_leaves(d) if isinstance(leaf, Tensor) and leaf.dim()), None)
        few = tree_map_only(Tensor, lambda leaf: leaf[: self.samples] if leaf.shape[:1] == batch else leaf, d)
        measured = measure_contraction(net, few, seed=self.seed)
        sigma = float(measured.sigma.max()) if len(measured.sigma) else float("nan")
        figures = len(measured.sigma), measured.violations, sigma, worst(measured.rate)
        self.history.append(ContractionReading(self.calls, *figures))
        if measured.violations and not (self.once and self.warned):
            self.warned = True
            warnings.warn(verdict(measured), ContractionWarning, stacklevel=2)
        return measured


def verdict(contraction: Contraction, descent: Descent | None = None) -> str:
    """Return a sentence on the iteration and, where a gradient was checked, one on that.

    Args:
        contraction: what `measure_contraction` returned.
        descent: what `descent_check` returned, or None.
    """
    said = _on_iteration(contraction)
    return said if descent is None else f"{said} {_on_gradient(descent, worst(contraction.rate))}"


def suggested_order(rate: float) -> int | None:
    """Return the least k for which Neumann(k) leaves out at most 5%, rate^(k+1); None if there is none.

    Args:
        rate: of the iteration, such as the largest of `Contraction.rate`.
    """
    if not rate < 1:
        return None
    return max(math.ceil(math.log(REST) / math.log(rate)) - 1, 0) if rate > 0 else 0


def _on_iteration(measured: Contraction) -> str:
    total, sigma, rate = len(measured.sigma), worst(measured.sigma), worst(measured.rate)
    if not total:
        return "Nothing was measured: the batch is empty."
    if nonfinite := int((~measured.sigma.isfinite()).sum()):
        return f"T is not finite at {nonfinite} of {total} samples: look for NaN in the data and the weights."
    if diverging := int((measured.rate >= STILL).sum()):
        figures = f"changes by a factor of up to {rate:.3g} per step (sigma_max {sigma:.3g})"
        advice = "bound R (banach.nn.lipschitz_), or use damping or Anderson"
        if bool(measured.solution.converged.all()):
            advice = "the solver of the network met its tolerance on all samples"
        where = f"on {diverging} of {total} samples"
        return f"The undamped iteration does not converge {where}: its residual {figures}; {advice}."
    pace = "too few residuals for a rate" if math.isnan(rate) else f"observed rate {_at_most(rate)} per step"
    if rate > SLOW:
        pace += f" ({math.ceil(-1 / math.log10(rate))} steps for every decimal digit: try Anderson)"
    if measured.contracts:
        return f"T contracts on all {total} samples: sigma_max {_at_most(sigma)}, {pace}."
    where = f"on {measured.violations} of {total} samples (sigma_max up to {sigma:.3g})"
    if math.isnan(rate):
        return f"T does not contract {where}, and there were {pace}."
    advice = "Banach's bound does not apply, so go by the residual"
    return f"The undamped iteration converges, {pace}, though T does not contract {where}: {advice}."


def _at_most(value: float) -> str:
    """Return three digits of a value below 1, which must not be rounded to 1."""
    return f"at most {value:.3g}" if value < 0.9995 else "just below 1"


def _on_gradient(descent: Descent, rate: float) -> str:
    name = "JFB" if isinstance(descent.backward, JFB) else str(descent.backward)
    figures = f"cosine {descent.cosine:.3g}, norm ratio {descent.ratio:.3g}"
    if not bool(descent.solution.converged.all()):
        return f"The gradient of {name} was compared ({figures}) away from the fixed point: do not rely on that."
    if descent.cosine >= GOOD:
        return f"The gradient of {name} is good: {figures}."
    if math.isnan(descent.cosine):
        return f"The gradient of {name} cannot be judged: a gradient is zero."
    order = suggested_order(rate)
    advice = "use Implicit()" if order is None or order > TERMS else f"use Neumann({order}) or Implicit()"
    quality = "points downhill, but roughly" if descent.descends else "is no descent direction"
    return f"The gradient of {name} {quality}: {figures}; {advice}."
