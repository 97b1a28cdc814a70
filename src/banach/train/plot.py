"""Plots of training: one run in four panels, and several runs in one figure."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from banach.provenance import whole_file
from banach.train.metrics import Epoch

_STYLES = ("-", "--", ":", "-.")  # after ten runs the colours repeat, with another line style
_NO_EPOCH, _NO_FIXED_POINT = "no epoch is done yet", "no fixed point: nothing to show"
_MISSING = {"depth": _NO_FIXED_POINT, "residual": _NO_FIXED_POINT}  # why a panel of one run is empty
# Panels of one run: the name of the axis, then label and field of each line.
_HISTORY = {
    "loss": {"train": "loss", "validation": "validation_loss"},
    "accuracy": {"train": "accuracy", "validation": "validation_accuracy"},
    "depth": {"train, mean": "depth", "train, max": "max_depth", "validation": "validation_depth"},
    "residual": {"train, mean": "residual", "train, max": "max_residual"},
}
# Panels of several runs: both axes, the field, and what an empty panel says.
_COMPARISON = (
    ("epoch", "accuracy, validation", "validation_accuracy", "nothing was validated"),
    ("seconds", "accuracy, validation", "validation_accuracy", "nothing was validated"),
    ("epoch", "loss, train", "loss", "no finite value"),
    ("epoch", "depth, train, mean", "depth", _NO_FIXED_POINT),
)


class PlotError(RuntimeError):
    """A plot that cannot be made; the message says why, and what to do."""


def plot_history(
    epochs: Sequence[Epoch], path: str | os.PathLike[str], *, title: str = "", eps: float | None = None
) -> Path:
    """Write loss, accuracy, depth and residual against epochs to a PNG, with a line at `eps`."""
    return write_figure(history_figure(epochs, title=title, eps=eps), path)


def plot_comparison(runs: Mapping[str, Sequence[Epoch]], path: str | os.PathLike[str]) -> Path:
    """Write several runs to one PNG: accuracy by epochs and by seconds, loss, depth."""
    return write_figure(comparison_figure(runs), path)


def history_figure(epochs: Sequence[Epoch], *, title: str = "", eps: float | None = None) -> Any:
    """Return the matplotlib Figure that `plot_history` writes."""
    figure = new_figure()
    for axes, (name, fields) in zip(figure.subplots(2, 2).flat, _HISTORY.items(), strict=True):
        for number, (label, field) in enumerate(fields.items()):
            values = _values(epochs, field)
            if any(math.isfinite(value) for value in values):
                axes.plot(_numbers(epochs), values, marker=".", color=f"C{number}", label=label)
        if name == "residual":
            _residual_axis(axes, eps)
        if axes.lines:
            axes.legend()
        missing = all(getattr(epoch, field) is None for epoch in epochs for field in fields.values())
        why = _MISSING.get(name, "nothing was measured") if missing else "no finite value"
        _finish(axes, "epoch", name, why if epochs else _NO_EPOCH)
    if title:
        figure.suptitle(title, parse_math=False)
    return figure


def comparison_figure(runs: Mapping[str, Sequence[Epoch]]) -> Any:
    """Return the matplotlib Figure that `plot_comparison` writes."""
    figure = new_figure()
    for axes, (across, name, field, empty) in zip(figure.subplots(2, 2).flat, _COMPARISON, strict=True):
        for number, epochs in enumerate(runs.values()):
            style = {"color": f"C{number % 10}", "linestyle": _STYLES[number // 10 % len(_STYLES)], "marker": "."}
            seconds = list(accumulate(epoch.seconds for epoch in epochs))
            axes.plot(_numbers(epochs) if across == "epoch" else seconds, _values(epochs, field), **style)
        _finish(axes, across, name, empty if any(runs.values()) else _NO_EPOCH)
    _legend(figure, figure.axes[0].lines, list(runs))
    return figure


def write_figure(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write a figure in the format of its suffix, PNG or SVG; the old file is replaced when it is complete."""
    path = Path(path)
    with whole_file(path, binary=True) as file, warnings.catch_warnings():
        # A letter that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=120)
    return path


def new_figure(width: float = 10, height: float = 7) -> Any:
    """Return an empty matplotlib Figure, or raise a PlotError if matplotlib is missing."""
    try:
        # Not pyplot: it keeps figures, and chooses a backend for the whole process.
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("plots need matplotlib, which is missing; run: pip install 'banach[app]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def _values(epochs: Sequence[Epoch], field: str) -> list[float]:
    """Return the values to draw: a missing or infinite one leaves a gap."""
    found = (getattr(epoch, field) for epoch in epochs)
    return [float(value) if value is not None and math.isfinite(value) else math.nan for value in found]


def _numbers(epochs: Sequence[Epoch]) -> list[int]:
    return [epoch.epoch for epoch in epochs]


def _residual_axis(axes: Any, eps: float | None) -> None:
    """Draw a line at eps; use a logarithmic axis if a value is positive."""
    if eps is not None and axes.lines:
        axes.axhline(eps, color="black", linestyle=":", linewidth=1, label=f"eps = {eps:g}")
    if any(value > 0 for line in axes.lines for value in line.get_ydata()):
        axes.set_yscale("log", nonpositive="mask")


def _finish(axes: Any, across: str, name: str, empty: str) -> None:
    """Label a panel, and write `empty` into it if it shows nothing."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel=across, ylabel=name)
    axes.grid(alpha=0.3)
    if across == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if not any(math.isfinite(value) for line in axes.lines for value in line.get_ydata()):
        axes.text(0.5, 0.5, empty, ha="center", va="center", transform=axes.transAxes, color="0.4")


def _legend(figure: Any, lines: Sequence[Any], names: Sequence[str]) -> None:
    """Draw one legend below all panels. matplotlib would leave out a name that begins with "_"."""
    labels = [f" {name}" if name.startswith("_") else name for name in names]
    legend = figure.legend(lines, labels, loc="outside lower center", ncols=min(3, max(1, len(labels))))
    for text in legend.get_texts():
        text.set_parse_math(False)  # a "$" in a name is not mathematics
