"""Plots of training: one run in four panels, and several runs on top of each other."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from banach.provenance import whole_file
from banach.train.history import Epoch

_STYLES = ("-", "--", ":", "-.")  # after ten runs the colours come round again, with another line
_EMPTY = "no fixed point was sought: nothing to show"


class PlotError(RuntimeError):
    """A plot that cannot be made; the sentence says why, and what to do. Nothing else depends on it."""


def plot_history(
    epochs: Sequence[Epoch], path: str | os.PathLike[str], *, title: str = "", eps: float | None = None
) -> Path:
    """Write loss, accuracy, depth and residual against epochs to a PNG; `eps` is a line among the residuals."""
    return write_figure(history_figure(epochs, title=title, eps=eps), path)


def plot_comparison(runs: Mapping[str, Sequence[Epoch]], path: str | os.PathLike[str]) -> Path:
    """Write the runs on top of each other to a PNG: accuracy by epochs and by seconds, loss, depth."""
    return write_figure(comparison_figure(runs), path)


def history_figure(epochs: Sequence[Epoch], *, title: str = "", eps: float | None = None) -> Any:
    """The matplotlib Figure that `plot_history` writes."""
    figure = _figure()
    loss, accuracy, depth, residual = figure.subplots(2, 2).flat
    _lines(loss, epochs, {"train": "loss", "validation": "validation_loss"})
    _lines(accuracy, epochs, {"train": "accuracy", "validation": "validation_accuracy"})
    _lines(depth, epochs, {"train, mean": "depth", "train, max": "max_depth", "validation": "validation_depth"})
    _lines(residual, epochs, {"train, mean": "residual", "train, max": "max_residual"})
    if eps is not None and residual.lines:
        residual.axhline(eps, color="black", linestyle=":", linewidth=1, label=f"eps = {eps:g}")
    _log_scale(residual)
    for axes, name in ((loss, "loss"), (accuracy, "accuracy"), (depth, "depth"), (residual, "residual")):
        _label(axes, "epoch", name)
        if axes.lines:
            axes.legend()
    if title:
        figure.suptitle(title, parse_math=False)
    return figure


def comparison_figure(runs: Mapping[str, Sequence[Epoch]]) -> Any:
    """The matplotlib Figure that `plot_comparison` writes."""
    figure = _figure()
    by_epoch, by_second, loss, depth = figure.subplots(2, 2).flat
    for number, epochs in enumerate(runs.values()):
        style = {"color": f"C{number % 10}", "linestyle": _STYLES[number // 10 % len(_STYLES)], "marker": "."}
        seconds = list(accumulate(epoch.seconds for epoch in epochs))
        accuracies = _values(epochs, "validation_accuracy")
        by_epoch.plot(_numbers(epochs), accuracies, **style)
        by_second.plot(seconds, accuracies, **style)
        loss.plot(_numbers(epochs), _values(epochs, "loss"), **style)
        depth.plot(_numbers(epochs), _values(epochs, "depth"), **style)
    _label(by_epoch, "epoch", "accuracy, validation")
    _label(by_second, "seconds", "accuracy, validation")
    _label(loss, "epoch", "loss, train")
    _label(depth, "epoch", "depth, train, mean")
    _say_if_empty(loss, "no epoch is done yet")
    for axes in (by_epoch, by_second):
        _say_if_empty(axes, "nothing was validated" if any(runs.values()) else "no epoch is done yet")
    _say_if_empty(depth, _EMPTY)
    _legend(figure, by_epoch.lines, list(runs))
    return figure


def write_figure(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write a figure as its name ends, PNG or SVG, so that the file is the old one or the whole new one."""
    path = Path(path)
    with whole_file(path, binary=True) as file, warnings.catch_warnings():
        # A name in letters that the font lacks is drawn with boxes, and is no news to who chose it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=120)
    return path


def _figure() -> Any:
    try:
        # Not pyplot: it keeps figures, and chooses a backend for the whole process.
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("plots need matplotlib, which is missing; run: pip install 'banach[app]'") from None
    return Figure(figsize=(10, 7), layout="constrained")


def _lines(axes: Any, epochs: Sequence[Epoch], fields: Mapping[str, str]) -> None:
    """One line per field that has a value; a panel without any says why. Markers show a lone epoch."""
    for number, (label, field) in enumerate(fields.items()):
        values = _values(epochs, field)
        if any(math.isfinite(value) for value in values):
            axes.plot(_numbers(epochs), values, marker=".", color=f"C{number}", label=label)
    if not axes.lines:
        told = any(getattr(epoch, field) is not None for epoch in epochs for field in fields.values())
        _write_inside(axes, "no finite value" if told else _EMPTY if epochs else "no epoch is done yet")


def _values(epochs: Sequence[Epoch], field: str) -> list[float]:
    """Numbers to draw: what is missing or infinite leaves a gap."""
    found = (getattr(epoch, field) for epoch in epochs)
    return [float(value) if value is not None and math.isfinite(value) else math.nan for value in found]


def _numbers(epochs: Sequence[Epoch]) -> list[int]:
    return [epoch.epoch for epoch in epochs]


def _log_scale(axes: Any) -> None:
    """A logarithmic axis, if there is anything on it that has a logarithm."""
    if any(value > 0 for line in axes.lines for value in line.get_ydata()):
        axes.set_yscale("log", nonpositive="mask")


def _label(axes: Any, horizontal: str, vertical: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.grid(alpha=0.3)
    if horizontal == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _say_if_empty(axes: Any, sentence: str) -> None:
    if not any(math.isfinite(value) for line in axes.lines for value in line.get_ydata()):
        _write_inside(axes, sentence)


def _write_inside(axes: Any, sentence: str) -> None:
    axes.text(0.5, 0.5, sentence, ha="center", va="center", transform=axes.transAxes, color="0.4")


def _legend(figure: Any, lines: Sequence[Any], names: Sequence[str]) -> None:
    """One legend for all panels, below them. matplotlib would leave out a name that begins with "_"."""
    labels = [f" {name}" if name.startswith("_") else name for name in names]
    legend = figure.legend(lines, labels, loc="outside lower center", ncols=min(3, max(1, len(labels))))
    for text in legend.get_texts():
        text.set_parse_math(False)  # a "$" in a name is a dollar
