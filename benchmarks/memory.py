"""Peak memory of one training step against the depth: flat for JFB, linear for unrolling.

Claims: at depth 1000 JFB takes at most 1.02 times its peak at depth 10; unrolling grows linearly. On a GPU, a JFB
step of the CIFAR-10 network at depth 50 takes at most 1.05 times that of the explicit twin. Settings: live tensor
storage on a CPU, torch.cuda.max_memory_allocated on a GPU; forward, backward and an SGD update, beyond weights
and data. Result: results/memory.json, results/gpu/memory-cuda.json, results/gpu/depth-memory.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import (
    JFB,
    Anderson,
    Implicit,
    ImplicitNetwork,
    Mode,
    Neumann,
    Picard,
    Solver,
    Tolerance,
    Unroll,
    models,
)
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
    solved: dict[str, tuple[Solver, Mode]] = {
        "JFB": (Picard(), JFB()),
        "JFB, Anderson(5)": (Anderson(5), JFB()),
        "Neumann(5)": (Picard(), Neumann(5)),
        "Implicit": (Picard(), Implicit()),
    }
    rows: list[Row] = []
    for name, (solver, mode) in solved.items():
        for depth in settings.depths:  # check_every=0: exactly that many steps, converged or not
            fixed = Tolerance(atol=0, max_steps=depth, check_every=0)
            rows.append(_row(name, depth, _network(settings, solver, fixed, mode), settings))
    for depth in settings.depths if has_torchdeq() else ():
        net = OneStep(_network(settings, Picard(), Tolerance(), JFB()), depth)
        rows.append(_row("TorchDEQ one-step", depth, net, settings))
    for name, checkpoint in (("Unroll", False), ("Unroll, checkpointed", True)):
        for depth in settings.unrolled:
            mode = Unroll(depth, checkpoint=checkpoint)
            rows.append(_row(name, depth, _network(settings, Picard(), Tolerance(max_steps=0), mode), settings))
    peak = {(row["mode"], row["depth"]): row["peak MB"] for row in rows}
    first: dict[str, float] = {}
    for row in rows:
        row["against the first"] = row["peak MB"] / first.setdefault(row["mode"], row["peak MB"])
    note = "beyond weights and data; forward, backward and an SGD update"
    return Report(rows, _targets(peak, settings), notes(note))


def _targets(peak: dict[tuple[str, int], float], settings: Settings) -> list[Target]:
    first, last = settings.depths[0], settings.depths[-1]
    a, b, c = settings.unrolled
    early = (peak["Unroll", b] - peak["Unroll", a]) / (b - a)
    late = (peak["Unroll", c] - peak["Unroll", b]) / (c - b)
    linear = f"Unroll is linear: growth per step from {b} to {c} against {a} to {b}"
    return [
        Target(f"JFB, depth {last} against depth {first}", peak["JFB", last] / peak["JFB", first], 1.02),
        Target(linear, late / early, 0.98, at_least=True),
    ]


def _network(settings: Settings, solver: Solver, tolerance: Tolerance, mode: Mode) -> ImplicitNetwork:
    torch.manual_seed(0)
    Q, S = nn.Linear(settings.width, settings.width), nn.Linear(settings.width, 1)
    R = TwoLayers(settings.width)
    return ImplicitNetwork(Q, R, S, solver=solver, tolerance=tolerance, backward=mode)


def _row(mode: str, depth: int, net: nn.Module, settings: Settings) -> Row:
    net.to(settings.device)
    data = torch.randn(settings.batch, settings.width, device=settings.device)
    peak = _peak_of_step(net, data, lambda output: output.square().mean(), settings.device)
    return {"mode": mode, "depth": depth, "peak MB": peak}


def _peak_of_step(net: nn.Module, data: Tensor, loss: Callable[[Tensor], Tensor], device: str) -> float:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        loss(net(data)).backward()
        optimizer.step()

    step()  # the first one also makes what stays
    optimizer.zero_grad(set_to_none=True)  # so that the gradients count as the step's own
    return peak_bytes(step, torch.device(device)) / 2**20


@dataclass(frozen=True)
class Depth:
    model: str = "cifar10"
    batch: int = 512
    depth: int = 50
    device: str = "cuda"


def depth_memory(settings: Depth) -> Report:
    rows = [_at_depth(settings, depth) for depth in (0, settings.depth)]
    ratio = rows[1]["peak MB"] / rows[0]["peak MB"]
    return Report(rows, [Target(f"peak memory, depth {settings.depth} / explicit twin", ratio, 1.05)])


def _at_depth(settings: Depth, depth: int) -> Row:
    torch.manual_seed(0)
    model = models.get(settings.model)
    fixed = Tolerance(atol=0.0, max_steps=depth, check_every=0)
    net = models.build(settings.model, tolerance=fixed).to(settings.device).train()
    d = torch.randn(settings.batch, *model.image, device=settings.device)
    y = torch.randint(model.classes, (settings.batch,), device=settings.device)
    return {"depth": depth, "peak MB": _peak_of_step(net, d, lambda out: F.cross_entropy(out, y), settings.device)}


QUESTION = "does the peak memory of a step grow with the depth?"
QUICK = Settings(depths=(10, 60), unrolled=(5, 10, 20), batch=8, width=16)
SHALLOW = Depth("digits", 4, 10, device="cpu")
BENCHMARKS = (
    Benchmark("memory", QUESTION, run, Settings(), QUICK),
    Benchmark("memory-cuda", QUESTION, run, Settings(device="cuda"), QUICK, "gpu"),
    Benchmark("depth-memory", "what memory does depth cost?", depth_memory, Depth(), SHALLOW, "gpu"),
)
