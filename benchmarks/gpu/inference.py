"""Prediction: the implicit network against its explicit twin, both by banach.compile, and as they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import banach
from banach import ImplicitNetwork, models
from banach.fast import LinearStart
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
    net, images, known = network(settings.model, settings.train_steps, settings.data_dir, settings.device)
    guess = LinearStart.fit(net, known.split(256))  # in fp32, from training images
    rows: list[Row] = []
    with switches(settings.precision, device):
        for batch in settings.batches:
            rows += _rows(net, guess, images[:batch], settings)
    targets = _targets(rows, settings)
    notes = [
        f"ms per call, median of {settings.repeats}; eval mode, after {settings.train_steps} training steps",
        "fast: banach.compile(net, compile=True); as it comes: net(d) under autocast, a host check at every step",
        f"fitted start: LinearStart, a 3x3 convolution fitted to the fixed points of {len(known)} training images",
    ]
    return Result("inference", "what does prediction cost?", rows, targets, notes, settings, str(device))


@torch.no_grad()
def _rows(net: ImplicitNetwork, guess: LinearStart, d: Tensor, settings: Settings) -> list[Row]:
    twin = _twin(net, settings.model)
    fitted = ImplicitNetwork(net.Q, net.R, net.S, tolerance=net.tolerance, start=guess).eval()
    bf16 = settings.precision == "bf16"
    implicit, near, explicit = (
        banach.compile(part, bf16=bf16, compile=settings.compile) for part in (net, fitted, twin)
    )
    calls: dict[str, Callable[[], Any]] = {
        "implicit, fast": lambda: implicit(d),
        "implicit, fast, fitted start": lambda: near(d),
        "explicit, fast": lambda: explicit(d),
        "implicit, as it comes": lambda: _eager(net, d, settings.precision),
        "explicit, as it comes": lambda: _eager(twin, d, settings.precision),
    }
    made: list[Row] = [
        {"batch": len(d), "path": name, "ms": _time(call, settings.repeats, d.device)}
        for name, call in calls.items()
    ]
    for row, fast in zip(made, (implicit, near), strict=False):
        found = fast(d, solution=True)[1]
        row |= {
            "depth": float(found.steps.double().mean()),
            "converged": float(found.converged.double().mean()),
            "agrees with fp32": float((fast(d).argmax(1) == _eager(net, d, "fp32").argmax(1)).double().mean()),
        }
    return made


def _targets(rows: list[Row], settings: Settings) -> list[Target]:
    ms = {(row["batch"], row["path"]): row["ms"].median for row in rows}
    wanted = {1: 2.5, 1024: 1.3}
    return [
        Target(f"{path} / explicit, fast, batch {batch}", ms[batch, path] / ms[batch, "explicit, fast"], most)
        for batch, most in wanted.items()
        for path in ("implicit, fast", "implicit, fast, fitted start")
        if batch in settings.batches
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
