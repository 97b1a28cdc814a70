"""Plots of training: one run in six panels, several runs in one figure, and curves for TensorBoard."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from banach.provenance import whole_file
from banach.train.metrics import Epoch

_STYLES = ("-", "--", ":", "-.")  # after ten runs the colours repeat, with another line style
_SIGMA = "largest singular value of dT/du"
# Panels of one run: the name of the axis, then label and field of each line.
_HISTORY = {
    "loss": {"train": "loss", "validation": "validation_loss"},
    "accuracy": {"train": "accuracy", "validation": "validation_accuracy"},
    "learning rate": {"train": "lr"},
    "solver steps": {"train, mean": "depth", "train, max": "max_depth", "validation": "validation_depth"},
    "residual": {"train, mean": "residual", "train, max": "max_residual"},
    _SIGMA: {"train, a few images": "sigma"},
}
# Panels of several runs: both axes, and the field.
_COMPARISON = (
    ("epoch", "accuracy, validation", "validation_accuracy"),
    ("seconds", "accuracy, validation", "validation_accuracy"),
    ("epoch", "loss, train", "loss"),
    ("epoch", "solver steps, train, mean", "depth"),
)


class PlotError(RuntimeError):
    """A plot that cannot be made; the message says why, and what to do."""


def plot_history(epochs: Sequence[Epoch], path: str | os.PathLike[str], **options: Any) -> Path:
    """Write `history_figure` to a file and return its path."""
    return write_figure(history_figure(epochs, **options), path)


def plot_comparison(runs: Mapping[str, Sequence[Epoch]], path: str | os.PathLike[str]) -> Path:
    """Write `comparison_figure` to a file and return its path."""
    return write_figure(comparison_figure(runs), path)


def history_figure(
    epochs: Sequence[Epoch], *, title: str = "", eps: float | None = None, label_smoothing: float = 0.0
) -> Any:
    """Return a matplotlib Figure of a run against its epochs.

    `eps` is the tolerance of the solves, drawn as a line. The legend names `label_smoothing`, since the validation
    loss has none.
    """
    figure = new_figure(width=15)
    bounds = {"residual": (eps, f"eps = {eps or 0:g}"), _SIGMA: (1.0, "R contracts below 1")}
    for axes, (name, lines) in zip(figure.subplots(2, 3).flat, _HISTORY.items(), strict=True):
        for number, (label, field) in enumerate(lines.items()):
            smoothed = f", with label smoothing {label_smoothing:g}" if label_smoothing and field == "loss" else ""
            values = _values(epochs, field)
            if any(map(math.isfinite, values)):
                at = [epoch.epoch for epoch in epochs]
                axes.plot(at, values, marker=".", color=f"C{number}", label=label + smoothed)
        if name == "residual" and any(value > 0 for line in axes.lines for value in line.get_ydata()):
            axes.set_yscale("log", nonpositive="mask")
        value, label = bounds.get(name, (None, ""))
        if axes.lines and value is not None:
            axes.axhline(value, color="black", linestyle=":", linewidth=1, label=label)
        if axes.lines:
            axes.legend()
        _finish(axes, "epoch", name, epochs, [*lines.values()])
    if title:
        figure.suptitle(title, parse_math=False)
    return figure


def comparison_figure(runs: Mapping[str, Sequence[Epoch]]) -> Any:
    """Return a matplotlib Figure of several runs: accuracy by epochs and by seconds, loss, depth."""
    figure = new_figure()
    for axes, (across, name, field) in zip(figure.subplots(2, 2).flat, _COMPARISON, strict=True):
        for number, epochs in enumerate(runs.values()):
            style = {"color": f"C{number % 10}", "linestyle": _STYLES[number // 10 % len(_STYLES)]}
            seconds = accumulate(epoch.seconds for epoch in epochs)
            at = [epoch.epoch for epoch in epochs] if across == "epoch" else [*seconds]
            axes.plot(at, _values(epochs, field), marker=".", **style)
        _finish(axes, across, name, [*chain(*runs.values())], [field])
    # A name that begins with "_" would be left out of the legend, and a "$" in a name is not mathematics.
    labels = [f" {name}" if name.startswith("_") else name for name in runs]
    options: Any = {"loc": "outside lower center", "ncols": min(3, max(1, len(labels)))}
    for text in figure.legend(figure.axes[0].lines, labels, **options).get_texts():
        text.set_parse_math(False)
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


def _finish(axes: Any, across: str, name: str, epochs: Sequence[Epoch], fields: Sequence[str]) -> None:
    """Label a panel; one that shows nothing says why."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel=across, ylabel=name)
    axes.grid(alpha=0.3)
    if across == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if not any(math.isfinite(value) for line in axes.lines for value in line.get_ydata()):
        missing = all(getattr(epoch, field) is None for epoch in epochs for field in fields)
        solved = any(epoch.depth is not None for epoch in epochs)
        why = "nothing was measured" if solved or "accuracy" in name else "no fixed point: nothing to show"
        why = (why if missing else "no finite value") if epochs else "no epoch is done yet"
        axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color="0.4")


class Board:
    """Writes epochs to an event file of TensorBoard in `folder`; use it in a `with`.

    The file is opened at the first write. The same and later epochs in earlier files, which an interrupted run
    left, are hidden: each epoch occurs once. Without tensorboard it raises a RuntimeError.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            missing = "TensorBoard is not written: tensorboard is missing; run: pip install 'banach[app]'"
            raise RuntimeError(missing) from None
        self._folder, self._make = os.fspath(folder), SummaryWriter
        self._writer: SummaryWriter | None = None

    def write(self, epoch: Epoch) -> None:
        """Write the figures of one epoch to the disk; figures that are None are left out."""
        writer = self._writer = self._writer or self._make(self._folder, purge_step=epoch.epoch)
        for field, value in vars(epoch).items():
            group, kind = tag(field).split("/")
            figures = value if isinstance(value, dict) else {group: value}
            for name, one in figures.items():
                if one is not None and field not in ("epoch", "warm_up"):
                    writer.add_scalar(f"{name}/{kind}", float(one), epoch.epoch)
        writer.flush()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()


def tag(field: str) -> str:
    """Return the name of a figure in TensorBoard, by group: "validation_loss" is "loss/validation"."""
    kind, _, group = field.rpartition("_")
    return f"{group}/{kind or 'train'}"
