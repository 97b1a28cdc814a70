"""`python -m benchmarks.training NAME.. [--data-dir DIR]`: train, print, write results/training/*.json."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from banach.provenance import source_commit
from benchmarks.report import Result
from benchmarks.training import loopcost, matrix, runs
from benchmarks.training.place import Place

BENCHMARKS: dict[str, Callable[[Place], Result]] = {
    "digits": runs.digits,
    "mnist": runs.mnist,
    "mnist-gpu": runs.mnist_gpu,
    "svhn-gpu": runs.svhn_gpu,
    "cifar10-gpu": runs.cifar10_gpu,
    "matrix": matrix.run,
    "loopcost": loopcost.run,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status is 1 if a figure was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="name", choices=list(BENCHMARKS), help=", ".join(BENCHMARKS))
    parser.add_argument("--data-dir", type=Path, help="where the data lies; else BANACH_DATA, the cache")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmarks"), help="where the run directories go")
    parser.add_argument("--out", type=Path, default=Path("results/training"), help="folder for the JSON files")
    chosen = parser.parse_args(arguments)
    source_commit()  # before the first result is written, which would make the tree dirty
    missed = 0
    for name in chosen.names:
        result = BENCHMARKS[name](Place(chosen.data_dir, chosen.device, chosen.runs))
        result.show(Console(width=120))
        result.write(chosen.out)
        missed += not result.met
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
