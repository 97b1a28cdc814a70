"""JFB, Neumann and Unroll against each other, against powers of J and against finite differences."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backward.contracts_backward import attach, error, gradient, sensitivity
from backward.maps_backward import Case, all_cases, layer
from banach import JFB, Implicit, Mode, Neumann, Tolerance, Unroll
from problems import normal

CASES = pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)


@pytest.mark.parametrize("gamma", [0.5, 0.9])
def test_the_error_of_neumann_falls_like_gamma_to_the_order_plus_one(gamma: float) -> None:
    """On an orthogonal J the bound is met with equality: |w - w_k| = gamma^(k+1) |w|."""
    Q = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]
    b = torch.ones(2, 6, dtype=torch.float64)
    g = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
    exact = torch.linalg.solve(torch.eye(6, dtype=torch.float64) - gamma * Q.T, g.T).T

    def w(mode: Mode) -> Tensor:
        x = b.clone().requires_grad_()
        value = mode.attach(lambda z, x: gamma * z @ Q.T + x, torch.zeros_like(b), (x,))
        return torch.autograd.grad(value, x, g)[0]

    sizes = [error(w(Neumann(k)), exact) for k in range(12)]
    assert sizes == pytest.approx([gamma ** (k + 1) for k in range(12)], rel=1e-10)


@pytest.mark.parametrize(("steps", "damping"), [(1, 0.0), (1, 0.5), (4, 0.0), (4, 0.25), (9, 0.9)])
def test_unroll_is_the_derivative_of_its_own_value(steps: int, damping: float) -> None:
    """Central differences of the K-th damped iterate, from a point that is no fixed point."""
    base = layer()
    case = Case(base.name, base.build, base.theta, base.z_star + 0.3)
    mode, h = Unroll(steps, damping), 1e-6

    def loss(theta: tuple[Tensor, ...]) -> float:
        with torch.no_grad():
            return float(case.vector(attach(mode, case, theta)) @ case.cotangent())

    found, at = gradient(mode, case), 0
    for i, t in enumerate(case.theta):
        for j in range(t.numel()):
            step = torch.zeros_like(t)
            step.view(-1)[j] = h
            up, down = (tuple(u + s * step if k == i else u for k, u in enumerate(case.theta)) for s in (1, -1))
            assert (loss(up) - loss(down)) / (2 * h) == pytest.approx(float(found[at]), rel=1e-6, abs=1e-8)
            at += 1
    _, S = sensitivity(mode, case)
    assert error(found, S.T @ case.cotangent()) <= 1e-12


@CASES
def test_a_long_unrolling_from_zero_is_the_implicit_gradient(case: Case) -> None:
    """An independent route to the exact gradient: plain backpropagation through 250 steps from z0."""
    start = Case(case.name, case.build, case.theta, torch.utils._pytree.tree_map(torch.zeros_like, case.z_star))
    full = gradient(Unroll(250), start)
    exact = gradient(Implicit(tolerance=Tolerance(atol=0, rtol=1e-13, max_steps=1000)), case)
    assert error(exact, full) <= 1e-9


@pytest.mark.parametrize(
    "mode", [JFB(), Neumann(3), Unroll(3, damping=0.5), Unroll(5, checkpoint=True), Implicit()]
)
def test_evaluations_of_T(mode: Mode) -> None:
    """No more of them than the mode's formula has; without grad mode none that only a gradient needs."""
    case, calls = layer(), 0
    T, inputs = case.build(*case.fresh())

    def counted(*arguments: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return T(*arguments)

    steps = mode.steps if isinstance(mode, Unroll) else 1
    with torch.no_grad():
        mode.attach(counted, case.z_star, inputs)
    assert calls == steps
    value = mode.attach(counted, case.z_star, inputs)
    assert calls == 2 * steps + (mode.order if isinstance(mode, Neumann) else 0)
    before = calls
    value.sum().backward()
    again = steps if isinstance(mode, Unroll) and mode.checkpoint else int(isinstance(mode, Implicit))
    assert calls - before == again


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("grad", [True, False])
def test_the_tangent_of_a_long_series_is_that_of_the_fixed_point(grad: bool) -> None:
    """Forward mode does not need grad mode: found as a tangent of JFB's under no_grad."""
    case = layer()
    x, t = case.theta[-1], torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
    wanted = sensitivity(Implicit(), case)[1][:, -15:] @ t.flatten()

    def tangent(mode: Mode) -> Tensor:
        with torch.set_grad_enabled(grad), forward.dual_level():
            value = attach(mode, case, (*case.theta[:-1], forward.make_dual(x, t)))
            return case.vector(forward.unpack_dual(value).tangent)

    assert error(tangent(Neumann(60)), wanted) <= 1e-8
    assert error(tangent(JFB()), wanted) > 1e-2


# Unroll(checkpoint=True): the same gradients for less memory, each step computed twice.


def held(mode: Unroll) -> int:
    """How many activations inside of T are still in memory after the forward pass."""
    A, B, inside = normal(64, 4, seed=1).requires_grad_(), 0.01 * normal(4, 64, seed=2), []

    def T(z: Tensor) -> Tensor:
        hidden = torch.tanh(z @ A.T)
        inside.append(StorageWeakRef(hidden.untyped_storage()))
        return hidden @ B.T

    value = mode.attach(T, normal(8, 4, seed=3))
    assert value.requires_grad
    return sum(not ref.expired() for ref in inside)


def test_memory() -> None:
    assert held(Unroll(10)) == 10
    assert held(Unroll(10, checkpoint=True)) == 0


def test_a_checkpoint_around_implicit() -> None:
    """The other way round: attach inside a region that is recomputed."""
    case = layer()
    theta = case.fresh()
    value = torch.utils.checkpoint.checkpoint(attach, Implicit(), case, theta, use_reentrant=False)
    found = torch.autograd.grad(value.view(-1) @ case.cotangent(), theta)
    expected = gradient(Implicit(), case)
    assert error(torch.cat([part.reshape(-1) for part in found]), expected) <= 1e-12


def test_torch_func_is_refused_not_answered_wrongly() -> None:
    case = layer()
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda theta: attach(Unroll(2, checkpoint=True), case, theta).sum())(case.theta)
