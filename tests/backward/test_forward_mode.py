"""Tangents of the Neumann series, with and without grad mode, against a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import Tensor, nn

from banach import JFB, ImplicitNetwork, Neumann, Tolerance

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.6 * torch.tanh(self.linear(u) + v)


def network(mode: Any) -> Any:
    torch.manual_seed(0)
    tolerance = Tolerance(atol=1e-13, max_steps=500)
    return ImplicitNetwork(
        nn.Linear(3, 5, dtype=torch.float64), Cell(), nn.Identity(), tolerance=tolerance, backward=mode
    )


def by_hand(net: Any, d: Tensor) -> Tensor:
    v = net.Q(d)
    u = torch.zeros_like(v)
    for _ in range(100):
        u = net.R(u, v)
    return u


def dual(net: Any, d: Tensor, t: Tensor) -> Tensor:
    with forward.dual_level():
        made = forward.unpack_dual(net(forward.make_dual(d, t)))
    assert made.tangent is not None
    return made.tangent


def func(net: Any, d: Tensor, t: Tensor) -> Tensor:
    tangent: Tensor = torch.func.jvp(net, (d,), (t,))[1]
    return tangent


@pytest.mark.parametrize("how", [dual, func])
@pytest.mark.parametrize("grad", [True, False])
def test_the_tangent_of_a_long_series_is_that_of_the_fixed_point(how: Any, grad: bool) -> None:
    net, d, t = network(Neumann(60)), torch.randn(4, 3).double(), torch.randn(4, 3).double()
    wanted = torch.func.jvp(lambda d: by_hand(net, d), (d,), (t,))[1]
    with torch.set_grad_enabled(grad):
        got = how(net, d, t)
        net.backward = JFB()
        short = how(net, d, t)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)
    assert bool((short - wanted).norm() > 1e-2 * wanted.norm())


def test_without_grad_mode_and_tangent_one_evaluation_is_enough() -> None:
    calls: list[int] = []

    def T(z: Tensor) -> Tensor:
        calls.append(1)
        return z / 2

    with torch.no_grad():
        Neumann(7).attach(T, torch.zeros(2, 3))
    assert len(calls) == 1
