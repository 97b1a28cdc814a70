"""How a diagnosis is shown: two tables; a picture of residuals by step, contraction by sample, cosines by mode."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from banach.cli.console import console, table
from banach.train.plot import PlotError, write_figure

if TYPE_CHECKING:
    from banach.cli.diagnose import Diagnosis, Gradient

BLUE, ORANGE, GREY = "#1f77b4", "#ff7f0e", "0.45"


def show(measured: Diagnosis, title: str) -> None:
    """Print the tables, then the verdict."""
    c, own = measured.contraction, measured.own
    figures = {
        "sigma_max(dT/du)": c.sigma,
        "observed rate": c.rate,
        "steps": own.steps,
        "residual after them": own.residual,
        "least residual, going on": measured.trace.amin(0),
    }
    overall = [(name, *_mean_and_worst(values)) for name, values in figures.items()]
    console.print(table(title, ("figure", "mean", "worst"), overall))
    console.print(f"T contracts on {len(c.sigma) - c.violations} of {len(c.sigma)} samples\n")
    parts = list(measured.gradients[0].descent.parts)
    title = "cosine with the exact gradient, and ratio of the norms"
    rows = [_row(g, parts) for g in measured.gradients]
    console.print(table(title, ("gradient", "all weights", *parts), rows))
    console.print(f"\n{measured.words}\n")


def _row(g: Gradient, parts: list[str]) -> tuple[str, ...]:
    found = [g.descent, *(g.descent.parts[part] for part in parts)]
    return (
        g.name + (", train mode" if g.training else ""),
        *(f"{x.cosine:.3f}  {_short(x.ratio)}" for x in found),
    )


def _short(ratio: float) -> str:
    return f"{ratio:.3f}" if 0.01 <= ratio < 100 else f"{ratio:.0e}"


def _mean_and_worst(values: Tensor) -> tuple[str, str]:
    known = values.double()[~values.isnan()]
    return (f"{float(known.mean()):.3g}", f"{float(known.max()):.3g}") if len(known) else ("-", "-")


def draw(measured: Diagnosis, path: Path) -> Path:
    """Write the picture as PNG, whole or not at all."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("plots need matplotlib, which is missing; run: pip install 'banach[app]'") from None
    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _residuals(left, measured)
    _contraction(middle, measured)
    _cosines(right, measured)
    return write_figure(figure, path)


def _residuals(axes: Any, measured: Diagnosis) -> None:
    # A residual of zero, an exact hit, is drawn as the least other one: the axis is logarithmic.
    least = min((r for r in measured.trace.flatten().tolist() if r > 0), default=1.0)
    curve = {name: torch.where(r.isfinite(), r.clamp(min=least), torch.nan) for name, r in measured.curve.items()}
    steps = torch.arange(1, len(curve["median"]) + 1)
    axes.fill_between(steps, curve["low"], curve["high"], color=BLUE, alpha=0.25, linewidth=0, label="10-90%")
    axes.plot(steps, curve["median"], color=BLUE, label="median")
    axes.plot(steps, curve["worst"], color=ORANGE, linewidth=1, label="worst")
    if measured.tolerance.atol > 0:
        line = {"color": GREY, "linestyle": "--", "linewidth": 1}
        axes.axhline(measured.tolerance.atol, label="tolerance of the run", **line)
    if bool((~curve["worst"].isnan()).any()):
        axes.set_yscale("log")
    axes.set(title="convergence", xlabel="step", ylabel=f"residual, {type(measured.tolerance.norm).__name__}")
    axes.legend(fontsize="small")


def _contraction(axes: Any, measured: Diagnosis) -> None:
    sigma, rate = measured.contraction.sigma.cpu(), measured.contraction.rate.cpu()
    order = sigma.argsort()
    rank = torch.arange(1, len(sigma) + 1)
    axes.plot(rank, sigma[order], "o", color=BLUE, markersize=4, label="sigma_max(dT/du)")
    axes.plot(rank, rate[order], "x", color=ORANGE, markersize=4, label="observed rate")
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    axes.set(title="contraction: below 1", xlabel="sample, by sigma_max", ylim=(0, None))
    axes.legend(fontsize="small")


def _cosines(axes: Any, measured: Diagnosis) -> None:
    names = [g.name + ("\n(train mode)" if g.training else "") for g in measured.gradients]
    cosines = [g.descent.cosine for g in measured.gradients]
    bars = axes.bar(range(len(names)), cosines, color=[ORANGE if g.training else BLUE for g in measured.gradients])
    axes.bar_label(bars, fmt="%.3f", fontsize="small")
    axes.set_xticks(range(len(names)), names, fontsize="small", rotation=20)
    axes.axhline(0.0, color=GREY, linewidth=1)
    axes.set(title="cosine with the exact gradient", ylim=(min([0.0, *cosines]) * 1.1, 1.1))
