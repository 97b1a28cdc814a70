"""Host code of the kernels without Triton: how many launches a call makes, of how many programs."""

from __future__ import annotations

import importlib.metadata
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import banach.kernels
from banach.fast.weights import with_kernels
from banach.kernels import has_triton, host, latent_solve, residual_stack, stack, window
from kernels.cases import network, stack_of, tolerance


class Recorder:
    """In place of a module of device code: kernels that only count their launches and programs."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.grids: dict[str, tuple[int, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return type("Kernel", (), {"__getitem__": lambda kernel, grid: self._launch(name, grid)})()

    def _launch(self, name: str, grid: tuple[int, ...]) -> Any:
        self.launches[name] += 1
        self.grids[name] = grid
        return lambda *arguments, **settings: None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for name in ("latent_kernel", "stack_kernel", "window_kernel"):
        monkeypatch.setitem(sys.modules, f"banach.kernels.{name}", recorder)
        monkeypatch.setattr(banach.kernels, name, recorder, raising=False)
    monkeypatch.setattr(host, "constants", lambda record: record)
    monkeypatch.setattr(stack, "has_kernel", lambda x: True)
    monkeypatch.setattr(window, "has_kernel", lambda x, weight: True)
    return recorder


@pytest.mark.parametrize(
    ("version", "new"), [("3.6.0", True), ("3.4.0+git1", True), ("3.3.1", False), (None, False)]
)
def test_triton_must_be_new_enough(monkeypatch: pytest.MonkeyPatch, version: str | None, new: bool) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert has_triton.__wrapped__() is new


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_solve_is_two_launches(device: Recorder, dtype: torch.dtype, train: bool) -> None:
    R, v = network("cifar10", train=train)
    found = latent_solve(R, v.to(dtype), tolerance=tolerance())
    assert device.launches == {"pack": 1, "iterate": 1}
    assert device.grids["iterate"] == (2,)  # a CPU counts as two multiprocessors
    assert found.value.shape == v.shape
    assert found.value.is_contiguous(memory_format=torch.channels_last)
    assert found.steps.shape == found.diverged.shape == (len(v),)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_launches_of_a_stack(device: Recorder, train: bool) -> None:
    """Per block: two convolutions each way, weight gradients in two parts, batch norm folded into the weights."""
    blocks = stack_of(3, dropout=0.2, train=train)
    x = torch.randn(2, 35, 6, 5, requires_grad=True)
    residual_stack(blocks, x).sum().backward()
    assert device.launches["convolve"] == 12
    assert device.launches["correlate"] == device.launches["unfold"] == 6
    assert device.launches["fold"] == (5 if train else 2)  # of these one for the gradients of the inputs
    assert device.launches["unnormalise"] == 3
    assert device.launches["average"] == (3 if train else 0)
    assert device.launches["enter"] == device.launches["leave"] == 2
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_a_stack_without_a_gradient_launches_its_forward_pass(device: Recorder) -> None:
    with torch.no_grad():
        residual_stack(stack_of(3), torch.randn(2, 35, 20, 20))
    assert device.launches == {"enter": 1, "convolve": 6, "fold": 4, "leave": 1}


def test_a_stack_refuses_second_derivatives(device: Recorder) -> None:
    x = torch.randn(2, 35, 3, 3).requires_grad_()
    out = residual_stack(stack_of(1), x)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("stride", [1, 2])
def test_launches_of_a_compiled_convolution(device: Recorder, stride: int) -> None:
    """A compiler takes it as one call, forward and back."""
    layer = with_kernels(nn.Conv2d(16, 32, 3, stride, 1), windows=True)
    x = torch.randn(3, 16, 9, 8, requires_grad=True)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    y.sum().backward()
    assert y.shape == (3, 32, -(-9 // stride), -(-8 // stride))
    forward, back = ({"look": 2}, {}) if stride == 1 else ({"look": 1}, {"look_back": 1})
    assert device.launches == {**forward, **back, "correlate": 1, "add": 1}
    torch.library.opcheck(
        torch.ops.banach.conv2d.default, (x, layer.weight, layer.bias, stride, 1), test_utils="test_faketensor"
    )
