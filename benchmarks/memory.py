"""Peak memory of one training step against the depth: flat for JFB, linear for unrolling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from banach import JFB, Anderson, Implicit, ImplicitNetwork, Mode, Neumann, Picard, Solver, Tolerance, Unroll
from benchmarks import rival
from benchmarks.counting import LiveBytes
from benchmarks.report import Result, Row, Target


@dataclass(frozen=True)
class Settings:
    depths: tuple[int, ...] = (10, 100, 1000)
    unrolled: tuple[int, int, int] = (10, 100, 300)
    batch: int = 64
    width: int = 128
    device: str = "cpu"


QUICK = Settings(depths=(10, 1000), unrolled=(10, 50, 100), batch=16, width=64)


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


def run(settings: Settings = Settings()) -> Result:
    solved: dict[str, tuple[Solver, Mode]] = {
        "JFB": (Picard(), JFB()),
        "JFB, Anderson(5)": (Anderson(5), JFB()),
        "Neumann(5)": (Picard(), Neumann(5)),
        "Implicit": (Picard(), Implicit()),
    }
    rows = [_solved(name, depth, *how, settings) for name, how in solved.items() for depth in settings.depths]
    if rival.available():
        rows += [_torchdeq(depth, settings) for depth in settings.depths]
    for checkpoint in (False, True):
        rows += [_unrolled(depth, checkpoint, settings) for depth in settings.unrolled]
    return Result(
        "memory",
        "does the peak memory of a step grow with the depth?",
        _with_ratios(rows),
        _targets(rows, settings),
        _notes(settings),
        settings,
        settings.device,
    )


def _targets(rows: list[Row], settings: Settings) -> list[Target]:
    peak = {(row["mode"], row["depth"]): row["peak MB"] for row in rows}
    first, last = settings.depths[0], settings.depths[-1]
    a, b, c = settings.unrolled
    early, late = (
        (peak["Unroll", b] - peak["Unroll", a]) / (b - a),
        (peak["Unroll", c] - peak["Unroll", b]) / (c - b),
    )
    linear = f"Unroll is linear: growth per step from {b} to {c} against {a} to {b}"
    return [
        Target(f"JFB, depth {last} against depth {first}", peak["JFB", last] / peak["JFB", first], 1.02),
        Target(linear, late / early, 0.98, at_least=True),
    ]


def _notes(settings: Settings) -> list[str]:
    how = "torch.cuda.max_memory_allocated" if settings.device.startswith("cuda") else "live tensor storage"
    notes = [f"beyond weights and data, by {how}; forward, backward and an SGD update"]
    return notes if rival.available() else [rival.ABSENT, *notes]


def _with_ratios(rows: list[Row]) -> list[Row]:
    base: dict[str, float] = {}
    for row in rows:
        base.setdefault(row["mode"], row["peak MB"])
    return [{**row, "against the first": row["peak MB"] / base[row["mode"]]} for row in rows]


def _solved(name: str, depth: int, solver: Solver, mode: Mode, settings: Settings) -> Row:
    # check_every=0: exactly so many steps, also where the iteration has long arrived.
    tolerance = Tolerance(atol=0, max_steps=depth, check_every=0)
    return _train(name, depth, lambda net: _set(net, solver, tolerance, mode), settings)


def _unrolled(depth: int, checkpoint: bool, settings: Settings) -> Row:
    name = "Unroll, checkpointed" if checkpoint else "Unroll"
    mode, none = Unroll(depth, checkpoint=checkpoint), Tolerance(max_steps=0)
    return _train(name, depth, lambda net: _set(net, Picard(), none, mode), settings)


def _set(net: ImplicitNetwork, solver: Solver, tolerance: Tolerance, mode: Mode) -> nn.Module:
    net.solver, net.tolerance, net.backward = solver, tolerance, mode
    return net


def _torchdeq(depth: int, settings: Settings) -> Row:
    class Layer(nn.Module):
        def __init__(self, net: ImplicitNetwork) -> None:
            super().__init__()
            self.net = net

        def forward(self, d: Tensor) -> Tensor:
            v = self.net.Q(d)
            z0 = torch.zeros_like(v)
            deq = rival.layer(z0, "picard", rms=0.0, max_steps=depth)
            return self.net.S(deq(lambda u: self.net.R(u, v), z0))

    return _train("TorchDEQ one-step", depth, Layer, settings)


def _train(mode: str, depth: int, build: Callable[[ImplicitNetwork], nn.Module], settings: Settings) -> Row:
    torch.manual_seed(0)
    width, device = settings.width, settings.device
    net = build(ImplicitNetwork(nn.Linear(width, width), TwoLayers(width), nn.Linear(width, 1))).to(device)
    data = torch.randn(settings.batch, width, device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        net(data).square().mean().backward()
        optimizer.step()

    step()  # the first one also makes what stays
    optimizer.zero_grad(set_to_none=True)  # so that the gradients count as the step's own
    return {"mode": mode, "depth": depth, "peak MB": _peak(step, device) / 2**20}


def _peak(step: Callable[[], None], device: str) -> int:
    """The most bytes that `step` held at one time, beyond what was there before it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(device) - before
    with LiveBytes() as live:
        step()
    return live.peak
