"""Jacobian-based training as released: its CG by dense algebra, R scaled down, batches left out."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from banach import Implicit, Tolerance, models
from banach.paper import released
from banach.paper.records import Adjoints
from banach.paper.released import LEFT_OUT, SCALED, ReleasedCG, as_released, scale_down
from banach.solve import Euclidean


def dense_problem() -> tuple[Any, Any, Any, Any]:
    """T(z) = z B' + c with a B of its own for every one of three samples; g, and (I - B')^-1 g."""
    torch.manual_seed(0)
    B = 0.4 * torch.randn(3, 5, 5, dtype=torch.float64) / 5**0.5
    c = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    z = torch.linalg.solve(torch.eye(5, dtype=torch.float64) - B, c.detach()[..., None])[..., 0]
    g = torch.randn(3, 5, dtype=torch.float64)
    return B, c, z, g


def released_w(atol: float, max_steps: int = 50, at_least: int = 1) -> Any:
    B, c, z, g = dense_problem()
    limits = Tolerance(atol=atol, rtol=0, max_steps=max_steps, norm=Euclidean())
    mode = Implicit(ReleasedCG(at_least), limits, report=lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loose tolerance is missed
        value = mode.attach(lambda z, c: torch.bmm(B, z[..., None])[..., 0] + c, z, (c,))
        return torch.autograd.grad(value, c, g)[0]  # dT/dc = I, so this is w itself


def test_cg_as_released_by_dense_algebra() -> None:
    B, _, _, g = dense_problem()
    A = torch.eye(5, dtype=torch.float64) - B.mT
    torch.testing.assert_close(released_w(1e-12), torch.linalg.solve(A, g[..., None])[..., 0])
    N, right = A.mT @ A, A.mT @ g[..., None]
    r = right - N @ right
    once = right + r * (r.mT @ r) / (r.mT @ N @ r)
    torch.testing.assert_close(released_w(1e9), once[..., 0])  # even if nothing is asked
    torch.testing.assert_close(released_w(1e9, at_least=5), released_w(1e-12))  # 5 unknowns, 5 steps
    torch.testing.assert_close(released_w(1e9, at_least=40), released_w(1e-12))  # solved, it stays where it is
    assert (released_w(1e9, at_least=4) - released_w(1e-12)).abs().max() > 1e-6


class Broken(torch.autograd.Function):
    """The identity, whose derivative is not a number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * float("nan")


def network(name: str = "digits", **limits: Any) -> Any:
    torch.manual_seed(0)
    net: Any = models.build(name, batch_norm=False)
    tolerance = replace(Tolerance(atol=0.1, rtol=0, max_steps=50, norm=Euclidean()), **limits)
    net.backward = Implicit(ReleasedCG(), tolerance, report=Adjoints())
    return net.train()


@pytest.mark.parametrize("name", ["digits", "mnist"])  # 1 block, 2
def test_convolutions_shrink_by_what_r_stretches_noise_too_much(name: str) -> None:
    R = network(name).R
    channels = R.blocks[0].conv1.in_channels
    v, before = torch.randn(4, channels, 6, 6), copy.deepcopy(R.state_dict())
    torch.manual_seed(5)
    assert scale_down(R, v)
    torch.manual_seed(5)
    noise = torch.randn(4, channels, 6, 6)
    there = v + torch.randn(4, channels, 6, 6)
    fresh = network(name).R
    with torch.no_grad():
        moved = fresh(noise, there) - fresh(0 * noise, there)
    factor = (fresh.gamma * noise.norm(dim=1).mean() / moved.norm(dim=1).mean()) ** (1 / len(R.blocks))
    assert 0 < factor < 1
    for key, value in R.state_dict().items():
        torch.testing.assert_close(value, factor * before[key])


def test_what_stretches_less_is_left_alone() -> None:
    """R for CIFAR-10, fresh: its activations come last, and shrink."""
    R = network("cifar10").R
    before = copy.deepcopy(R.state_dict())
    assert not scale_down(R, torch.randn(4, 35, 6, 6))
    assert all(torch.equal(value, before[key]) for key, value in R.state_dict().items())


def step(net: Any, optimizer: torch.optim.Optimizer) -> None:
    draw = torch.Generator().manual_seed(1)
    d, y = torch.randn(8, 1, 8, 8, generator=draw), torch.arange(8)
    optimizer.zero_grad()
    F.cross_entropy(net(d), y).backward()
    optimizer.step()


@pytest.mark.parametrize("enough", [True, False])
def test_a_batch_whose_equations_are_not_solved_changes_nothing_else(enough: bool) -> None:
    net = network(**({"max_steps": 200} if enough else {"atol": 1e-7, "max_steps": 1}))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    before = copy.deepcopy(dict(net.named_parameters()))
    with warnings.catch_warnings(), as_released(net):
        warnings.simplefilter("ignore")
        step(net, optimizer)
    moved = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    scaled = {name for name in before if name.startswith("R.") and "conv" in name}
    assert moved == (set(before) if enough else scaled)  # those are scaled before the solve
    assert bool(optimizer.state) == enough
    assert (net.backward.report[SCALED], net.backward.report[LEFT_OUT]) == (1, 0 if enough else 1)


def test_nothing_is_scaled_when_nothing_is_learnt_or_r_has_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    d, before = torch.randn(4, 1, 8, 8), copy.deepcopy(net.state_dict())
    with as_released(net):
        with torch.no_grad():
            net(d)
        net.eval()(d)
    for key, value in net.state_dict().items():
        if key.startswith("R."):
            assert torch.equal(value, before[key])
    torch.manual_seed(0)
    normed: Any = models.build("digits").train()
    normed.backward = net.backward
    monkeypatch.setattr(released, "scale_down", lambda *_: 1 / 0)  # is not asked
    with as_released(normed):
        normed(d)
    assert net.backward.report[SCALED] == 0


@pytest.mark.parametrize("what", ["R", "S"])  # the Jacobian, or the cotangent
def test_what_is_not_a_number_is_not_solved(what: str) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    before = copy.deepcopy(net.S.state_dict())
    broken = getattr(net, what).register_forward_hook(lambda module, inputs, out: Broken.apply(out))
    with warnings.catch_warnings(), as_released(net):
        warnings.simplefilter("ignore")
        step(net, optimizer)
    broken.remove()
    assert net.backward.report[LEFT_OUT] == 1
    assert all(torch.equal(value, before[key]) for key, value in net.S.state_dict().items())


def test_the_optimizer_of_another_network_is_left_alone() -> None:
    net, other = network(atol=1e-7, max_steps=1), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    other(torch.ones(1, 2)).sum().backward()
    before = other.weight.detach().clone()
    net.backward.method.met = False
    with as_released(net):
        optimizer.step()
    torch.testing.assert_close(other.weight.detach(), before - 1)
    assert net.backward.report[LEFT_OUT] == 0


def test_afterwards_other_trainings_are_their_own() -> None:
    net = network(atol=1e-7, max_steps=1)
    with as_released(net):
        pass
    optimizer, R = torch.optim.SGD(net.parameters(), lr=1e-2), net.R.blocks[0].conv1.weight
    before = R.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(net, optimizer)
    torch.testing.assert_close(R.detach(), before - 1e-2 * R.grad)
    assert net.backward.report[LEFT_OUT] == net.backward.report[SCALED] == 0
