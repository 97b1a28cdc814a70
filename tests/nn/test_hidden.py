"""Layers that R reaches through globals or as a callable object are seen as those in a closure are."""

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


@pytest.fixture(autouse=True)
def train_mode() -> Any:
    NORM.train()
    DROP.train()
    NORM.reset_running_stats()


@pytest.mark.parametrize(
    ("R", "name"),
    [
        (normed, "BatchNorm1d"),
        (dropped, "Dropout"),
        (through_another, "BatchNorm1d"),
        (nested, "BatchNorm1d"),
        (Called(NORM), "BatchNorm1d"),
        (Called(DROP), "Dropout"),
        (Calling(), "BatchNorm1d"),
    ],
    ids=["norm", "drop", "helper", "nested", "object", "object_drop", "object_global"],
)
def test_refused_in_train_mode_only(R: Any, name: str) -> None:
    net = network(R)
    with pytest.raises(RuntimeError, match=rf"R is a {type(R).__name__} that calls {name} in train mode"):
        net(normal(5, 4))
    assert NORM.num_batches_tracked is not None
    assert int(NORM.num_batches_tracked) == 0
    NORM.eval()
    DROP.eval()
    y, found = net(normal(5, 4), solution=True)
    assert bool(found.converged.all())
    u = torch.zeros(5, 6, dtype=torch.float64)
    for _ in range(100):
        u = R(u, net.Q(normal(5, 4)))
    torch.testing.assert_close(y, net.S(u))


class Holder:
    NORM = staticmethod(torch.tanh)


def test_an_attribute_of_the_same_name_is_another_thing() -> None:
    """Names of attributes stand beside those of globals in `co_names`."""
    holder = Holder()
    network(lambda u, v: 0.3 * holder.NORM(u) + v)(normal(5, 4))


def test_functions_compile_whole() -> None:
    NORM.eval()
    for R in (normed, Called(NORM), lambda u, v: normed(u, v)):
        net = network(R, tolerance=Tolerance(max_steps=5, check_every=0))
        wanted = net(normal(5, 4))
        torch._dynamo.reset()
        got = torch.compile(net, backend="eager", fullgraph=True)(normal(5, 4))
        torch.testing.assert_close(got, wanted)


UNTRACKED = nn.BatchNorm1d(6, track_running_stats=False).double()
RANDOM = nn.RReLU()
GRU = nn.GRU(6, 6, num_layers=2, dropout=0.5, batch_first=True).double()


@pytest.mark.parametrize(
    "R",
    [
        lambda u, v: 0.3 * UNTRACKED(LINEAR(u)) + v,
        lambda u, v: 0.3 * RANDOM(LINEAR(u)) + v,
        lambda u, v: 0.3 * GRU(LINEAR(u)[:, None])[0][:, 0] + v,
    ],
    ids=["batch norm without statistics", "RReLU", "GRU with dropout"],
)
def test_layers_that_mix_or_draw_are_refused(R: Any) -> None:
    with pytest.raises(RuntimeError, match="give ImplicitNetwork the module itself as R"):
        network(R)(normal(5, 4))


def test_batch_norm_in_start_is_not_in_R() -> None:
    norm = nn.BatchNorm1d(6).double()
    network(lambda u, v: 0.3 * LINEAR(u) + v, start=lambda v: norm(v))(normal(5, 4))
