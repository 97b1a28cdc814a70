"""Captured training steps of two source trees, old and new, at the four working points, in one command.

    python -m benchmarks.compare_commits OLD/src NEW/src [--out compare.json] [--pairs 3] [--seconds 110]

Claim: a change of the code does not change the speed of `TrainStep`. Each pair is two processes, one per tree.
They take turns in blocks of steps, so that a slow moment of the machine hits both. The ratio new/old is taken per
pair, then its median and range over the pairs. Only public names are used: models, TrainStep.
Random images, so depths differ from those on real data; both trees see the same ones, and depths are reported.
`NAME-general` is the point NAME with an R that no kernel knows. The exit status is 1 if a ratio is above 1.03.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
FOUR = ("mnist100", "svhn100", "cifar100", "cifar512")
WARM_UP, BLOCKS, BLOCK, BATCHES = 40, 6, 25, 8
SLOWER = 1.03
LATER = 0.7  # a later pair finds compiled kernels in the caches: its time, of the pair before


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; write JSON if `--out` is given.

    Args:
        arguments: those of the command line; None takes sys.argv.
    Returns:
        1 if a point of the new tree is more than 3% slower or a step failed, else 0.
    """
    chosen = _parse(arguments)
    if chosen.child:
        return _serve(chosen)
    began, taken, pairs = time.perf_counter(), 0.0, list[dict[str, Any]]()
    for number in range(chosen.pairs):
        started = time.perf_counter()
        if pairs and started - began + LATER * taken > chosen.seconds:
            print(
                f"stopped after {number} pairs: the next would not end within {chosen.seconds:.0f} s", flush=True
            )
            break
        pairs.append(_pair(chosen, number))
        taken = time.perf_counter() - started
    found = {name: summary([pair[name] for pair in pairs if name in pair]) for name in chosen.points}
    for name, row in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)
    if chosen.out is not None:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps({"points": found, "pairs": pairs, **_origin(chosen)}, indent=1) + "\n")
    return int(any(row.get("ratio", float("inf")) > SLOWER for row in found.values()))


def summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return ms of old and new, and the ratio's median and range over the pairs; errors if a side failed."""
    errors = sorted({f"{side}: {pair[side]['error']}" for pair in pairs for side in pair if "error" in pair[side]})
    whole = [pair for pair in pairs if not any("error" in pair[side] for side in pair)]
    if errors or not whole:
        return {"errors": errors or ["no pair was measured"]}
    ms = {side: [statistics.median(pair[side]["ms"]) for pair in whole] for side in ("old", "new")}
    ratios = [new / old for old, new in zip(ms["old"], ms["new"], strict=True)]
    depth = {side: round(statistics.fmean(pair[side]["depth"] for pair in whole), 2) for side in ms}
    return {
        "old ms": round(statistics.median(ms["old"]), 4),
        "new ms": round(statistics.median(ms["new"]), 4),
        "ratio": round(statistics.median(ratios), 4),
        "range": [round(min(ratios), 4), round(max(ratios), 4)],
        "pairs": len(ratios),
        "depth": [depth["old"], depth["new"]],
    }


def _pair(chosen: argparse.Namespace, number: int) -> dict[str, Any]:
    """Measure both trees once: both processes start together, then take turns."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        children = {side: _Child(getattr(chosen, side), chosen, stack) for side in ("old", "new")}
        for name in chosen.points:
            found[name] = {side: child.ask("setup", name) for side, child in children.items()}
            if any("error" in row for row in found[name].values()):
                continue
            times: dict[str, list[float]] = {side: [] for side in children}
            for block in range(1 if chosen.quick else BLOCKS):
                for side in ("old", "new") if (block + number) % 2 == 0 else ("new", "old"):
                    times[side] += children[side].ask("block", name)["ms"]
            found[name] = {side: child.ask("end", name) | {"ms": times[side]} for side, child in children.items()}
            print(f"pair {number + 1}, {name}: {summary([found[name]])}", flush=True)
    return found


class _Child:
    """A process that imports banach from `source` and measures when it is asked."""

    def __init__(self, source: Path, chosen: argparse.Namespace, stack: ExitStack) -> None:
        options = [name for name in ("--quick", "--no-compile") if getattr(chosen, name[2:].replace("-", "_"))]
        command = [
            sys.executable,
            "-m",
            "benchmarks.compare_commits",
            str(source),
            str(source),
            "--child",
            *options,
        ]
        env = os.environ | {"PYTHONPATH": os.pathsep.join((str(source.resolve()), str(ROOT)))}
        self.process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.enter_context(self.process)
        stack.callback(self.process.kill)

    def ask(self, what: str, name: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([what, name]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process ended", "ms": []}
        return answer


def _serve(chosen: argparse.Namespace) -> int:
    """Answer the questions of the parent, one line of JSON each."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else prints must not reach the parent
    bench: _Bench | None = None
    for line in sys.stdin:
        what, name = json.loads(line)
        try:
            if what == "setup":
                bench = None  # frees the memory of the point before
                bench = _Bench(name, chosen)
                answer: dict[str, Any] = {}
            else:
                assert bench is not None
                answer = {"ms": bench.block()} if what == "block" else bench.end()
        except Exception as error:  # one point must not end the others
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}", "ms": []}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


