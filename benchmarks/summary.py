"""Summaries of the GPU records: one row per contender, ratios to the fastest peer, targets, the table of the docs.

    python -m benchmarks.summary             rewrite the table in docs/speed.md from results/gpu
    python -m benchmarks.summary OLD NEW     ratios of the records in two folders, such as those of two commits

A ratio to peers is taken against the fastest peer of any record, also of earlier benchmarks in the folder. Its
range is that of the processes: the fastest of one against the slowest of the other.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from benchmarks.contenders import CONTENDERS
from benchmarks.points import OWN_POINTS, PAPER_POINTS, POINTS, RIVAL_POINTS
from benchmarks.processes import Record, read
from benchmarks.results import Figure, Report, Row, Target, cell

RECORDS = "training-step.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
OURS, TWIN = "banach-fast", "explicit-fast"
# At most so many ms; times faster than peers as users run them, at least; times as long as the twin, at most.
PROMISED: dict[str, tuple[float | None, float, float | None]] = {
    "transformer": (2.5, 12, None),
    "mlp": (0.33, 16, None),
    "two-scales": (1.4, 5, None),
    "mnist100": (0.47, 18, 2.0),
    "svhn100": (1.26, 11, 3.0),
    "svhn100-trained": (None, 11, None),
    "cifar100": (6.3, 9, 1.15),
    "cifar512": (20.2, 8, 1.1),
    "transformer-8": (None, 1, 3.0),
}
# Times faster than rivals as their authors run them.
RIVALS = {"exact-captured": 1.0, "jfb-captured": 3.0, "jfb-fast": 3.0}
EAGER = 1.05  # of the plain loop's time, at most
MEMORY = 1.05  # of the peak of the explicit twin, at most
ANDERSON = 1.3  # Picard steps
PREDICTION = {"1": 5.0, "64": 5.0, "1024": 3.0}  # times faster than the plain loop, at least
CYCLE = 4  # a loop on the device may go on for CYCLE - 1 steps
GRADIENT = 1.5  # times the error of the eager step, at most
SPREADS = 2.0  # between the final losses of captured and eager training, at most


class Measured:
    """The records of a folder by study, point and contender, and those of earlier benchmarks."""

    def __init__(self, records: list[Record], folder: Path) -> None:
        self.groups: dict[tuple[str, str, str], list[Record]] = {}
        for one in records:
            if "error" not in one and one["study"] != "start":
                self.groups.setdefault((one["study"], one["point"], one["contender"]), []).append(one)
        self.older = list(_older(folder))

    def best(self, study: str, point: str, contender: str) -> list[Record]:
        """Return the records of the precision that the later processes used."""
        group = self.groups.get((study, point, contender), [])
        last = max(group, key=lambda one: (one["number"], -one["ms"]))["precision"] if group else None
        return [one for one in group if one["precision"] == last]

    def ms(self, point: str, contender: str) -> Figure | None:
        """Return ms per training step over the processes, or of an earlier benchmark."""
        found = [one["ms"] for one in self.best("step", point, contender)]
        found = found or [ms for file, *key, ms in self.older if key == [point, contender] and file == point]
        return Figure.of(found) if found else None

    def fastest(self, point: str, role: str) -> tuple[str, Figure] | None:
        """Return the fastest contender of a role in any run: its name, with the file of an earlier run, and ms."""
        names = [name for name, one in CONTENDERS.items() if one.role == role]
        found = {name: [one["ms"] for one in self.best("step", point, name)] for name in names}
        for file, where, name, ms in self.older:
            if where == point and name in names:
                found[f"{name} of {file}.json"] = [ms]
        known = [(name, Figure.of(some)) for name, some in found.items() if some]
        return min(known, key=lambda one: one[1].median, default=None)

    def values(self, study: str, point: str, contender: str, field: str) -> list[float]:
        """Return a field of all records of a contender."""
        return [one[field] for one in self.groups.get((study, point, contender), []) if one.get(field) is not None]


def report(records: list[Record], folder: Path, note: str | None = None) -> Report:
    """Return a row for every contender, and the targets that the records, and earlier ones, allow to judge."""
    known = Measured(records, folder)
    notes = [
        "ms: median of the processes' medians, and their range, in the fastest precision that met the tolerance",
        "batches are on the device before the time begins, augmented where the paper augments, for all alike",
        "depth: of the slowest sample, and of the mean one",
        *([note] if note else []),
        *(f"{one['job']}: {one['error']}" for one in records if "error" in one),
    ]
    judges = _step_targets, _prediction_targets, _other_targets, _gradient_targets
    targets = [target for judge in judges for target in judge(known)]
    return Report([_row(known, *key) for key in known.groups], targets, notes)


def _row(known: Measured, study: str, point: str, contender: str) -> Row:
    group = known.groups[study, point, contender]
    some = known.best(study, point, contender) if "ms" in group[0] else group
    one, figure = some[-1], Figure.of(one["ms"] for one in some) if "ms" in some[0] else None
    row: Row = {"study": study, "point": point, "contender": contender, "in": one["precision"]}
    row |= {"ms": figure and figure.median, "range": figure and _range(figure), "n": len(some)}
    row["depth"] = f"{one['depth']:.1f} / {one['mean_depth']:.1f}" if one.get("depth") else None
    row["met %"] = round(100 * one["met"]) if one.get("met") is not None else None
    row["MB"] = round(one["peak_bytes"] / 2**20) if one.get("peak_bytes") else None
    return row | {"syncs": one.get("host_syncs")}


def _times(
    title: str, above: Figure | None, below: Figure | None, bound: float | None, least: bool
) -> Iterator[Target]:
    """Yield the target of a ratio, with its range in the title, if both were measured."""
    if above is not None and below is not None and bound is not None:
        times = ratio(above, below)
        yield Target(f"{title} ({_range(times)})", times.median, bound, at_least=least)


def _step_targets(known: Measured) -> Iterator[Target]:
    for point, (most, faster, twin) in PROMISED.items():
        ours = known.ms(point, OURS) if known.best("step", point, OURS) else None
        if ours is not None and most is not None:
            yield Target(f"{point}: ms of {OURS}", ours.median, most)
        for role, bound in (("peer", faster), ("tuned", 1.0)):
            if peer := known.fastest(point, role):
                yield from _times(f"{point}: times faster than {peer[0]}", peer[1], ours, bound, True)
        yield from _times(f"{point}: implicit / explicit", ours, known.ms(point, TWIN), twin, False)
        memory = [known.values("step", point, name, "peak_bytes") for name in (OURS, TWIN)]
        if all(memory):
            yield Target(f"{point}: peak memory / that of the twin", min(memory[0]) / min(memory[1]), MEMORY)
    for point in (*OWN_POINTS, *PAPER_POINTS):
        if known.best("step", point, "banach-eager"):
            pair = known.ms(point, "banach-eager"), known.ms(point, "plain")
            yield from _times(f"{point}: eager / plain loop", *pair, EAGER, False)
    for point, (name, faster) in product(RIVAL_POINTS, RIVALS.items()):
        pair = known.ms(point, "exact-eager"), known.ms(point, name)
        yield from _times(f"{point}: {name}, times faster than exact-eager", *pair, faster, True)


def _prediction_targets(known: Measured) -> Iterator[Target]:
    ours = _by_batch(known, OURS)
    for name in ("plain", "plain-tuned", "plain-graphs"):
        other = _by_batch(known, name)
        for size, figure in ours.items():
            bound = PREDICTION.get(size, 1.0) if name == "plain" else 1.0
            title = f"prediction, batch {size}: times faster than {name}"
            yield from _times(title, other.get(size), figure, bound, True)


def _by_batch(known: Measured, contender: str) -> dict[str, Figure]:
    records = known.best("prediction", "transformer", contender)
    sizes = records[0]["by_batch"] if records else ()
    return {size: Figure.of(one["by_batch"][size]["median"] for one in records) for size in sizes}


def _other_targets(known: Measured) -> Iterator[Target]:
    """Yield what is promised of solvers, depths and loss curves."""
    if cost := known.groups.get(("per-step", "transformer", OURS)):
        times = Figure.of(one["per_step"]["Anderson"] / one["per_step"]["Picard"] for one in cost)
        yield Target(f"captured Anderson / Picard, per step ({_range(times)})", times.median, ANDERSON)
    for point in OWN_POINTS:
        for more in known.values("depth", point, "banach-captured", "most_more"):
            yield Target(f"{point}: evaluations of R beyond those needed", more, CYCLE - 1)
    for point in ("transformer", "cifar100"):
        final = [known.values("curve", point, f"banach-{way}", "final") for way in ("captured", "eager")]
        if all(len(some) > 1 for some in final):
            captured, eager = map(Figure.of, final)
            apart = abs(captured.mean - eager.mean) / max(captured.spread or 0.0, eager.spread or 0.0, 1e-12)
            yield Target(f"{point}: final losses apart, in spreads over seeds", apart, SPREADS)


def _gradient_targets(known: Measured) -> Iterator[Target]:
    """Compare captured with eager steps in the same precision, part by part."""
    for (study, point, name), records in known.groups.items():
        eager = known.groups.get(("gradients", point, "banach-eager"))
        if (study, name) == ("gradients", OURS) and eager:
            for part, error in records[0]["errors"].items():
                title = f"{point}: error of the gradient of {part}, of the eager one"
                yield Target(title, error / eager[0]["errors"][part], GRADIENT)


def ratio(above: Figure, below: Figure) -> Figure:
    """Return the ratio of two medians with its range: the least of one by the most of the other."""
    value, least, most = above.median / below.median, above.least / below.most, above.most / below.least
    return Figure(value, None, above.count, value, least, most)


def _range(figure: Figure) -> str:
    return f"{cell(figure.least)}-{cell(figure.most)}"


def _older(folder: Path) -> Iterator[tuple[str, str, str, float]]:
    """Yield file, point, contender and ms of earlier benchmarks, which had one process."""
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        where = content.get("provenance", {}).get("settings", {}).get("point")
        for one in content.get("measured", ()) if isinstance(where, dict) else ():
            name = {"plain": "authors"}.get(one["contender"], one["contender"])  # that loop computed Q twice
            yield path.stem, where["name"], name, one["ms"]


def page_table(folder: Path) -> str:
    """Return the table of docs/speed.md from the records of a folder, as Markdown."""
    known = Measured(read(folder / RECORDS), folder)
    lines = [
        "| point | banach, ms | fastest peer, untuned, ms | times faster | tuned peer / banach | banach / twin |",
        "|---|---|---|---|---|---|",
    ]
    for name in (*OWN_POINTS, *PAPER_POINTS, "svhn100-trained"):
        ours, twin = known.ms(name, OURS), known.ms(name, TWIN)
        peer, tuned = (known.fastest(name, role) for role in ("peer", "tuned"))
        if ours is not None:
            cells = [f"{name}, batch {POINTS[name].batch}", _shown(ours)]
            cells += [f"{_shown(peer[1])} ({peer[0]})", _shown(ratio(peer[1], ours))] if peer else ["", ""]
            cells += [_shown(ratio(tuned[1], ours)) if tuned else "", _shown(ratio(ours, twin)) if twin else ""]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(figure: Figure) -> str:
    """Return the median, with its range if there were several processes."""
    return cell(figure.median) + ("" if figure.least == figure.most else f" ({_range(figure)})")


def rewritten(page: str, table: str) -> str:
    """Return the page with its table replaced."""
    place = re.compile(r"(<!-- table[^\n]*-->\n).*?(\n<!-- end -->)", re.DOTALL)
    return place.sub(lambda m: m[1] + table + m[2], page)


def main(arguments: Sequence[str]) -> None:
    """Rewrite the table of the docs, or print the ratios of two folders."""
    if not arguments:
        table = page_table(PAGE.parents[1] / "results" / "gpu")
        PAGE.write_text(rewritten(PAGE.read_text("utf-8"), table), "utf-8")
        return
    old, new = (Measured(read(Path(folder) / RECORDS), Path(folder)) for folder in arguments)
    for study, point, name in new.groups:
        pair = new.ms(point, name), old.ms(point, name)
        for target in _times(f"{point}, {name}: new / old", *pair, 1.03, False) if study == "step" else ():
            print(target.sentence())


if __name__ == "__main__":
    main(sys.argv[1:])
