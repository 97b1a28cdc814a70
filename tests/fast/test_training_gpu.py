"""On a GPU: the loss and every gradient of a captured step against those of the network called as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import Tolerance, WorstPixel, models
from banach.fast import TrainStep
from train.parts_train import plain_network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    # Torch's own, when it compiles.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # of Dynamo, at v
]
SHAPES = {"mnist": (1, 28, 28), "svhn": (3, 32, 32), "cifar10": (3, 32, 32), "own": (1, 8, 8)}


@pytest.fixture(autouse=True)
def true_fp32() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def network(name: str, eps: float) -> Any:
    """Without dropout, whose masks would differ; `own`: an R that no kernel knows."""
    torch.manual_seed(0)
    if name == "own":
        return plain_network(Tolerance(atol=eps, max_steps=100)).cuda().train()
    net: Any = models.build(name, tolerance=Tolerance(atol=eps, max_steps=100, norm=WorstPixel()))
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return net.cuda().to(memory_format=torch.channels_last).train()


def gradients(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in net.parameters() if p.grad is not None])


def plainly(net: Any, d: Tensor, y: Tensor, *, bf16: bool) -> tuple[float, Tensor]:
    net = copy.deepcopy(net)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        output = net(d)
    loss = F.cross_entropy(output.to(torch.promote_types(output.dtype, torch.float32)), y)
    loss.backward()
    return float(loss.detach()), gradients(net)


def captured(net: Any, d: Tensor, y: Tensor, *, bf16: bool, compile: bool) -> tuple[float, Tensor]:
    net = copy.deepcopy(net)
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.0), F.cross_entropy, bf16=bf16, compile=compile)
    for _ in range(3):  # the last one is a replay
        loss = float(step(d, y))
    assert step.reached is not None
    assert bool(step.reached.converged.all())
    return loss, gradients(net)


@pytest.mark.parametrize("compile", [False, True], ids=["as it is", "compiled"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_a_captured_step_has_the_gradients_of_a_plain_one(name: str, bf16: bool, compile: bool) -> None:
    """In fp32 they are equal to rounding; in bf16 they err from fp32 by no more than plain bf16 does."""
    net = network(name, 1e-1 if bf16 else 1e-4)
    draw = torch.Generator("cuda").manual_seed(1)
    d = torch.randn(32, *SHAPES[name], generator=draw, device="cuda", dtype=next(net.parameters()).dtype)
    y = torch.randint(10, (32,), generator=draw, device="cuda")
    exact_loss, exact = plainly(net, d, y, bf16=False)
    loss, found = captured(net, d, y, bf16=bf16, compile=compile)
    error = float((found - exact).norm() / exact.norm())
    if not bf16:
        assert loss == pytest.approx(exact_loss, rel=1e-5)
        assert error < 2e-3
        return
    plain_loss, plain = plainly(net, d, y, bf16=True)
    usual = float((plain - exact).norm() / exact.norm())
    assert loss == pytest.approx(exact_loss, rel=max(2e-2, 2 * abs(plain_loss / exact_loss - 1)))
    assert error < max(1.5 * usual, 5e-2)
