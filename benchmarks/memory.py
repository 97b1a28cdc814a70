"""Peak memory of one training step against the depth: flat for JFB, linear for unrolling.

Claims: at depth 1000 JFB takes at most 1.02 times its peak at depth 10; unrolling grows linearly. Settings: live
tensor storage on a CPU, torch.cuda.max_memory_allocated on a GPU (--device cuda); forward and backward pass,
beyond weights and data. Result: results/memory.json.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from banach import Anderson, Implicit, Neumann, Tolerance, Unroll, fixed_point
from benchmarks import maps
from benchmarks.libraries import has_torchdeq, notes, torchdeq_layer
from benchmarks.results import Benchmark, Report, Row, Target
from benchmarks.timer import peak_bytes

Find = Callable[[], Any]


@dataclass(frozen=True)
class Settings:
    depths: tuple[int, ...] = (10, 100, 1000)
    unrolled: tuple[int, int, int] = (10, 100, 300)
    batch: int = 64
    width: int = 128
    device: str = "cpu"


def run(settings: Settings) -> Report:
    problem = maps.two_layers(settings.batch, settings.width, device=settings.device)
    rows: list[Row] = []
    first: dict[str, float] = {}
    for mode, depth, find in _ways(problem, settings):
        step = partial(_step, problem, find)
        step()  # the first one also makes what stays
        peak = peak_bytes(step, problem.z0.device) / 2**20
        against = peak / first.setdefault(mode, peak)
        rows.append({"mode": mode, "depth": depth, "peak MB": peak, "against the first": against})
    rows.sort(key=lambda row: list(first).index(row["mode"]))  # each mode with its depths
    note = "beyond weights and data; forward and backward pass"
    return Report(rows, _targets(rows, settings), notes(note))


def _ways(problem: maps.Problem, settings: Settings) -> Iterator[tuple[str, int, Find]]:
    """Yield each mode at each of its depths, which it takes whether it converged or not."""
    find = partial(fixed_point, problem.T, problem.z0, inputs=problem.inputs)
    for depth in settings.depths:
        steps = Tolerance(atol=0, max_steps=depth, check_every=0)
        yield "JFB", depth, partial(find, tolerance=steps)
        yield "JFB, Anderson(5)", depth, partial(find, tolerance=steps, solver=Anderson(5))
        yield "Neumann(5)", depth, partial(find, tolerance=steps, backward=Neumann(5))
        yield "Implicit", depth, partial(find, tolerance=steps, backward=Implicit())
        if has_torchdeq():
            deq = torchdeq_layer(solver="picard", max_steps=depth, tol=0.0)
            yield "TorchDEQ one-step", depth, partial(deq, problem.T, problem.z0, *problem.inputs)
    for depth in settings.unrolled:
        unrolled = partial(find, tolerance=Tolerance(max_steps=0))
        yield "Unroll", depth, partial(unrolled, backward=Unroll(depth))
        yield "Unroll, checkpointed", depth, partial(unrolled, backward=Unroll(depth, checkpoint=True))


def _targets(rows: list[Row], settings: Settings) -> list[Target]:
    peak = {(row["mode"], row["depth"]): row["peak MB"] for row in rows}
    first, last = settings.depths[0], settings.depths[-1]
    a, b, c = settings.unrolled
    early = (peak["Unroll", b] - peak["Unroll", a]) / (b - a)
    late = (peak["Unroll", c] - peak["Unroll", b]) / (c - b)
    linear = f"Unroll is linear: growth per step from {b} to {c} against {a} to {b}"
    return [
        Target(f"JFB, depth {last} against depth {first}", peak["JFB", last] / peak["JFB", first], 1.02),
        Target(linear, late / early, 0.98, at_least=True),
    ]


def _step(problem: maps.Problem, find: Find) -> None:
    torch.autograd.grad(find().square().mean(), problem.weights)


QUESTION = "does the peak memory of a step grow with the depth?"
QUICK = Settings(depths=(10, 60), unrolled=(5, 10, 20), batch=8, width=16)
BENCHMARKS = (Benchmark("memory", QUESTION, run, Settings(), QUICK),)
