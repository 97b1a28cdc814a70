"""What a study is, and what all studies share: options, records as lines of JSON, verdicts, tables, figures.

A study is a module of this package that `__main__.STUDIES` lists. The first line of its docstring is the claim.
It offers:

    RECORDS: str                file of its records in results/reproduction, one line of JSON per row
    Row                         frozen dataclass: one line of that file, and one row of its table
    run(options) -> list[Row]   compute or train what is missing, write the records, return all rows
    values(rows) -> dict        numbers, claims and Markdown tables for the placeholders of pages
    figures(rows) -> dict       matplotlib figures by name, if any; the report writes docs/reproduction/NAME.svg

`values` and `figures` get the rows that the file holds, and compute nothing that needs a network or data. Numbers
stay numbers until a page shows them. With `options.quick` a study runs on digits, on a CPU, in seconds.
"""

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch

from banach.provenance import plain, provenance, whole_file
from banach.train import RunError
from reproduction import STARTED

RESULTS = Path("results/reproduction")
REPRODUCED, NOT_REPRODUCED, UNDECIDED, UNTESTED = "reproduced", "not reproduced", "undecided", "untested"
WIDEST = 0.3  # points, or units of a ratio: a wider interval around the printed value decides nothing
SEEDS = 3  # fewer decide nothing
T = TypeVar("T")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")  # of Okabe and Ito, also for the colour-blind


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where records, runs, data and tars are, and how long the process may take: see `train --help`."""

    quick: bool = False
    records: Path = RESULTS
    runs: Path = Path("runs")
    data_dir: Path | None = None
    device: str = "auto"
    minutes: float = math.inf
    pack: Path | None = None
    unpack: Path | None = None
    say: Callable[[str], None] = field(default=partial(print, flush=True), repr=False)

    @property
    def left(self) -> float:
        """Seconds left of the budget, which began with the process."""
        return STARTED + 60 * self.minutes - time.monotonic()


def decode(kind: Any, value: Any) -> Any:
    """Return the object of type `kind` that `store` wrote: raises ValueError or TypeError if it does not fit.

    Supported: dataclasses, tuples of one type, dictionaries, numbers, strings, Any, each also `| None`. Keys that
    a dataclass does not have are ignored; missing keys take their defaults.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else decode(inner[0], value)
    if origin is tuple:
        return tuple(decode(inner[0], part) for part in value)
    if origin is dict:
        return {key: decode(inner[1], part) for key, part in value.items()}
    if dataclasses.is_dataclass(kind):
        kinds = {name: one for name, one in get_type_hints(kind).items() if name in value}
        return kind(**{name: decode(one, value[name]) for name, one in kinds.items()})  # type: ignore[operator]
    return float(value) if kind is float else value


def read(kind: type[T], path: Path) -> list[T]:
    """Return the objects of a file of JSON lines as `kind`, see `decode`; an empty list if there is no file.

    A last line without its line break was cut off by a kill and is left out.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [decode(kind, _as_rows(line)) for line in lines]
    except (TypeError, ValueError, AttributeError) as error:
        fault = "is damaged" if isinstance(error, json.JSONDecodeError) else "does not fit"
        raise RunError(f"{path} {fault}: {error}; restore the file, or delete it and run again") from None


read_lines: Callable[[Path], list[dict[str, Any]]] = partial(read, dict[str, Any])


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]], *, append: bool = False) -> None:
    """Replace the file, completely or not at all; `append`: its lines come first."""
    before = read_lines(path) if append else []
    with whole_file(path) as file:
        for line in (*before, *lines):
            file.write(json.dumps(_as_columns(plain(line)), allow_nan=False, separators=(",", ":")) + "\n")


def _as_columns(value: Any) -> Any:
    """Return the value with lists of records as columns, which take a third of the space."""
    if isinstance(value, dict):
        return {key: _as_columns(part) for key, part in value.items()}
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(part, dict) for part in value):
        return value
    if not value[0] or any(part.keys() != value[0].keys() for part in value):
        return [_as_columns(part) for part in value]
    return {"columns": {key: _as_columns([part[key] for part in value]) for key in value[0]}}


def _as_rows(value: Any) -> Any:
    """Return what `_as_columns` was given."""
    if isinstance(value, dict) and value.keys() == {"columns"}:
        columns = _as_rows(value["columns"])
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(value, dict):
        return {key: _as_rows(part) for key, part in value.items()}
    return [_as_rows(part) for part in value] if isinstance(value, list) else value


def store(path: Path, rows: Iterable[Any], device: torch.device | str = "cpu", *, append: bool = False) -> None:
    """Write dataclass rows to a file of records, each with its origin: date, device, versions, commit."""
    made = {k: v for k, v in provenance(device=device).items() if k not in ("settings", "threads", "platform")}
    write_lines(path, [{**dataclasses.asdict(row), "origin": made} for row in rows], append=append)


def origins(path: Path) -> str:
    """Return where the records of a file were computed, for a page: device, torch and commit, with counts."""
    made = [line["origin"] if "origin" in line else line["segments"][-1] for line in read_lines(path)]
    places = Counter(
        f"{one['device']}, torch {one.get('versions', one)['torch']}, commit {(one['commit'] or 'unknown')[:7]}"
        for one in made
    )
    return "; ".join(f"{place} ({count} records)" for place, count in places.items())


@dataclass(frozen=True)
class Interval:
    """A mean over `count` runs, shown as a dash without a run.

    `half`: half-width of its 95% interval by the t quantile, NaN for one run.
    """

    mean: float
    half: float
    count: int

    @staticmethod
    def of(values: Iterable[float]) -> "Interval":
        """Return the interval of independent values."""
        numbers = [float(value) for value in values]
        n = len(numbers)
        error = stdev(numbers) / math.sqrt(n) if n > 1 and math.isfinite(sum(numbers)) else math.nan
        return Interval(fmean(numbers or [math.nan]), _quantile(n - 1) * error, n)

    def minus(self, other: "Interval") -> "Interval":
        """Return the interval of the difference of two independent means, by Welch's degrees of freedom."""
        n, mean = min(self.count, other.count), self.mean - other.mean
        if n < 2:
            return Interval(mean, math.nan, n)
        a, b = ((one.half / _quantile(one.count - 1)) ** 2 for one in (self, other))
        if a + b == 0:
            return Interval(mean, 0.0, n)
        freedom = (a + b) ** 2 / (a**2 / (self.count - 1) + b**2 / (other.count - 1))
        return Interval(mean, _quantile(freedom) * math.sqrt(a + b), n)

    def __format__(self, spec: str) -> str:
        """Return "mean ± half" in a number format, two decimals unless stated."""
        if not self.count:
            return "-"
        spec = spec or ".2f"
        half = "" if math.isnan(self.half) else f" ± {self.half:{spec.lstrip('+')}}"
        return f"{self.mean:{spec}}{half}"

    def __str__(self) -> str:
        return f"{self:.2f} (n = {self.count})" if self.count else "-"


