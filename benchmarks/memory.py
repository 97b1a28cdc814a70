"""Peak memory of one training step against the depth: flat for JFB, linear for unrolling.

Claims: at depth 1000 JFB takes at most 1.02 times its peak at depth 10; unrolling grows linearly. On a GPU, a JFB
step of the CIFAR-10 network at depth 50 takes at most 1.05 times that of the explicit twin. Settings: live tensor
storage on a CPU, torch.cuda.max_memory_allocated on a GPU; forward, backward and an SGD update, beyond weights
and data. Result: results/memory.json, results/gpu/depth-memory.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import JFB, Anderson, Implicit, ImplicitNetwork, Neumann, Tolerance, Unroll, models
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
        peak = _peak_of_step(net.to(settings.device), data, lambda output: output.square().mean())
        against = peak / first.setdefault(mode, peak)
        rows.append({"mode": mode, "depth": depth, "peak MB": peak, "against the first": against})
    note = "beyond weights and data; forward, backward and an SGD update"
    return Report(rows, _targets(rows, settings), notes(note))


def _networks(settings: Settings) -> Iterator[tuple[str, int, nn.Module]]:
    """Yield each mode at each of its depths, which it takes whether it converged or not."""
    build = partial(_network, settings.width)
    ways: dict[str, dict[str, Any]] = {
        "JFB": {"backward": JFB()},
        "JFB, Anderson(5)": {"solver": Anderson(5), "backward": JFB()},
        "Neumann(5)": {"backward": Neumann(5)},
        "Implicit": {"backward": Implicit()},
    }
    for name, way in ways.items():
        for depth in settings.depths:
            yield name, depth, build(tolerance=Tolerance(atol=0, max_steps=depth, check_every=0), **way)
    for depth in settings.depths if has_torchdeq() else ():
        yield "TorchDEQ one-step", depth, OneStep(build(), depth)
    for name, checkpoint in (("Unroll", False), ("Unroll, checkpointed", True)):
        for depth in settings.unrolled:
            yield (
                name,
                depth,
                build(tolerance=Tolerance(max_steps=0), backward=Unroll(depth, checkpoint=checkpoint)),
            )


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


def _peak_of_step(net: nn.Module, data: Tensor, loss: Any) -> float:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        loss(net(data)).backward()
        optimizer.step()

    step()  # the first one also makes what stays
    optimizer.zero_grad(set_to_none=True)  # so that the gradients count as the step's own
    return peak_bytes(step, data.device) / 2**20


@dataclass(frozen=True)
class Depth:
    model: str = "cifar10"
    batch: int = 512
    depth: int = 50
    device: str = "cuda"


def depth_memory(settings: Depth) -> Report:
    image, rows = models.get(settings.model).image, list[Row]()
    for depth in (0, settings.depth):
        torch.manual_seed(0)
        fixed = Tolerance(atol=0.0, max_steps=depth, check_every=0)
        net = models.build(settings.model, tolerance=fixed).to(settings.device).train()
        d = torch.randn(settings.batch, *image, device=settings.device)
        y = torch.randint(10, (settings.batch,), device=settings.device)
        rows.append({"depth": depth, "peak MB": _peak_of_step(net, d, partial(F.cross_entropy, target=y))})
    ratio = rows[1]["peak MB"] / rows[0]["peak MB"]
    return Report(rows, [Target(f"peak memory, depth {settings.depth} / explicit twin", ratio, 1.05)])


QUESTION = "does the peak memory of a step grow with the depth?"
QUICK = Settings(depths=(10, 60), unrolled=(5, 10, 20), batch=8, width=16)
SHALLOW = Depth("digits", 4, 10, device="cpu")
BENCHMARKS = (
    Benchmark("memory", QUESTION, run, Settings(), QUICK),
    Benchmark("depth-memory", "what memory does depth cost?", depth_memory, Depth(), SHALLOW, "gpu"),
)
