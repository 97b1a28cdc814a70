"""A simulated GPU, on which graphs and kernels run eagerly in plain torch; and a small network with its images."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import banach.train.evaluate  # noqa: F401
from banach import Tolerance, models
from banach.fast.capture import WARM_UPS, CapturedCalls
from banach.latent import map_leaves
from banach.solve.context import loops_by
from banach.solve.device import loop_at_least_once, loop_eagerly
from kernels.cases import plain_picard_step, solve_by_modules

PLAN: Any = sys.modules["banach.fast.plan"]


class EagerGraphs:
    """In place of `Graphs`: a captured program is the program, whose loops sync with the host."""

    def __init__(self, device: torch.device) -> None:
        pass

    def warm_up(self, program: Callable[[], Any]) -> None:
        for _ in range(WARM_UPS):
            self._run(program, loop_at_least_once)

    def capture(self, program: Callable[[], Any]) -> Any:
        return SimpleNamespace(replay=lambda: self._run(program, loop_eagerly))

    def _run(self, program: Callable[[], Any], loop: Any) -> Any:
        with loops_by(loop):
            return program()


class EagerCalls(CapturedCalls):
    """In place of `CapturedCalls`: a replay runs the function of the first call and overwrites its result."""

    def _capture(self, function: Callable[..., Any], buffers: tuple[Any, ...]) -> Any:
        result = function(*buffers)
        return buffers, SimpleNamespace(replay=lambda: map_leaves(Tensor.copy_, result, function(*buffers)))


def digits(tolerance: Tolerance, **options: Any) -> Any:
    """The network for digits in training mode, without dropout."""
    torch.manual_seed(0)
    net: Any = models.build("digits", tolerance=tolerance, **options).train()
    net.S.drop.p = 0.0
    return net


def images(count: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=dtype)


def simulate_gpu(monkeypatch: pytest.MonkeyPatch, *, kernels: bool) -> None:
    """Make `plan` take the CPU for a GPU, with or without kernels."""
    for name in ("banach.fast.plan", "banach.train.evaluate"):
        monkeypatch.setattr(sys.modules[name], "runs_graphs", lambda device: True)
    monkeypatch.setattr(PLAN, "while_nodes_lack", lambda: "")
    monkeypatch.setattr("banach.fast.step.Graphs", EagerGraphs)
    monkeypatch.setattr("banach.fast.inference.CapturedCalls", EagerCalls)
    monkeypatch.setattr(PLAN, "_no_kernel", lambda net, device: "" if kernels else "simulated")
    monkeypatch.setattr("banach.kernels.latent_solve", solve_by_modules)
    monkeypatch.setattr("banach.kernels.picard_step", plain_picard_step)
