"""`python -m benchmarks [names] [--quick] [--out DIR] [--device DEVICE]`: run, print, write results/*.json."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from banach.provenance import source_commit
from benchmarks import (
    compaction,
    invariance,
    ladder,
    layout,
    looptime,
    memory,
    modes,
    onestep,
    overhead,
    penalty,
    starts,
    steps,
)
from benchmarks.report import Result, is_here


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and its two sizes."""

    run: Callable[[Any], Result]
    full: Any
    quick: Any


BENCHMARKS = {
    "overhead": Benchmark(overhead.run, overhead.Settings(), overhead.QUICK),
    "steps": Benchmark(steps.run, steps.Settings(), steps.QUICK),
    "memory": Benchmark(memory.run, memory.Settings(), memory.QUICK),
    "onestep": Benchmark(onestep.run, onestep.Settings(), onestep.QUICK),
    "compaction": Benchmark(compaction.run, compaction.Settings(), compaction.QUICK),
    "invariance": Benchmark(invariance.run, invariance.Settings(), invariance.QUICK),
    "modes": Benchmark(modes.run, modes.Settings(), modes.QUICK),
    "starts": Benchmark(starts.run, starts.Settings(), starts.QUICK),
    "ladder": Benchmark(ladder.run, ladder.Settings(), ladder.QUICK),
    "layout": Benchmark(layout.run, layout.Settings(), layout.QUICK),
    "penalty": Benchmark(penalty.run, penalty.Settings(), penalty.QUICK),
    "looptime": Benchmark(looptime.run, looptime.Settings(), looptime.QUICK),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; the exit status is 1 if a target was missed."""
    chosen = _parse(arguments)
    torch.set_num_threads(1)
    source_commit()  # before the first result is written, which would make the tree dirty
    console = Console(width=100)
    missed = 0
    for name in chosen.names or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        settings = benchmark.quick if chosen.quick else benchmark.full
        if hasattr(settings, "device"):
            settings = replace(settings, device=chosen.device)
        result = benchmark.run(settings)
        result.show(console)
        result.write(chosen.out)
        missed += sum(not target.met for target in result.targets)
    console.print(f"targets missed: {missed}; written to {chosen.out}/", soft_wrap=True)
    return int(missed > 0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="measure banach against TorchDEQ")
    parser.add_argument("names", nargs="*", metavar="name", help=f"which of {', '.join(BENCHMARKS)}; all if none")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repetitions")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the JSON files")
    parser.add_argument(
        "--device", default="cpu", help="where `memory` runs, such as cuda; the rest is on the CPU"
    )
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.names if name not in BENCHMARKS]
    if not is_here(chosen.device):
        parser.error(f"there is no device {chosen.device}; name cpu, cuda or cuda:N that is here")
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    return chosen


if __name__ == "__main__":
    raise SystemExit(main())
