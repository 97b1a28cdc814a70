"""Peak memory of one training step against the depth: flat for JFB, linear for unrolling.

Claims: at depth 1000 JFB takes at most 1.02 times its peak at depth 10; unrolling grows linearly. Settings: live
tensor storage on a CPU, torch.cuda.max_memory_allocated on a GPU (--device cuda); forward, backward and an SGD
update, beyond weights and data. Result: results/memory.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from banach import Anderson, Implicit, ImplicitNetwork, Neumann, Tolerance, Unroll
from benchmarks.libraries import has_torchdeq, notes, torchdeq_layer
from benchmarks.results import Benchmark, Report, Row, Target
from benchmarks.timer import peak_bytes


@dataclass(frozen=True)
class Settings:
    depths: tuple[int, ...] = (10, 100, 1000)
    unrolled: tuple[int, int, int] = (10, 100, 300)
    batch: int = 64
    width: int = 128
    device: str = "cpu"


class TwoLayers(nn.Module):
    """R(u, v) = tanh(B relu(A u) + v), four times as wide inside, so that R holds more than a latent."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.A, self.B = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        with torch.no_grad():
            for layer in (self.A, self.B):
                layer.weight.mul_(0.9 / torch.linalg.matrix_norm(layer.weight, 2))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(self.B(torch.relu(self.A(u))) + v)


class OneStep(nn.Module):
    """The same network through TorchDEQ's one-step gradient."""

    def __init__(self, net: ImplicitNetwork, depth: int) -> None:
        super().__init__()
        self.net, self.deq = net, torchdeq_layer(solver="picard", max_steps=depth, tol=0.0)

    def forward(self, d: Tensor) -> Tensor:
        v = self.net.Q(d)
        u = self.deq(lambda u: self.net.R(u, v), torch.zeros_like(v))[0][-1]
        out: Tensor = self.net.S(u)
        return out


def run(settings: Settings) -> Report:
    torch.manual_seed(0)
    data = torch.randn(settings.batch, settings.width, device=settings.device)
    rows: list[Row] = []
    first: dict[str, float] = {}
    for mode, depth, net in _networks(settings):
        peak = _peak_of_step(net.to(settings.device), data)
        against = peak / first.setdefault(mode, peak)
        rows.append({"mode": mode, "depth": depth, "peak MB": peak, "against the first": against})
    rows.sort(key=lambda row: list(first).index(row["mode"]))  # each mode with its depths
    note = "beyond weights and data; forward, backward and an SGD update"
    return Report(rows, _targets(rows, settings), notes(note))


def _networks(settings: Settings) -> Iterator[tuple[str, int, nn.Module]]:
    """Yield each mode at each of its depths, which it takes whether it converged or not."""
    build, no_steps = partial(_network, settings.width), Tolerance(max_steps=0)
    for depth in settings.depths:
        steps = Tolerance(atol=0, max_steps=depth, check_every=0)
        yield "JFB", depth, build(tolerance=steps)
        yield "JFB, Anderson(5)", depth, build(tolerance=steps, solver=Anderson(5))
        yield "Neumann(5)", depth, build(tolerance=steps, backward=Neumann(5))
        yield "Implicit", depth, build(tolerance=steps, backward=Implicit())
        if has_torchdeq():
            yield "TorchDEQ one-step", depth, OneStep(build(), depth)
    for depth in settings.unrolled:
        yield "Unroll", depth, build(tolerance=no_steps, backward=Unroll(depth))
        yield "Unroll, checkpointed", depth, build(tolerance=no_steps, backward=Unroll(depth, checkpoint=True))


def _network(width: int, **options: Any) -> ImplicitNetwork:
    torch.manual_seed(0)
    Q, S = nn.Linear(width, width), nn.Linear(width, 1)
    return ImplicitNetwork(Q, TwoLayers(width), S, **options)


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


def _peak_of_step(net: nn.Module, data: Tensor) -> float:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        net(data).square().mean().backward()
        optimizer.step()

    step()  # the first one also makes what stays
    optimizer.zero_grad(set_to_none=True)  # so that the gradients count as the step's own
    return peak_bytes(step, data.device) / 2**20


QUESTION = "does the peak memory of a step grow with the depth?"
QUICK = Settings(depths=(10, 60), unrolled=(5, 10, 20), batch=8, width=16)
BENCHMARKS = (Benchmark("memory", QUESTION, run, Settings(), QUICK),)
