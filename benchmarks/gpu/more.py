"""`python -m benchmarks.gpu.more NAME.. [--data-dir DIR]`: what a step's time does not show, on a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from banach.data import DataError
from banach.provenance import source_commit
from benchmarks.gpu import curves, epoch, gradients, inference, ladder
from benchmarks.gpu.points import ONE_EACH
from benchmarks.report import Result

NAMES = ("epoch", "inference", "memory", "curves", "gradients", "ladder")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status is 1 if a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.more", description=__doc__)
    parser.add_argument("names", nargs="+", choices=NAMES)
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    chosen = parser.parse_args(arguments)
    source_commit()
    where, out = chosen.data_dir, chosen.out
    benchmarks: dict[str, Callable[[], Result | list[Result]]] = {
        "inference": lambda: inference.run(inference.Settings(data_dir=where)),
        "epoch": lambda: epoch.run(epoch.Settings(data_dir=where)),
        "memory": epoch.memory,
        "curves": lambda: curves.run(curves.Settings(data_dir=where), out / "curves.png"),
        "gradients": lambda: [gradients.run(gradients.Settings(point, data_dir=where)) for point in ONE_EACH],
        "ladder": lambda: ladder.run(ladder.Settings(data_dir=where)),
    }
    missed = 0
    for name in chosen.names:
        try:
            found = benchmarks[name]()
        except DataError as error:
            parser.error(str(error))
        for result in found if isinstance(found, list) else [found]:
            result.show(Console(width=120))
            result.write(out)
            missed += not result.met
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
