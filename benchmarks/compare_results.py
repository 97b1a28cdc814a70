"""Are the figures of results/*.json worse than the committed ones?

    python -m benchmarks cpu && python -m benchmarks.compare_results [--against HEAD] [--out results]

Only ratios and counts are compared: milliseconds of two runs are not. For each column, the table has the geometric
mean over the rows of new by old (above 1 is worse) and the row that got worst. Single rows of timings vary by
several percent from run to run, so the mean counts. The exit status is 1 if it is worse by more than 3%.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Row, table

WORSE = 1.03
LOWER = {  # the less, the better
    "overhead": ("kernels", "allocations", "syncs"),
    "steps": ("steps",),
    "memory": ("peak MB",),
    "onestep": ("ratio",),
    "modes": ("time / JFB",),
}
COLUMNS = [(name, column, 1) for name, some in LOWER.items() for column in some]
COLUMNS += [("compaction", "useful %", -1)]  # the more, the better


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print a table, and return 1 if a figure is more than 3% worse.

    Args:
        arguments: those of the command line; None takes sys.argv.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_results", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--against", default="HEAD", help="commit whose results/*.json are the old ones")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the new results")
    chosen = parser.parse_args(arguments)
    rows = []
    for name, column, sign in COLUMNS:
        path = chosen.out / f"{name}.json"
        if not path.exists():
            parser.error(f"expected {path}; run python -m benchmarks cpu --out {chosen.out} first")
        shown = subprocess.run(
            ["git", "show", f"{chosen.against}:results/{name}.json"], capture_output=True, text=True, check=False
        )
        if shown.returncode:
            parser.error(f"expected a commit with results/{name}.json, got {chosen.against}")
        rows.append(compare(json.loads(shown.stdout), json.loads(path.read_text("utf-8")), column, sign))
    from rich.console import Console

    Console(width=120).print(table(f"new by old, of {chosen.against}: above 1 is worse", rows))
    return int(any(row["mean"] > WORSE for row in rows))


def compare(old: dict[str, Any], new: dict[str, Any], column: str, sign: int) -> Row:
    """Return the mean and the worst ratio of a column; `sign` is 1 if less is better, else -1."""
    before, after = (_values(content, column) for content in (old, new))
    both = {key: after[key] / before[key] for key in before.keys() & after.keys() if before[key] and after[key]}
    grown = [key for key in before.keys() & after.keys() if not before[key] and sign * after[key] > 0]
    ratios = {key: ratio**sign for key, ratio in both.items()} | dict.fromkeys(grown, math.inf)
    worst = max(ratios, key=lambda key: ratios[key])
    mean = math.inf if grown else statistics.geometric_mean(ratios.values())
    row: Row = {"benchmark": new["name"], "figure": column, "rows": len(ratios), "mean": mean}
    return row | {"worst": ratios[worst], "worst row": ", ".join(worst)}


def _values(content: dict[str, Any], column: str) -> dict[tuple[str, ...], float]:
    """Return the column's figures of banach by the words and settings of their rows."""
    found = {}
    for row in content["rows"]:
        value = row.get(column)
        value = value["median"] if isinstance(value, dict) else value
        words = [key for key in row if (isinstance(row[key], str) and key != "T evals") or key == "depth"]
        name = tuple(str(row[key]) for key in words)
        if isinstance(value, (int, float)) and not any("TorchDEQ" in part for part in name):
            found[name] = float(value)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