def verdict(ours: Interval, printed: float | None, *, full: bool = True, strict: bool = False) -> str:
    """Return the verdict on the claim "at least `printed`", or "more than `printed`" if `strict`.

    Reproduced: the interval lies above the printed value, or contains it and is narrow. Not reproduced: it lies
    below. Undecided: it contains the value and is wide, or the claim is strict. Untested: shortened runs or
    settings of ours (`full` is False), or fewer than three. A dash: the paper prints nothing (None).
    """
    if printed is None:
        return "-"
    if not full or ours.count < SEEDS:
        return UNTESTED
    if ours.mean + ours.half < printed:
        return NOT_REPRODUCED
    above = ours.mean - ours.half > printed
    return REPRODUCED if above or (ours.half <= WIDEST and not strict) else UNDECIDED


@dataclass(frozen=True)
class Claim:
    """A row of a page: what the paper prints, what we measured, over how many runs of which length."""

    paper: str
    ours: str = "-"
    n: int = 0
    length: str = "-"
    verdict: str = UNTESTED

    @staticmethod
    def of(printed: float | None, ours: Interval, length: str, *, sign: str = "", full: bool = True) -> "Claim":
        """Return the claim "at least `printed`", see `verdict`."""
        paper = "-" if printed is None else f"{printed:{sign}.1f}"
        shown = f"{ours:{sign}.2f}", ours.count, length if ours.count else "-"
        return Claim(paper, *shown, verdict(ours, printed, full=full))

    @staticmethod
    def always(held: int, count: int, n: int) -> "Claim":
        """Return the claim that something holds in all cases over training: one counterexample refutes it."""
        if not count:
            return Claim("always")
        verdict = REPRODUCED if held == count else NOT_REPRODUCED
        return Claim("always", f"{held:,} of {count:,}", n, "over training", verdict)

    def __str__(self) -> str:
        return f"{self.paper} | {self.ours} | {self.n} | {self.length} | {self.verdict}"


def percent(shares: Iterable[float | None]) -> str:
    """Return the least share. Anything short of all is shown as such, never rounded to 100%."""
    least = min((share for share in shares if share is not None), default=None)
    if least is None:
        return "-"
    return "100%" if least == 1 else f"{min(100 * least, 99.99):.2f}%"


def _quantile(freedom: float) -> float:
    """Return the 97.5% quantile of Student's t distribution, NaN without a degree of freedom."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom)) if freedom > 0 else math.nan


def table(rows: Sequence[Sequence[Any]], columns: str) -> str:
    """Return rows with the names of their columns ("a|b") as a Markdown table."""
    if not rows:
        return "(no records)"
    names = columns.split("|")
    lines = [names, ["---"] * len(names), *([cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)


def cell(value: Any) -> str:
    """Return a value as tables show it: four digits, a dash for None, yes or no."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.2e}"
    return str(value)


def draw_band(axes: Any, values: Mapping[float, Sequence[float]], label: str, **style: Any) -> None:
    """Draw the mean of the values at each x as a line, and their range as a band."""
    low, mean, high = ([f(some) for some in values.values()] for f in (min, fmean, max))
    (line,) = axes.plot(list(values), mean, label=label, **style)
    axes.fill_between(list(values), low, high, alpha=0.2, color=line.get_color())


def panels(count: int = 1, *, width: float = 5.0, height: float = 3.6) -> tuple[Any, Any]:
    """Return a matplotlib figure with `count` panels in a row, in the one style of all figures, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for one in axes:
        one.grid(alpha=0.3)
        one.set_prop_cycle(color=COLORS)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)
