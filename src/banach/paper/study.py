"""What every study is given and gives: options; then rows, notes and figures, written with provenance."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from banach.provenance import Summary, plain, provenance, write_json
from banach.train.plot import PlotError, write_figure

Row = dict[str, Any]


def _silent(text: str) -> None:
    pass


@dataclass(frozen=True)
class Options:
    """`quick` runs everything on digits, on a CPU, in minutes: the machinery, not the figures of the paper.

    `out` gets JSON and figures, `runs` the run directories, which are resumed where they are unfinished. `at_once`
    trainings share the device in studies where nothing hangs on their time. `say` is told of every training.
    """

    quick: bool = False
    data_dir: Path | None = None
    device: str = "auto"
    out: Path = Path("results/paper")
    runs: Path = Path("runs/paper")
    at_once: int = 1
    say: Callable[[str], None] = field(default=_silent, compare=False, repr=False)

    def command(self, study: str) -> str:
        """What regenerates a study; runs that are there are read."""
        words = ["banach", "paper", study]
        words += ["--quick"] if self.quick else []
        words += ["--data-dir", "DATA"] if self.data_dir is not None else []
        words += ["--device", self.device] if self.device != "auto" else []
        words += ["--at-once", str(self.at_once)] if self.at_once > 1 else []
        return " ".join(words)

    @property
    def torch_device(self) -> torch.device:
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, eq=False)
class Findings:
    """One study's answer to `claim`, a sentence of the paper. The keys of `rows` are the columns of its table.

    `figures` are functions that draw a matplotlib figure, by name: nothing is drawn where matplotlib is missing.
    """

    name: str
    claim: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    figures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    settings: Any = None
    details: Any = None

    def write(self, options: Options) -> list[Path]:
        """NAME.json, and every figure as PNG and SVG; returns what was written."""
        content = {
            "name": self.name,
            "claim": self.claim,
            "quick": options.quick,
            "command": options.command(self.name),
            "rows": self.rows,
            "notes": self.notes,
            "figures": [f"{name}.png" for name in self.figures],
            "details": plain(self.details),
            "provenance": provenance(self.settings, device=options.torch_device),
        }
        drawn = [path for name, draw in self.figures.items() for path in _draw(draw, options.out / name)]
        return [write_json(options.out / f"{self.name}.json", content), *drawn]  # the numbers last: all are there


def _draw(draw: Callable[[], Any], stem: Path) -> list[Path]:
    try:
        figure = draw()
    except (PlotError, ImportError):
        return []
    return [write_figure(figure, f"{os.fspath(stem)}{ending}") for ending in (".png", ".svg")]


Part = Callable[[Options], Any]  # of a study: it leaves what `run` will find; it can be sent to another process


def _none(options: Options) -> Sequence[Any]:
    return ()


@dataclass(frozen=True)
class Study:
    """A study by name: its claim, the function that carries it out, those `parts` that may run at once, and the
    jobs of its `trainings`."""

    name: str
    claim: str
    run: Callable[[Options], Findings]
    parts: Callable[[Options], Sequence[Part]] = _none
    trainings: Callable[[Options], Sequence[Any]] = _none


def cell(value: Any) -> str:
    """A value as a table shows it: mean ± spread (n) for a summary."""
    if value is None:
        return "-"
    if isinstance(value, Summary):
        spread = "" if value.spread is None else f" ± {value.spread:.2g}"
        return f"{_number(value.mean)}{spread} (n = {value.count})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _number(value) if isinstance(value, (int, float)) else str(value)


def shown(value: Any) -> str:
    """A value of a row that was read from a file, where a Summary is a mapping."""
    if isinstance(value, Mapping) and {"mean", "spread", "count", "median"} <= set(value):
        numbers: dict[str, Any] = {key: float(one) if isinstance(one, str) else one for key, one in value.items()}
        return cell(Summary(**numbers))
    return cell(value)


def _number(value: float) -> str:
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.2e}"
