"""Summaries of the GPU records: one row per contender, ratios to the fastest peer, targets, the table of the docs.

    python -m benchmarks.summary    rewrites the table in docs/speed.md from results/gpu

A ratio to peers is taken against the fastest peer of any record, also of runs in older files of the folder. Its
range is that of the processes: the fastest of one against the slowest of the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.contenders import CONTENDERS
from benchmarks.points import OWN_POINTS, PAPER_POINTS
from benchmarks.processes import Record
from benchmarks.results import Figure, Report, Row, Target, cell

OURS, TWIN = "banach-fast", "explicit-fast"
# At most so many ms; times faster than peers as users run them, at least; times as long as the twin, at most.
PROMISED: dict[str, tuple[float, float, float | None]] = {
    "transformer": (2.5, 12, None),
    "mlp": (0.33, 16, None),
    "two-scales": (1.4, 5, None),
    "mnist100": (0.47, 18, 2.0),
    "svhn100": (1.26, 11, 3.0),
    "svhn100-trained": (math.inf, 11, None),
    "cifar100": (6.3, 9, 1.15),
    "cifar512": (20.2, 8, 1.1),
}
EAGER = 1.05  # of the plain loop's time, at most
ANDERSON = 1.3  # Picard steps
PREDICTION = {"1": 5.0, "64": 5.0, "1024": 3.0}  # times faster than the plain loop, at least
CYCLE = 4  # a loop on the device may go on for CYCLE - 1 steps
GRADIENT = 1.5  # times the error of the eager step, at most
SPREADS = 2.0  # between the final losses of captured and eager training, at most


def report(records: list[Record], folder: Path, note: str | None = None) -> Report:
    """Return a row for every contender, and the targets that the records allow to judge.

    Args:
        records: of the training-step benchmark.
        folder: of older results, for the fastest peer.
        note: a further note.
    """
    known = _Measured(records, folder)
    failed = [f"{one['job']}: {one['error']}" for one in records if "error" in one]
    notes = [
        "ms: median of the processes' medians, and their range; the last precision is the one that counts",
        "batches are on the device before the time begins, augmented where the paper augments, for all alike",
        "depth: of the slowest sample, and of the mean one",
        *([note] if note else []),
        *failed,
    ]
    targets = [*known.step_targets(), *_other_targets(known)]
    return Report(known.rows(), targets, notes)


class _Measured:
    """Figures of records by study, point and contender, in the precision of most processes."""

    def __init__(self, records: list[Record], folder: Path) -> None:
        self.groups: dict[tuple[str, str, str], list[Record]] = {}
        for one in records:
            if "error" not in one and one["study"] != "start":
                self.groups.setdefault((one["study"], one["point"], one["contender"]), []).append(one)
        self.older = list(_older_peers(folder))

    def best(self, study: str, point: str, contender: str) -> list[Record]:
        """Return the records of the precision that the later processes used."""
        group = self.groups.get((study, point, contender), [])
        last = max(group, key=lambda one: (one["number"], -one["ms"]))["precision"] if group else None
        return [one for one in group if one["precision"] == last]

    def ms(self, point: str, contender: str) -> Figure | None:
        found = [one["ms"] for one in self.best("step", point, contender)]
        return Figure.of(found) if found else None

    def rows(self) -> list[Row]:
        rows = []
        for (study, point, contender), group in self.groups.items():
            some = self.best(study, point, contender) if study in ("step", "prediction") else group
            figure = Figure.of(one["ms"] for one in some) if "ms" in some[0] else None
            row: Row = {"study": study, "point": point, "contender": contender, "in": some[0]["precision"]}
            row |= (
                {"ms": None, "range": None} if figure is None else {"ms": figure.median, "range": _range(figure)}
            )
            row["n"] = len(some)
            one = some[-1]
            row["depth"] = f"{one['depth']:.1f} / {one['mean_depth']:.1f}" if one.get("depth") else None
            row["met %"] = round(100 * one["met"]) if one.get("met") is not None else None
            row["MB"] = round(one["peak_bytes"] / 2**20) if one.get("peak_bytes") else None
            row["syncs"] = one.get("host_syncs")
            rows.append(row)
        return rows

    def fastest_peer(self, point: str, role: str = "peer") -> tuple[str, Figure] | None:
        """Return the fastest peer of any run, as users run it or tuned."""
        peers = [(name, self.ms(point, name)) for name, one in CONTENDERS.items() if one.role == role]
        peers += [(name, figure) for where, name, figure in self.older if where == point and role == "peer"]
        known = [(name, figure) for name, figure in peers if figure is not None]
        return min(known, key=lambda one: one[1].median) if known else None

    def step_targets(self) -> Iterator[Target]:
        for point, (most, faster, twin) in PROMISED.items():
            ours, explicit = self.ms(point, OURS), self.ms(point, TWIN)
            if ours is None:
                continue
            if math.isfinite(most):
                yield Target(f"{point}: ms of {OURS}", ours.median, most)
            for role, bound in (("peer", faster), ("tuned", 1.0)):
                if peer := self.fastest_peer(point, role):
                    times = _ratio(peer[1], ours)
                    title = f"{point}: times faster than {peer[0]} ({_range(times)})"
                    yield Target(title, times.median, bound, at_least=True)
            if explicit is not None and twin is not None:
                yield Target(f"{point}: times as long as {TWIN}", ours.median / explicit.median, twin)
        yield from self._eager_targets()

    def _eager_targets(self) -> Iterator[Target]:
        for point in (*OWN_POINTS, *PAPER_POINTS):
            eager, plain = self.ms(point, "banach-eager"), self.ms(point, "plain")
            if eager is not None and plain is not None:
                times = _ratio(eager, plain)
                yield Target(f"{point}: eager / plain loop ({_range(times)})", times.median, EAGER)


def _other_targets(known: _Measured) -> Iterator[Target]:
    """Yield what is promised besides training steps against peers."""
    ours, twin = (known.ms("transformer-8", name) for name in (OURS, TWIN))
    if ours is not None and twin is not None:
        yield Target("transformer, mean sample 8 steps: implicit / explicit", ours.median / twin.median, 3.0)
    if cost := [one["per_step"] for one in known.groups.get(("per-step", "transformer", OURS), [])]:
        times = Figure.of(one["Anderson"] / one["Picard"] for one in cost)
        yield Target(f"captured Anderson / Picard, per step ({_range(times)})", times.median, ANDERSON)
    yield from _prediction_targets(known)
    for point in OWN_POINTS:
        for one in known.groups.get(("depth", point, "banach-captured"), []):
            yield Target(f"{point}: evaluations of R beyond those needed", one["most_more"], CYCLE - 1)
    yield from _curve_targets(known)
    yield from _gradient_targets(known)


def _prediction_targets(known: _Measured) -> Iterator[Target]:
    fast, plain = (_by_batch(known.best("prediction", "transformer", name)) for name in (OURS, "plain"))
    for size in fast.keys() & plain.keys():
        times = _ratio(plain[size], fast[size])
        title = f"prediction, batch {size}: times faster than the plain loop ({_range(times)})"
        yield Target(title, times.median, PREDICTION.get(size, 1.0), at_least=True)
    for name in ("plain-tuned", "plain-graphs"):
        other = _by_batch(known.best("prediction", "transformer", name))
        for size in fast.keys() & other.keys():
            times = _ratio(other[size], fast[size])
            yield Target(
                f"prediction, batch {size}: times faster than {name} ({_range(times)})", times.median, 1.0, True
            )


def _by_batch(records: list[Record]) -> dict[str, Figure]:
    sizes = records[0]["by_batch"] if records else ()
    return {size: Figure.of(one["by_batch"][size]["median"] for one in records) for size in sizes}


def _curve_targets(known: _Measured) -> Iterator[Target]:
    for point in ("transformer", "cifar100"):
        ways = [known.groups.get(("curve", point, f"banach-{way}"), []) for way in ("captured", "eager")]
        if all(len(some) > 1 for some in ways):
            captured, eager = (Figure.of(one["final"] for one in some) for some in ways)
            apart = abs(captured.mean - eager.mean) / max(captured.spread or 0.0, eager.spread or 0.0, 1e-12)
            yield Target(f"{point}: final losses apart, in spreads over seeds", apart, SPREADS)


def _gradient_targets(known: _Measured) -> Iterator[Target]:
    """Compare captured with eager steps in the same precision, part by part."""
    for point in (*OWN_POINTS, *PAPER_POINTS):
        eager = {one["precision"]: one for one in known.groups.get(("gradients", point, "banach-eager"), [])}
        for one in known.groups.get(("gradients", point, OURS), []):
            for part, error in one["errors"].items() if one["precision"] in eager else ():
                times = error / eager[one["precision"]]["errors"][part]
                yield Target(f"{point}: error of the gradient of {part}, of the eager one", times, GRADIENT)


def _ratio(above: Figure, below: Figure) -> Figure:
    """Return the ratio of two medians with its range: the least of one by the most of the other."""
    value, least, most = above.median / below.median, above.least / below.most, above.most / below.least
    return Figure(value, None, above.count, value, least, most)


def _range(figure: Figure) -> str:
    return f"{cell(figure.least)}-{cell(figure.most)}"


def _older_peers(folder: Path) -> Iterator[tuple[str, str, Figure]]:
    """Yield point, name and ms of the peers in files of earlier benchmarks, one process each."""
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        where = content.get("provenance", {}).get("settings", {}).get("point")
        for one in _measured(content):
            if isinstance(where, dict) and one.get("role") == "peer":
                name = {"plain": "authors"}.get(one["contender"], one["contender"])  # that loop computed Q twice
                yield where["name"], f"{name} of {path.name}", Figure.of([one["ms"]])


def _measured(content: Any) -> Iterable[Record]:
    found = content.get("measured", []) if isinstance(content, dict) else []
    return found if isinstance(found, list) else found.values()
