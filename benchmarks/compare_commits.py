"""Captured training steps of two source trees, old and new, in one command.

    python -m benchmarks.compare_commits OLD/src NEW/src [--out FILE] [--contender NAME] [--pairs 3] [--seconds 90]

Claim: a change of the code does not change the speed of `TrainStep`. Each pair is two processes per point, one per
tree. All prepare together, then take turns, so that a slow moment of the machine hits both. The ratio new/old is
taken per pair, then its median and range over the pairs. Of both trees only public names are used. The file is
written after every pair. The exit status is 1 if a ratio is above 1.03.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job, Settings
from benchmarks.points import PAPER_POINTS
from benchmarks.processes import Record, read, run_wave
from benchmarks.results import Figure
from benchmarks.training_step import QUICK

SLOWER = 1.03
HERE = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; write JSON if `--out` is given.

    Args:
        arguments: those of the command line; None takes sys.argv.
    Returns:
        1 if a point of the new tree is more than 3% slower or a step failed, else 0.
    """
    chosen = _parse(arguments)
    began, rows = time.monotonic(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder)
        for number in range(chosen.pairs):
            _run_pair(chosen, records, number, began + chosen.seconds)
            found = {side: read(records / side / "training-step.jsonl") for side in ("old", "new")}
            rows = {name: summary(*(_of(found[side], name) for side in found)) for name in chosen.points}
            if chosen.out is not None:
                chosen.out.write_text(json.dumps({"points": rows, "records": found}, indent=1) + "\n")
            spent = time.monotonic() - began
            if spent / (number + 1) * (number + 2) > chosen.seconds:
                break  # no time for another pair
    for name, row in rows.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return int(any(row.get("ratio", float("inf")) > SLOWER for row in rows.values()))


def _run_pair(chosen: argparse.Namespace, folder: Path, number: int, deadline: float) -> None:
    """Run one process per tree and point. The new tree trains the weights they start from."""
    base = replace(QUICK if chosen.quick else Settings(), work=folder)
    points = {name: base.point(name) for name in chosen.points}
    if number == 0:
        starts = [Job("start", name, "banach-eager", point.precision or "fp32") for name, point in points.items()]
        run_wave({job.name: _command(chosen, "new", job, base) for job in starts}, deadline, {})
    jobs = [Job("step", name, chosen.contender, one.precision or "bf16", number) for name, one in points.items()]
    sides = ("old", "new") if number % 2 == 0 else ("new", "old")
    run_wave(
        {f"{side} {job.name}": _command(chosen, side, job, base) for job in jobs for side in sides}, deadline, {}
    )


def _command(chosen: argparse.Namespace, side: str, job: Job, settings: Settings) -> list[str]:
    path = f"PYTHONPATH={getattr(chosen, side).resolve()}:{HERE}"
    return ["env", path, *job.command(replace(settings, out=settings.work / side))]


def _of(records: list[Record], point: str) -> list[Record]:
    return [one for one in records if one["study"] == "step" and one["point"] == point]


def summary(old: list[Record], new: list[Record]) -> dict[str, Any]:
    """Return ms of old and new, and the ratio's median and range over the pairs; errors if a side failed."""
    errors = sorted({one["error"] for one in (*old, *new) if "error" in one})
    pairs = {one["number"]: one["ms"] for one in old if "error" not in one}
    both = [(pairs[one["number"]], one["ms"]) for one in new if one["number"] in pairs and "error" not in one]
    if errors or not both:
        return {"errors": errors or ["a process wrote no record"]}
    ratio = Figure.of(b / a for a, b in both)
    return {
        "old ms": round(Figure.of(a for a, _ in both).median, 4),
        "new ms": round(Figure.of(b for _, b in both).median, 4),
        "ratio": round(ratio.median, 4),
        "range": [round(ratio.least, 4), round(ratio.most, 4)],
        "pairs": len(both),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_commits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("old", type=Path, help="the src folder of the old tree")
    parser.add_argument("new", type=Path, help="the src folder of the new tree")
    parser.add_argument("--points", nargs="+", default=list(PAPER_POINTS), help="default: the four of the paper")
    parser.add_argument("--contender", default="banach-captured", help="such as banach-fast, which also compiles")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of processes (default 3)")
    parser.add_argument("--seconds", type=float, default=90.0, help="start no pair that would end after this")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--quick", action="store_true", help="batch 4 and a few steps: shows that it runs")
    chosen = parser.parse_args(arguments)
    for folder in (chosen.old, chosen.new):
        if not (folder / "banach" / "__init__.py").exists():
            parser.error(f"expected a src folder that holds banach/, got {folder}")
    return chosen


if __name__ == "__main__":
    raise SystemExit(main())
