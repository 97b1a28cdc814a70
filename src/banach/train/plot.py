"""Charts of training: for a picture by matplotlib and for the page of `banach report`; curves for TensorBoard."""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import numpy as np

from banach.data.dataset import need
from banach.provenance import whole_file
from banach.train.metrics import Epoch

Points = Sequence[tuple[float, float | None]]
Panel = tuple[str, Mapping[str, str], str]  # its title, the field of `Epoch` of each line, the kind of y

LEARNING: tuple[Panel, ...] = (
    ("Loss", {"train": "loss", "validation": "validation_loss"}, ""),
    ("Accuracy", {"train": "accuracy", "validation": "validation_accuracy"}, "percent"),
    ("Learning rate", {"": "lr"}, ""),
)
_DEPTHS = {"train, mean": "depth", "train, most": "max_depth", "validation, mean": "validation_depth"}
SOLVES: tuple[Panel, ...] = (
    ("Solver steps", _DEPTHS, ""),
    ("Residual", {"train, mean": "residual", "train, largest": "max_residual"}, "log"),
    ("Samples converged", {"train": "converged", "validation": "validation_converged"}, "percent"),
    ("Largest singular value of dT/du", {"": "sigma"}, ""),
)
BELOW = (1.0, "contraction: below 1")
_LABELS = {"log": "1e{:g}", "percent": "{:.1%}"}  # of ticks, by the kind of y
_STYLES = ("-", "--", ":", "-.")  # after ten lines the colours repeat, with another style


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


def curves(
    runs: Mapping[str, Sequence[Epoch]],
    panels: Iterable[Panel],
    *,
    across: str = "epoch",
    eps: float | None = None,
) -> list[Chart]:
    """Return the charts that have a value: of one run one per panel, of several one per field, a line per run.

    `across` is "epoch" or "seconds". `eps` is the tolerance of the solves, drawn as a line.
    """

    def points(epochs: Sequence[Epoch], field: str) -> Points:
        table, _, name = field.partition(".")
        values = [getattr(epoch, table) for epoch in epochs]
        seconds = accumulate(epoch.seconds for epoch in epochs)
        at = seconds if across == "seconds" else (epoch.epoch for epoch in epochs)
        return list(zip(at, [value.get(name) for value in values] if name else values, strict=True))

    charts = []
    for title, fields, kind in panels:
        rule: Any = BELOW if "sigma" in fields.values() else (eps, f"eps = {eps}") if kind == "log" else None
        lines: dict[str, dict[str, Points]] = {}
        for (label, field), (run, epochs) in product(fields.items(), runs.items()):
            chart, line = (title, label) if len(runs) == 1 else (f"{title}, {label}".rstrip(", "), run)
            lines.setdefault(chart, {})[line] = points(epochs, field)
        charts += [line_chart(one, across, shown, kind, rule) for one, shown in lines.items()]
    return [chart for chart in charts if chart is not None]


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
    x = ticks((a for points in shown.values() for a, _ in points), whole=across != "seconds")
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


def draw(charts: Sequence[Chart], path: str | os.PathLike[str], *, title: str = "") -> Path:
    """Write charts of lines to a file, PNG or SVG by its suffix, and return its path; an old file is replaced.

    Charts of the same lines, such as those of several runs, share one legend and its colours.

    Raises:
        ValueError: if there is no chart, or matplotlib is missing.
    """
    if not charts:
        raise ValueError("there is nothing to show yet")
    names = list(dict.fromkeys(name for chart in charts for name in chart.lines))
    shared = max(len(chart.lines) for chart in charts) == len(names)
    columns = min(len(charts), max(2, math.ceil(len(charts) / 2)))
    rows = math.ceil(len(charts) / columns)
    size = 5 * columns, 3.5 * rows + (0.1 * len(names) if shared else 0)
    # Not pyplot: it keeps figures, and chooses a backend for the whole process.
    figure = need("matplotlib.figure", "a plot").Figure(size, layout="constrained")
    drawn: dict[str, Any] = {}
    for place, chart in enumerate(charts, 1):
        axes = figure.add_subplot(rows, columns, place)
        lines = _draw_chart(axes, chart, names if shared else list(chart.lines))
        drawn |= lines
        if not shared:
            _add_legend(axes, lines)
    if shared:
        _add_legend(figure, drawn, loc="outside lower center", ncols=3)
    figure.suptitle(_encodable(title), parse_math=False)
    path = Path(path)
    with whole_file(path, binary=True) as file, warnings.catch_warnings():
        # A letter that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=120)
    return path


def _draw_chart(axes: Any, chart: Chart, names: list[str]) -> dict[str, Any]:
    """Draw a chart, its lines in the colours of `names`, and return what a legend explains, by its name."""
    drawn: dict[str, Any] = {}
    for name, points in chart.lines.items():
        number, (x, y) = names.index(name), zip(*points, strict=True)
        style = {"color": f"C{number % 10}", "linestyle": _STYLES[number // 10 % len(_STYLES)], "marker": "."}
        (drawn[name],) = axes.plot(x, [math.nan if value is None else value for value in y], **style)
    if chart.rule is not None:
        drawn[chart.rule[1]] = axes.axhline(chart.rule[0], color="black", linestyle=":", linewidth=1)
    # Ticks after lines, since they extend the axes.
    axes.set(xlabel=chart.across, ylabel=chart.title, xticks=chart.x)
    axes.set_yticks(chart.y, [_LABELS.get(chart.kind, "{:g}").format(y) for y in chart.y])
    axes.grid(alpha=0.3)
    return drawn


def _add_legend(owner: Any, drawn: Mapping[str, Any], **options: Any) -> None:
    """Name lines, but for one that needs no name."""
    # A name that begins with "_" would be left out of the legend, and a "$" in a name is not mathematics.
    labels = {f" {name}" if name.startswith("_") else name: line for name, line in drawn.items() if name}
    if labels:
        for text in owner.legend([*labels.values()], [*map(_encodable, labels)], **options).get_texts():
            text.set_parse_math(False)


def _encodable(name: str) -> str:
    """Return a name with escapes for bytes that are not UTF-8, which matplotlib refuses."""
    return name.encode(errors="backslashreplace").decode()


@contextmanager
def board(folder: str | os.PathLike[str]) -> Iterator[Callable[[Epoch], None]]:
    """Yield a function that writes the figures of an epoch to an event file of TensorBoard; None is left out.

    The file is opened at the first write. The same and later epochs in earlier files, which an interrupted run
    left, are hidden: each epoch occurs once.

    Raises:
        ValueError: if tensorboard is missing, or does not take the name of the folder.
    """
    need("tensorboard", "TensorBoard's file")
    if _encodable(os.fspath(folder)) != os.fspath(folder):
        raise ValueError(f"no curves for TensorBoard: it needs a folder whose name is UTF-8, got {folder}")
    from torch.utils.tensorboard import SummaryWriter

    writer: SummaryWriter | None = None

    def write(epoch: Epoch) -> None:
        nonlocal writer
        writer = writer or SummaryWriter(os.fspath(folder), purge_step=epoch.epoch)
        for field, value in vars(epoch).items():
            kind, _, group = field.rpartition("_")  # "validation_loss" becomes "loss/validation"
            figures = value if isinstance(value, dict) else {group: value}
            for name, one in figures.items():
                if one is not None and field not in ("epoch", "warm_up"):
                    writer.add_scalar(f"{name}/{kind or 'train'}", float(one), epoch.epoch)
        writer.flush()

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()
