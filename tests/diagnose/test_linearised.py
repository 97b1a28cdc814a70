"""Small networks and a real digit as dense matrices, and the paper's statements measured on them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import ImplicitNetwork, Tolerance
from banach.diagnose import conditioning, corollary, identity, lemma, linearise, theorem


def squares(y: Tensor) -> Tensor:
    return y.square().sum() + y[..., 0].sum()


def gradients(net: ImplicitNetwork, d: Tensor, steps: int) -> Tensor:
    """The gradient by recording `steps` steps from the fixed point: 1 is JFB, many are exact. S, Q, R in turn."""
    twin = copy.deepcopy(net)
    v = twin.Q(d)
    u = torch.zeros_like(v)
    with torch.no_grad():
        for _ in range(300):
            u = twin.R(u, v)
    for _ in range(steps):
        u = twin.R(u, v)
    parts = [twin.S, twin.Q, twin.R]
    weights = [w for part in parts if isinstance(part, nn.Module) for w in part.parameters()]
    return torch.cat([g.flatten() for g in torch.autograd.grad(squares(twin.S(u)), weights)])


@pytest.mark.parametrize("seed", range(3))
def test_a_network_linearised(tiny: Any, data: Tensor, seed: int, jacobian: Any, unchanged: Any) -> None:
    net = tiny(gain=0.7, seed=seed)
    d = data[seed : seed + 1]
    with unchanged(net):
        at = linearise(net, d, squares)
    assert at.M.shape == (net.S.weight.numel() + 3 + 25 + 25 + 5, 3 + 5)
    torch.testing.assert_close(at.gradient, gradients(net, d, 300), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(-at.direction, gradients(net, d, 1), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(at.M @ at.v, -at.direction, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(at.M @ torch.linalg.solve(at.J_tilde.T, at.v), at.gradient, rtol=1e-7, atol=1e-9)
    with torch.no_grad():
        v = net.Q(d)
    assert at.u is not None
    torch.testing.assert_close(at.J, jacobian(lambda u: net.R(u, v), at.u[None]), rtol=1e-6, atol=1e-9)
    assert identity(at).error < 1e-8
    assert identity(at).error_printed > 1e-3
    assert lemma(at).holds
    assert theorem(at).holds
    assert conditioning(at).rank == 8


def test_where_the_assumption_holds_jfb_descends_also_nearby(tiny: Any, data: Tensor) -> None:
    """Small data and weights: M'M is nearly a multiple of the identity, so the Theorem applies."""
    net = tiny(gain=0.3)
    with torch.no_grad():
        for part in (net.Q, net.S):
            part.weight.mul_(0.1)
            part.bias.mul_(0.1)
        net.R.linear.bias.mul_(0.1)
    net.Q.bias.requires_grad_(False)  # else two biases do the same work, and double M there
    at = linearise(net, 0.1 * data[:1], squares)
    assert conditioning(at).holds
    case = theorem(at)
    assert case.applies
    assert case.descends
    assert case.holds
    near = corollary(at, (1e-4, 1e-3, 1e-2))
    assert near.allowed > 0
    assert near.moved[0] < near.allowed  # close enough for the Corollary to be certain,
    assert near.inner[0] < 0  # and so it is
    assert near.radius >= 1e-4


def test_corollary_measures_what_it_says(tiny: Any, data: Tensor) -> None:
    net = tiny(gain=0.8)
    at = linearise(net, data[:1], squares)
    found = corollary(at, (1.0, 1e-3), directions=3)
    assert found.eps == (1e-3, 1.0)
    assert found.moved[0] < found.moved[1]
    assert found.inner[0] == pytest.approx(theorem(at).inner, rel=1e-2)
    assert at.u is not None
    assert at.direction_at is not None
    moved = at.u + 0.5
    u = moved[None].clone()
    loss = squares(net.S(net.R(u, net.Q(data[:1]))))
    weights = [*net.S.parameters(), *net.Q.parameters(), *net.R.parameters()]
    grads = torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])
    torch.testing.assert_close(at.direction_at(moved), -grads, rtol=1e-10, atol=1e-12)


def test_a_network_whose_S_has_no_weights(tiny: Any, data: Tensor) -> None:
    """A deep equilibrium model: S is the identity, and its columns of M are left out."""
    net = tiny(gain=0.7)
    net = ImplicitNetwork(net.Q, net.R, lambda u: u, tolerance=net.tolerance)
    at = linearise(net, data[:1], squares)
    assert (at.outputs, at.M.shape[1], len(at.v)) == (0, 5, 5)
    assert identity(at).error < 1e-8
    torch.testing.assert_close(at.gradient, gradients(net, data[:1], 300), rtol=1e-7, atol=1e-9)
    assert theorem(at).holds


def test_nested_latent(data: Tensor) -> None:
    class R(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.5, 0.25], dtype=torch.float64))

        def forward(self, u: dict[str, Tensor], v: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"b": self.weight[0] * u["a"] + v["b"], "a": self.weight[1] * u["b"] + v["a"]}

    net = ImplicitNetwork(
        lambda d: {"a": d, "b": 2 * d}, R(), lambda u: u["a"], tolerance=Tolerance(atol=1e-13, max_steps=200)
    )
    at = linearise(net, data[:1], squares)
    assert at.gamma == pytest.approx(0.5)
    # a* = (v_a + w1 v_b) / (1 - w0 w1): its derivative in the weights, by hand.
    d, (w0, w1) = data[0], (0.5, 0.25)
    a = d * (1 + 2 * w1) / (1 - w0 * w1)
    outer = 2 * a + torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    by_hand = torch.stack(
        [outer @ (a * w1 / (1 - w0 * w1)), outer @ (2 * d / (1 - w0 * w1) + a * w0 / (1 - w0 * w1))]
    )
    torch.testing.assert_close(at.gradient, by_hand, rtol=1e-8, atol=1e-10)


def test_refusals(tiny: Any, data: Tensor) -> None:
    net = tiny()
    with pytest.raises(ValueError, match=r"those of one sample, got a batch of 6; give d\[:1\]"):
        linearise(net, data, squares)
    big = ImplicitNetwork(nn.Linear(4, 2100).double(), lambda u, v: 0.5 * u + v, nn.Linear(2100, 1).double())
    with pytest.raises(
        ValueError, match=r"dense matrices of .* entries .*n = 2,100.*at most 16,777,216: take a small"
    ):
        linearise(big, data[:1], squares)
    tied = tiny()
    tied.S = nn.Linear(5, 5).double()
    tied.S.weight = tied.R.linear.weight
    with pytest.raises(ValueError, match="S must share no weights with Q and R, got 1 shared"):
        linearise(tied, data[:1], squares)
    bare = ImplicitNetwork(lambda d: d, lambda u, v: 0.5 * u + v, lambda u: u)
    with pytest.raises(ValueError, match="got none in Q, R and S"):
        linearise(bare, data[:1], squares)
    several = ImplicitNetwork(nn.Linear(4, 2).double(), lambda u, v: 0.5 * u + v, lambda u: (u, u))
    with pytest.raises(TypeError, match="S must return one tensor to be linearised, got tuple"):
        linearise(several, data[:1], lambda y: y[0].sum())
