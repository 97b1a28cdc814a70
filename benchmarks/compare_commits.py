"""Captured training steps of two source trees, old and new, at the four working points, in one command.

    python -m benchmarks.compare_commits OLD/src NEW/src [--out FILE] [--compile] [--pairs 3] [--seconds 90]

Claim: a change of the code does not change the speed of `TrainStep`. Each pair is two processes, one per tree.
They prepare a point together, then take turns in blocks of steps, so that a slow moment of the machine hits both.
The ratio new/old is taken per pair, then its median and range over the pairs. Of both trees only public names are
used. `--compile` also compiles Q, R and S, which takes minutes. The file is written after every point. The exit
status is 1 if a ratio is above 1.03.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch  # and not banach: the processes import it, each from its own tree

FOUR = ("mnist100", "svhn100", "cifar100", "cifar512")
WARM_UP, BLOCKS, BLOCK = 40, 6, 25
SLOWER = 1.03


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; write JSON if `--out` is given.

    Args:
        arguments: those of the command line; None takes sys.argv.
    Returns:
        1 if a point of the new tree is more than 3% slower or a step failed, else 0.
    """
    chosen = _parse(arguments)
    began, found = time.perf_counter(), {name: list[dict[str, Any]]() for name in chosen.points}
    for number in range(chosen.pairs):
        for name, pair in _pair(chosen, number):
            found[name].append(pair)
            spent = time.perf_counter() - began
            print(f"{spent:4.0f} s, pair {number + 1}, {name}: {summary([pair])}", flush=True)
            _write(chosen, found)
        if spent / (number + 1) * (number + 2) > chosen.seconds:
            break  # no time for another pair
    rows = {name: summary(pairs) for name, pairs in found.items()}
    for name, row in rows.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return int(any(row.get("ratio", float("inf")) > SLOWER for row in rows.values()))


def _write(chosen: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    """Write what was measured so far, if a file was asked for."""
    if chosen.out is not None:
        content = {
            "points": {name: summary(pairs) for name, pairs in found.items() if pairs},
            "pairs": found,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": str(torch.__version__),
            "settings": {key: str(value) for key, value in vars(chosen).items()},
        }
        chosen.out.write_text(json.dumps(content, indent=1) + "\n")


def summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return ms of old and new, and the ratio's median and range over the pairs; errors if a side failed."""
    errors = sorted({f"{side}: {pair[side]['error']}" for pair in pairs for side in pair if "error" in pair[side]})
    if errors:
        return {"errors": errors}
    old, new = ([statistics.median(pair[side]["ms"]) for pair in pairs] for side in ("old", "new"))
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    return {
        "old ms": round(statistics.median(old), 4),
        "new ms": round(statistics.median(new), 4),
        "ratio": round(statistics.median(ratios), 4),
        "range": [round(min(ratios), 4), round(max(ratios), 4)],
        "pairs": len(ratios),
        "depth": [round(statistics.fmean(pair[side]["depth"] for pair in pairs), 2) for side in ("old", "new")],
    }


def _pair(chosen: argparse.Namespace, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each point, measured once in both trees: both processes prepare it together, then take turns."""
    asks = {side: _start(getattr(chosen, side), chosen) for side in ("old", "new")}
    for name in chosen.points:
        print(f"pair {number + 1}, {name}: preparing both trees", flush=True)
        found = _ask(asks, "setup", name)
        if not any("error" in row for row in found.values()):
            times: dict[str, list[float]] = {side: [] for side in asks}
            for block in range(1 if chosen.quick else BLOCKS):
                for side in ("old", "new") if (block + number) % 2 == 0 else ("new", "old"):
                    times[side] += _ask({side: asks[side]}, "block", name)[side]["ms"]
            found = {side: row | {"ms": times[side]} for side, row in _ask(asks, "end", name).items()}
        yield name, found
    for ask in asks.values():
        ask.send(None)


def _start(source: Path, chosen: argparse.Namespace) -> Connection:
    """Start a process that imports banach from `source` and measures when it is asked."""
    here, there = get_context("spawn").Pipe()
    arguments = (there, str(source.resolve()), chosen.contender, chosen.quick)
    get_context("spawn").Process(target=_serve, args=arguments, daemon=True).start()
    there.close()
    return here


def _ask(asks: dict[str, Connection], *question: str) -> dict[str, dict[str, Any]]:
    """Send a question to the processes, which work on it at the same time, and return their answers."""
    for ask in asks.values():
        ask.send(question)
    return {side: ask.recv() for side, ask in asks.items()}


def _serve(questions: Connection, source: str, contender: str, quick: bool) -> None:
    """Answer the questions of the parent until it sends None."""
    sys.path.insert(0, source)
    import banach

    assert banach.__file__ is not None
    assert Path(banach.__file__).is_relative_to(source), f"expected banach of {source}, got {banach.__file__}"
    bench: _Bench | None = None
    while (question := questions.recv()) is not None:
        what, name = question
        answer: dict[str, Any] = {}
        try:
            if what == "setup":
                bench = None  # frees the memory of the point before
                bench = _Bench(name, contender, quick)
            elif bench is not None:
                answer = {"ms": bench.block()} if what == "block" else bench.end()
        except Exception as error:  # one point must not end the others
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}", "ms": []}
        questions.send(answer)


class _Bench:
    """The training step of one tree at one point, after some steps of training."""

    def __init__(self, name: str, contender: str, quick: bool) -> None:
        from benchmarks.contenders import CONTENDERS, Setting
        from benchmarks.points import POINTS, feed

        self.point, self.steps = replace(POINTS[name], batch=4) if quick else POINTS[name], 2 if quick else BLOCK
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.precision = self.point.precision or "bf16"
        self.batches = feed(self.point, self.device, many=8)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a CPU: it cannot be captured
            self.step = CONTENDERS[contender].build(Setting(self.point, self.precision, self.device))
            self.block(1 if quick else WARM_UP)

    def block(self, steps: int | None = None) -> list[float]:
        """Return the milliseconds of each step of a block, after one step that is not timed."""
        from benchmarks.timer import switches, timed_steps

        with switches(self.precision, self.device):
            self.step(*next(self.batches))
            batches = islice(self.batches, steps or self.steps)
            return timed_steps(lambda batch: self.step(*batch), batches, self.device)[0]

    def end(self) -> dict[str, Any]:
        """Return the solver's steps in the last training step, and whether they met eps."""
        depth, excess = self.step.seen.read()
        return {"depth": depth, "met": excess <= 1}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_commits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("old", type=Path, help="the src folder of the old tree")
    parser.add_argument("new", type=Path, help="the src folder of the new tree")
    parser.add_argument("--points", nargs="+", default=list(FOUR), help="default: the four working points")
    parser.add_argument("--contender", help="of benchmarks/contenders.py, such as banach-general: no kernel for R")
    parser.add_argument("--compile", action="store_true", help="compile Q, R and S: banach-fast")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of processes (default 3)")
    parser.add_argument("--seconds", type=float, default=90.0, help="start no pair that would end after this")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--quick", action="store_true", help="batch 4 and a few steps: shows that it runs")
    chosen = parser.parse_args(arguments)
    chosen.contender = chosen.contender or ("banach-fast" if chosen.compile else "banach-captured")
    for folder in (chosen.old, chosen.new):
        if not (folder / "banach" / "__init__.py").exists():
            parser.error(f"expected a src folder that holds banach/, got {folder}")
    return chosen


if __name__ == "__main__":
    raise SystemExit(main())
