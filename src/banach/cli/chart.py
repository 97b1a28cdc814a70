"""Charts of the report: lines or bars, with ticks at round numbers. report.html draws them as SVG."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from banach.data.dataset import need

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Chart:
    """Points (x, y) by the name of their line, and the ticks of both axes; a y of None leaves a gap.

    `kind` is that of y: "log" (y is a logarithm to base 10), "percent", "bars" (x is the middle of one) or "".
    `rule` marks a y, of bars an x, and names it.
    """

    title: str
    across: str
    lines: Mapping[str, Points]
    x: Sequence[float]
    y: Sequence[float]
    kind: str = ""
    rule: tuple[float, str] | None = None


def line_chart(
    title: str, across: str, lines: Mapping[str, Points], kind: str = "", rule: tuple[Any, str] | None = None
) -> Chart | None:
    """Return a chart of all finite values, None if there are none; for "log", of those that are positive."""

    def known(value: float | None) -> float | None:
        if value is None or not math.isfinite(value) or (kind == "log" and value <= 0):
            return None
        return math.log10(value) if kind == "log" else float(value)

    marked = None if rule is None or (place := known(rule[0])) is None else (place, rule[1])
    drawn = {name: [(a, known(b)) for a, b in points] for name, points in lines.items()}
    shown = {name: points for name, points in drawn.items() if any(b is not None for _, b in points)}
    values = [b for points in shown.values() for _, b in points if b is not None]
    if not values:
        return None
    x = ticks((a for points in shown.values() for a, _ in points), whole=True)
    y = ticks(values if marked is None else [*values, marked[0]], whole=kind == "log")
    return Chart(title, across, shown, x, [v for v in y if v < 1.001] if kind == "percent" else y, kind, marked)


def histogram(title: str, across: str, values: Iterable[float], rule: tuple[float, str]) -> Chart | None:
    """Return how many of the finite values are in each of some intervals; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    x = ticks([*finite, rule[0]])
    counts, edges = np.histogram(finite, 4 * (len(x) - 1), (x[0], x[-1]))
    bars = list(zip(((edges[1:] + edges[:-1]) / 2).tolist(), counts.tolist(), strict=True))
    return Chart(title, across, {"": bars}, x, ticks([0.0, *counts.tolist()], whole=True), "bars", rule)


def ticks(values: Iterable[float], *, whole: bool = False) -> list[float]:
    """Return a few round numbers in equal steps, the first below all values and the last above them."""
    known, ticker = list(values), need("matplotlib.ticker", "a chart")
    low, high = (math.floor(min(known)), math.ceil(max(known))) if whole else (min(known), max(known))
    room = 0.0 if low < high else 1.0 if whole else abs(low) / 20 or 1.0
    locator = ticker.MaxNLocator(5, steps=[1, 2, 5, 10], integer=whole)
    return [float(value) + 0.0 for value in locator.tick_values(low - room, high + room)]  # -0 becomes 0
