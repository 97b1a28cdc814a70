"""Figures of the theory study: contraction, JFB's cosine and the bounds over training; JFB away from u*."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from banach.paper.theory_dense import Local
from banach.paper.theory_measure import Measured, Reading


def contraction_figure(measured: Sequence[Measured]) -> Any:
    """sigma_max and the observed rate over training: mean and range over the images."""
    figure, panels = _panels(measured)
    for m, axes in zip(measured, panels, strict=True):
        _band(axes, m.readings, lambda r: r.sigma, "sigma_max(dT/du)", "C0")
        _band(axes, m.readings, lambda r: r.rate, "observed rate", "C1")
        epochs = [r.epoch for r in m.readings]
        axes.plot(
            epochs, [r.training_sigma for r in m.readings], "C0:", marker="x", label="sigma_max, training mode"
        )
        axes.plot(epochs, [r.training_rate for r in m.readings], "C1:", marker="x", label="rate, training mode")
        axes.axhline(1, color="black", linewidth=1)
        _finish(axes, m.name, "epoch", "per step")
    return figure


def cosine_figure(measured: Sequence[Measured]) -> Any:
    """The cosine of JFB with the exact gradient over training."""
    figure, panels = _panels(measured)
    for m, axes in zip(measured, panels, strict=True):
        epochs = [r.epoch for r in m.readings]
        axes.plot(epochs, [r.batch.cosine for r in m.readings], marker=".", label="batch, where the solver stops")
        axes.plot(epochs, [r.batch.at_fixed_point for r in m.readings], "--", marker=".", label="batch, at u*")
        axes.plot(epochs, [r.training.cosine for r in m.readings], ":", marker="x", label="batch, training mode")
        _band(axes, m.close, lambda r: [one.cosine for one in r.locals], "single images, at u*", "C3")
        axes.axhline(0, color="black", linewidth=1)
        _finish(axes, m.name, "epoch", "cosine with the exact gradient")
    return figure


def bounds_figure(measured: Sequence[Measured]) -> Any:
    """The Lemma's quotients and kappa(M'M), each beside its bound."""
    figure, panels = _panels(measured, rows=2)
    for m, above, below in zip(measured, panels[: len(measured)], panels[len(measured) :], strict=True):
        _band(above, m.close, lambda r: [x.lemma.coercivity for x in r.locals], "coercivity of I - J", "C0")
        _line(above, m, lambda x: x.lemma.coercivity_bound, "1 - gamma", "C0")
        _band(above, m.close, lambda r: [x.lemma.inverse for x in r.locals], "coercivity of the inverse", "C1")
        _line(above, m, lambda x: x.lemma.inverse_bound, "(1 - gamma) / (1 + gamma)^2", "C1")
        name = "kappa(M'M)" if m.whole else "kappa(M'M), at least"
        _band(below, m.close, lambda r: [x.conditioning.kappa for x in r.locals], name, "C2")
        _line(below, m, lambda x: x.conditioning.limit, "1 / gamma", "C2")
        below.set_yscale("log")
        _finish(above, m.name, "epoch", "least quotient")
        _finish(below, "", "epoch", "condition")
    return figure


def perturbation_figure(measured: Sequence[Measured]) -> Any:
    """-<gradient, p(u)> against the distance of u from u*, at the last epoch; below 0 JFB ascends."""
    figure, panels = _panels(measured)
    for m, axes in zip(measured, panels, strict=True):
        for number, one in enumerate(m.close[-1].locals if m.close else ()):
            near, label = one.perturbed, number == 0  # one entry in the legend for all images
            axes.plot(near.distance, _negated(near.random), "C0", label="random directions" if label else None)
            axes.plot(near.distance, _negated(near.worst), "C3", label="worst direction found" if label else None)
            steps = [(distance, value) for distance, value in near.iterates if distance > 0]
            axes.plot(
                *zip(*((x, -y) for x, y in steps), strict=True),
                "C2.",
                label="Picard's iterates" if label else None,
            )
            axes.axvline(near.own, color="0.6", linestyle=":", label="where the solver stops" if label else None)
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=1)
        axes.axhline(0, color="black", linewidth=1)
        _finish(axes, m.name, "|u - u*| / |u*|", "descent, 1 at u*")
    return figure


def _panels(measured: Sequence[Measured], rows: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.0 * len(measured), 6.0), 4.2 * rows), layout="constrained")
    return figure, list(figure.subplots(rows, len(measured), squeeze=False).flat)


def _band(
    axes: Any, readings: Sequence[Reading], values: Callable[[Reading], Sequence[float]], label: str, color: str
) -> None:
    """The mean over the images as a line, least to largest as a band."""
    known = [(r.epoch, [x for x in values(r) if math.isfinite(x)]) for r in readings]
    known = [(epoch, numbers) for epoch, numbers in known if numbers]
    epochs = [epoch for epoch, _ in known]
    axes.plot(epochs, [statistics.fmean(x) for _, x in known], marker=".", color=color, label=label)
    axes.fill_between(epochs, [min(x) for _, x in known], [max(x) for _, x in known], color=color, alpha=0.2)


def _line(axes: Any, m: Measured, value: Callable[[Local], float], label: str, color: str) -> None:
    """A bound: its mean over the images, dashed."""
    points = [(r.epoch, statistics.fmean(value(one) for one in r.locals)) for r in m.close]
    axes.plot([x for x, _ in points], [y for _, y in points], "--", color=color, label=label)


def _negated(values: Sequence[float]) -> list[float]:
    return [-value for value in values]


def _finish(axes: Any, title: str, horizontal: str, vertical: str) -> None:
    from matplotlib.ticker import MaxNLocator

    if horizontal == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title=title, xlabel=horizontal, ylabel=vertical)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=7)
