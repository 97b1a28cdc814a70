"""A plain function or callable object for R: train-mode batch norm and dropout that it calls are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import Tolerance
from nn.parts_nn import network, normal

NORM = nn.BatchNorm1d(6).double()
DROP = nn.Dropout(0.5)
LINEAR = nn.Linear(6, 6).double()


def normed(u: Tensor, v: Tensor) -> Tensor:
    return 0.3 * torch.tanh(NORM(LINEAR(u) + v))


def dropped(u: Tensor, v: Tensor) -> Tensor:
    return 0.3 * torch.tanh(DROP(LINEAR(u)) + v)


def through_another(u: Tensor, v: Tensor) -> Tensor:
    return normed(u, v)


def nested(u: Tensor, v: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return normed(x, v)

    return inner(u)


class Called:
    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm

    def __call__(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.3 * torch.tanh(self.norm(LINEAR(u) + v))


class Calling:
    def __call__(self, u: Tensor, v: Tensor) -> Tensor:
        return normed(u, v)


NORMS = r"R is a (function|Called|Calling) that calls batch_norm in train mode"
DROPS = "R calls dropout with a dropout probability of 0.5"


@pytest.fixture(autouse=True)
def train_mode() -> Any:
    NORM.train()
    DROP.train()
    NORM.reset_running_stats()


@pytest.mark.parametrize(
    ("R", "said"),
    [
        (normed, NORMS),
        (dropped, DROPS),
        (through_another, NORMS),
        (nested, NORMS),
        (Called(NORM), NORMS),
        (Called(DROP), DROPS),
        (Calling(), NORMS),
    ],
    ids=["norm", "drop", "helper", "nested", "object", "object_drop", "object_global"],
)
def test_refused_in_train_mode_only(R: Any, said: str) -> None:
    net = network(R)
    with pytest.raises(RuntimeError, match=said):
        net(normal(5, 4))
    NORM.eval()
    DROP.eval()
    y, found = net(normal(5, 4), solution=True)
    assert bool(found.converged.all())
    u = torch.zeros(5, 6, dtype=torch.float64)
    for _ in range(100):
        u = R(u, net.Q(normal(5, 4)))
    torch.testing.assert_close(y, net.S(u))


def test_functions_compile_whole() -> None:
    NORM.eval()
    for R in (normed, Called(NORM), lambda u, v: normed(u, v)):
        net = network(R, tolerance=Tolerance(max_steps=5, check_every=0))
        wanted = net(normal(5, 4))
        torch._dynamo.reset()
        got = torch.compile(net, backend="eager", fullgraph=True)(normal(5, 4))
        torch.testing.assert_close(got, wanted)