class _Bench:
    """The training step of one tree at one point, after some steps of training."""

    def __init__(self, name: str, chosen: argparse.Namespace) -> None:
        from banach import models
        from banach.fast import TrainStep
        from benchmarks.points import POINTS

        self.point, self.quick = POINTS[name.removesuffix("-general")], chosen.quick
        if chosen.quick:
            self.point = replace(self.point, batch=4)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(0)
        net: Any = models.build(self.point.model, tolerance=self.point.tolerance).to(self.device).train()
        if name.endswith("-general"):
            hide_form(net.R)
        _choose_layout(net, self.point.precision)
        recipe, fused = self.point.recipe, self.device.type == "cuda"
        optimizer = torch.optim.Adam(
            net.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, fused=fused, capturable=fused
        )
        bf16 = self.point.precision == "bf16"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a CPU: it cannot be captured
            self.step = TrainStep(net, optimizer, F.cross_entropy, bf16=bf16, compile=not chosen.no_compile)
            self.batches = [self._batch(models.get(self.point.model)) for _ in range(BATCHES)]
            for k in range(1 if chosen.quick else WARM_UP):
                self.step(*self.batches[k % BATCHES])
        reason = getattr(self.step, "reason", None)
        if fused and reason is not None:
            raise RuntimeError(f"the step was not captured: {reason}")

    def _batch(self, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(self.point.batch, *model.image, device=self.device)
        return images, torch.randint(model.classes, (self.point.batch,), device=self.device)

    def block(self) -> list[float]:
        """Return the milliseconds of each step of a block, after two steps that are not timed."""
        for batch in self.batches[:2]:
            self.step(*batch)
        many = 2 if self.quick else BLOCK
        if self.device.type != "cuda":
            return [self._milliseconds(k) for k in range(many)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(many + 1)]
        torch.cuda.synchronize()
        marks[0].record()
        for k, mark in enumerate(marks[1:]):
            self.step(*self.batches[k % BATCHES])
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(marks)]

    def _milliseconds(self, k: int) -> float:
        start = time.perf_counter()
        self.step(*self.batches[k % BATCHES])
        return 1e3 * (time.perf_counter() - start)

    def end(self) -> dict[str, Any]:
        """Return the solver's steps in the last training step, and the share of samples that converged."""
        step: Any = self.step
        reached = step.solution if hasattr(step, "solution") else step.reached
        depth, met = float(reached.steps.float().mean()), float(reached.converged.float().mean())
        return {"depth": depth, "converged": met}


def hide_form(R: Any) -> None:
    """Give R another class whose `forward` no kernel knows; it computes the same."""
    known = type(R)

    class Own(known):  # type: ignore[misc, valid-type]
        def forward(self, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = known.forward(self, u, v)
            return out

    R.__class__ = Own


def _choose_layout(net: Any, precision: str) -> None:
    """Set the memory format as the tree itself advises; a tree without this function chooses on its own."""
    from banach import fast

    prefers = getattr(fast, "prefers_channels_last", None)
    if precision != "fp32" if prefers is None else prefers(net, precision):
        net.to(memory_format=torch.channels_last)


def _origin(chosen: argparse.Namespace) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    settings = {"warm_up": WARM_UP, "blocks": BLOCKS, "block": BLOCK, "compile": not chosen.no_compile}
    trees = {"old": str(chosen.old), "new": str(chosen.new)}
    return {"device": device, "versions": versions, "settings": settings, "trees": trees}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_commits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("old", type=Path, help="the src folder of the old tree")
    parser.add_argument("new", type=Path, help="the src folder of the new tree")
    parser.add_argument("--points", nargs="+", default=list(FOUR), help="default: the four working points")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of processes (default 3)")
    parser.add_argument("--seconds", type=float, default=110.0, help="start no pair that would end after this")
    parser.add_argument("--no-compile", action="store_true", help="captured, without torch.compile")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--quick", action="store_true", help="batch 4 and a few steps: shows that it runs")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    for folder in (chosen.old, chosen.new):
        if not (folder / "banach" / "__init__.py").exists():
            parser.error(f"expected a src folder that holds banach/, got {folder}")
    return chosen


if __name__ == "__main__":
    raise SystemExit(main())
