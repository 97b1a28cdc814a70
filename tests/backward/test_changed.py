"""What T reads again in the backward pass of `Implicit` is as it was, or the pass is refused; no false alarms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import GMRES, Anderson, Implicit, ImplicitNetwork, Tolerance, fixed_point
from banach.backward import Mode

TIGHT = Tolerance(atol=1e-13, max_steps=999)
EXACT = Tolerance(atol=0, rtol=1e-12)
CHANGED = "was changed in place between the forward and the backward pass"


class Cell(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64) if norm else nn.Identity()

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.norm(self.linear(u) + v))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def data(seed: int = 1) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network(R: Any, mode: Mode | None = None) -> Any:
    mode = Implicit(tolerance=EXACT) if mode is None else mode
    return ImplicitNetwork(nn.Flatten(), R, nn.Identity(), tolerance=TIGHT, backward=mode)


def by_hand(R: Any, x: Tensor) -> Tensor:
    u = torch.zeros_like(x)
    for _ in range(120):
        u = R(u, x)
    return u.square().sum()


@pytest.mark.parametrize("method", [Implicit().method, GMRES(), Anderson()], ids=str)
def test_one_buffer_for_two_passes(method: Any) -> None:
    cell, buffer = Cell(), data(1)
    net = network(cell, Implicit(method))
    loss = net(buffer).square().sum()
    buffer.copy_(data(2))
    loss = loss + net(buffer).square().sum()
    with pytest.raises(RuntimeError, match=rf"an input of T \(1\) {CHANGED}"):
        loss.backward()


def test_inputs_in_a_nest() -> None:
    a, x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True), {"x": [data()]}
    z = fixed_point(
        lambda z, x: torch.tanh(a * z + x["x"][0]),
        torch.zeros_like(data()),
        inputs=(x,),
        tolerance=TIGHT,
        backward=Implicit(),
    )
    x["x"][0].zero_()
    with pytest.raises(RuntimeError, match=CHANGED):
        z.sum().backward()


@pytest.mark.parametrize("norm", [False, True])
def test_running_statistics_and_accumulated_gradients_are_no_change(norm: bool) -> None:
    cell = Cell(norm).train()
    net = network(cell)
    losses = [net(data(seed)).square().sum() for seed in (1, 2)]
    for loss in (*losses, losses[0]):
        loss.backward(retain_graph=True)
    one, two = (torch.autograd.grad(loss, cell.linear.weight)[0] for loss in losses)
    torch.testing.assert_close(cell.linear.weight.grad, 2 * one + two)


def test_a_closure_with_statistics_of_its_own() -> None:
    norm = nn.BatchNorm1d(4, dtype=torch.float64).eval()
    x = data()
    z = fixed_point(lambda z: 0.3 * norm(z) + x, torch.zeros_like(x), tolerance=TIGHT, backward=Implicit())
    norm.train()(data(2))
    norm.eval()
    z.sum().backward()
    assert norm.weight.grad is not None


def test_inference_tensors_are_not_counted() -> None:
    with torch.inference_mode():
        x = data()
    a = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    z = fixed_point(
        lambda z, v: torch.tanh(a * z) + v.clone(),
        torch.zeros(3, 4, dtype=torch.float64),
        inputs=(x,),
        tolerance=TIGHT,
        backward=Implicit(),
    )
    z.sum().backward()
    assert a.grad is not None


def test_with_no_steps_T_is_not_evaluated_again() -> None:
    cell, x = Cell(), data()
    net = network(cell, Implicit(tolerance=Tolerance(max_steps=0, check_every=0)))
    loss = net(x).square().sum()
    x.zero_()
    loss.backward()


def test_weights_that_are_made_in_the_pass_are_no_change() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.LazyLinear(4, dtype=torch.float64)

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return 0.3 * torch.tanh(self.linear(u) + v)

    R, x = Lazy(), data()
    network(R)(x).square().sum().backward()
    found = R.linear.weight.grad
    R.zero_grad()
    by_hand(R, x).backward()
    torch.testing.assert_close(found, R.linear.weight.grad)


def test_around_an_inner_implicit_network_normal_cg_says_what_to_use() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(Cell())

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return 0.4 * torch.tanh(self.inner(u + v) + v)

    R, x = Outer(), data()
    with pytest.raises(RuntimeError, match=r"NormalCG around an R .* GMRES\(\) and Anderson\(\) do not"):
        network(R)(x).square().sum().backward()
    R.zero_grad()
    network(R, Implicit(GMRES(), EXACT))(x).square().sum().backward()
    found = R.inner.R.linear.weight.grad.clone()
    R.zero_grad()
    by_hand(R, x).backward()
    torch.testing.assert_close(found, R.inner.R.linear.weight.grad)
