"""What the measurements mean, in one or two sentences."""

from __future__ import annotations

import math

from banach.backward import JFB
from banach.diagnose.contraction import STILL, Contraction, worst
from banach.diagnose.descent import Descent

GOOD = 0.9  # a cosine from which on a cheap gradient is called good
REST = 0.05  # the part of the Neumann series that the suggested order leaves out


def verdict(contraction: Contraction, descent: Descent | None = None) -> str:
    """Return a sentence on the iteration and, where a gradient was checked, one on that.

    Args:
        contraction: what `measure_contraction` returned.
        descent: what `descent_check` returned, or None.
    """
    said = [_on_iteration(contraction)]
    if descent is not None:
        said.append(_on_gradient(descent, worst(contraction.rate)))
    return " ".join(said)


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
    diverging = int((measured.rate >= STILL).sum())
    nonfinite = int((~measured.sigma.isfinite()).sum())
    if nonfinite:
        return f"T is not finite at {nonfinite} of {total} samples: look for NaN in the data and the weights."
    if diverging:
        return (
            f"The iteration does not converge on {diverging} of {total} samples: its residual goes by up to "
            f"{rate:.3g} per step (sigma_max {sigma:.3g}); lower R's gain, or use damping or Anderson."
        )
    pace = "too few residuals for a rate" if math.isnan(rate) else f"observed rate at most {rate:.3g} per step"
    if measured.contracts:
        return f"T contracts on all {total} samples: sigma_max at most {sigma:.3g}, {pace}."
    where = f"on {measured.violations} of {total} samples (sigma_max up to {sigma:.3g})"
    if math.isnan(rate):
        return f"T does not contract {where}, and there were {pace}."
    return (
        f"The iteration converges, {pace}, though T does not contract {where}: Banach's bound does not apply, "
        "so go by the residual."
    )


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
    advice = "use Implicit()" if order is None else f"use Neumann({order}) or Implicit()"
    quality = "points downhill, but roughly" if descent.descends else "is no descent direction"
    return f"The gradient of {name} {quality}: {figures}; {advice}."
