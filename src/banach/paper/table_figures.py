"""The two tables as figures: accuracies beside the printed ones, and the time that an image takes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from banach.paper.study import Row
from banach.provenance import Summary

WIDE = 34  # letters of a label before it goes on below


def accuracy_figure(rows: Sequence[Row]) -> Any:
    """A panel for each data set: ours by both protocols, with spreads, and the paper's; rivals' as printed."""
    return _panels(rows, _accuracies, "test accuracy, per cent")


def time_figure(rows: Sequence[Row]) -> Any:
    """A panel for each data set: milliseconds that a training image takes, by way of the backward pass."""
    return _panels(rows, _times, "milliseconds per training image")


def _panels(rows: Sequence[Row], draw: Callable[[Any, Sequence[Row]], None], label: str) -> Any:
    from matplotlib.figure import Figure

    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row["data"]).partition(" ")[0], []).append(row)  # "SVHN re-cropped ..." is SVHN
    most = max(len(group) for group in groups.values())
    figure = Figure(figsize=(5.2 * len(groups), 1.2 + 0.5 * most), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False).flat
    for axes, (name, group) in zip(panels, groups.items(), strict=True):
        draw(axes, group)
        axes.set(title=name, xlabel=label)
        axes.set_yticks(range(len(group)), [_label(row) for row in group], fontsize="small")
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis="x")
    return figure


def _label(row: Row) -> str:
    norm = {True: ", batch norm in R", False: ", no batch norm", None: ""}[row.get("batch norm in R")]
    path = row.get("steps", "").removeprefix("one by one").removeprefix(", ")
    return "\n".join(textwrap.wrap(row["method"] + norm + (path and f", {path}"), WIDE))


def _accuracies(axes: Any, rows: Sequence[Row]) -> None:
    kinds = (
        ("paper", "paper %", {"marker": "|", "color": "black", "markersize": 14}),
        ("clean", "clean %", {"marker": "o", "color": "C0"}),
        ("released", "released %", {"marker": "o", "color": "C1", "fillstyle": "none"}),
    )
    for name, column, style in kinds:
        known = [(place, row[column]) for place, row in enumerate(rows) if row.get(column) is not None]
        if not known:
            continue
        means, spreads = zip(*(_mean_and_spread(value) for _, value in known), strict=True)
        axes.errorbar(means, [place for place, _ in known], xerr=spreads, linestyle="", label=name, **style)
    axes.legend(fontsize="small")


def _mean_and_spread(value: Any) -> tuple[float, float]:
    return (value.mean, value.spread or 0.0) if isinstance(value, Summary) else (float(value), 0.0)


def _times(axes: Any, rows: Sequence[Row]) -> None:
    """On a logarithmic axis, with the ratio to JFB as in the paper, and the paper's where it has one."""
    from matplotlib.ticker import LogLocator, NullLocator

    times = [1e3 * row["seconds per epoch"].mean / row["training images"] for row in rows]
    axes.scatter(
        times, range(len(rows)), color=["C0" if row["method"].startswith("JFB") else "C1" for row in rows]
    )
    axes.set_xscale("log")
    least, most = min(times), max(times)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if most < 20 * least else (1, 3)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(least / 1.3, most * 1.3 * (most / least) ** 0.8)  # with room for words
    for place, (row, time) in enumerate(zip(rows, times, strict=True)):
        printed = f" (paper {row['paper: ratio']:g})" if row["paper: ratio"] is not None else ""
        axes.text(time, place, f"  {row['ratio']:.3g} x{printed}", va="center", fontsize="small")
