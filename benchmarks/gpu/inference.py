"""Prediction: the implicit network against its explicit twin, both by banach.compile, and as they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import banach
from banach import ImplicitNetwork, models
from banach.provenance import Summary
from benchmarks.gpu.clock import seconds_of
from benchmarks.gpu.precision import autocast, switches
from benchmarks.gpu.trained import network
from benchmarks.report import Result, Row, Target


@dataclass(frozen=True)
class Settings:
    """Latency of one image and throughput of many, in bf16."""

    model: str = "cifar10"
    batches: tuple[int, ...] = (1, 32, 1024)
    repeats: int = 30
    precision: str = "bf16"
    train_steps: int = 400
    data_dir: str | None = None
    device: str = "cuda"
    compile: bool = True


def run(settings: Settings = Settings()) -> Result:
    device = torch.device(settings.device)
    net, images = network(settings.model, settings.train_steps, settings.data_dir, settings.device)
    rows: list[Row] = []
    with switches(settings.precision, device):
        for batch in settings.batches:
            rows += _rows(net, images[:batch], settings)
    targets = _targets(rows, settings)
    notes = [
        f"ms per call, median of {settings.repeats}; eval mode, after {settings.train_steps} training steps",
        "fast: banach.compile(net, compile=True); as it comes: net(d) under autocast, a host check at every step",
    ]
    return Result("inference", "what does prediction cost?", rows, targets, notes, settings, str(device))


@torch.no_grad()
def _rows(net: ImplicitNetwork, d: Tensor, settings: Settings) -> list[Row]:
    twin = _twin(net, settings.model)
    bf16 = settings.precision == "bf16"
    fast, fast_twin = (banach.compile(part, bf16=bf16, compile=settings.compile) for part in (net, twin))
    calls: dict[str, Callable[[], Any]] = {
        "implicit, fast": lambda: fast(d),
        "explicit, fast": lambda: fast_twin(d),
        "implicit, as it comes": lambda: _eager(net, d, settings.precision),
        "explicit, as it comes": lambda: _eager(twin, d, settings.precision),
    }
    found = fast(d, solution=True)[1]
    agree = (fast(d).argmax(1) == _eager(net, d, "fp32").argmax(1)).double().mean()
    made = [
        {"batch": len(d), "path": name, "ms": _time(call, settings.repeats, d.device)}
        for name, call in calls.items()
    ]
    made[0] |= {
        "depth": float(found.steps.double().mean()),
        "converged": float(found.converged.double().mean()),
        "agrees with fp32": float(agree),
    }
    return made


def _targets(rows: list[Row], settings: Settings) -> list[Target]:
    ms = {(row["batch"], row["path"]): row["ms"].median for row in rows}
    ratio = {batch: ms[batch, "implicit, fast"] / ms[batch, "explicit, fast"] for batch in settings.batches}
    wanted = {1: 2.5, 1024: 1.3}
    return [
        Target(f"implicit / explicit on the fast path, batch {batch}", ratio[batch], most)
        for batch, most in wanted.items()
        if batch in ratio
    ]


def _twin(net: ImplicitNetwork, model: str) -> ImplicitNetwork:
    twin = models.build(model)
    assert isinstance(twin, ImplicitNetwork)
    twin.load_state_dict(net.state_dict())
    twin.tolerance = replace(net.tolerance, max_steps=0)
    return twin.to(next(net.parameters()).device).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]


def _eager(net: ImplicitNetwork, d: Tensor, precision: str) -> Tensor:
    with autocast(precision, d.device):
        output: Tensor = net(d)
        return output


def _time(call: Callable[[], Any], repeats: int, device: torch.device) -> Summary:
    """Milliseconds of each call, waited for: a user waits for a prediction."""
    return Summary.of(1e3 * seconds_of(call, device, 1) for _ in range(repeats))
