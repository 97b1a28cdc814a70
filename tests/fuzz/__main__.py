"""python -m fuzz [--cases N] [--out FILE]: fuzz every reader of files; write results/fuzz.json."""

import argparse
import resource
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from banach.provenance import provenance, source_commit, write_json
from fuzz.bombs import run_bombs
from fuzz.targets import Target, all_targets

LIMIT = 2**30  # bytes


def run(target: Target, cases: int) -> dict[str, Any]:
    """Give `cases` inputs to a target, the same ones at every call; return how many were read and refused."""
    counts: Counter[bool] = Counter()

    @settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.given)
    def feed(content: Any) -> None:
        counts[target.accepts(content)] += 1

    failure = None
    try:
        feed()
    except Exception as error:  # what the target must not raise; hypothesis has added the smallest input
        failure = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return {"cases": counts.total(), "read": counts[True], "refused": counts[False], "failure": failure}


def main() -> int:
    """Run all targets; return 1 if one failed or the process needed more than 1 GiB for it."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="of all targets together")
    parser.add_argument("--out", type=Path, default=Path("results/fuzz.json"))
    chosen = parser.parse_args()
    source_commit()  # before anything is written, which would make the tree dirty
    warnings.simplefilter("ignore")  # Pillow's, about the damage
    start, found, at_start = time.perf_counter(), {}, _peak()
    bombs = run_bombs()
    with all_targets() as targets:
        for name, target in targets.items() if chosen.cases else ():
            found[name] = run(target, -(-chosen.cases // len(targets)))
            print(name, found[name], flush=True)
    failures = [name for name, one in found.items() if one["failure"]]
    peak = _peak()
    totals = {"cases": sum(one["cases"] for one in found.values()), "failures": len(failures), "bombs": bombs}
    measured = {
        "peak_bytes": peak,
        "at_start_bytes": at_start,
        "limit_bytes": LIMIT,
        "seconds": round(time.perf_counter() - start, 1),
    }
    write_json(chosen.out, {**totals, **measured, "targets": found, **provenance({"cases": chosen.cases})})
    print(f"{totals}, peak memory {peak / 2**20:.0f} MiB; written to {chosen.out}")
    return int(bool(failures) or peak - at_start > LIMIT)  # torch with CUDA takes most of a GiB at the start


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
