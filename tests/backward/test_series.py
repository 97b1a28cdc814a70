"""What modes cost in evaluations and memory, tangents without grad mode, checkpoints inside and around."""

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backward.contracts_backward import attach, error, gradient, sensitivity
from backward.maps_backward import Case, layer
from banach import JFB, Implicit, Mode, Neumann, Unroll
from problems import normal


@pytest.mark.parametrize(("steps", "damping"), [(1, 0.5), (4, 0.0), (9, 0.9)])
def test_unroll_from_a_point_that_is_no_fixed_point(steps: int, damping: float) -> None:
    base = layer()
    case = Case(base.name, base.build, base.theta, base.z_star + 0.3)
    value, S = sensitivity(Unroll(steps, damping), case)
    assert error(case.vector(attach(Unroll(steps, damping), case, case.theta)), value) <= 1e-14
    assert error(gradient(Unroll(steps, damping), case), S.T @ case.cotangent()) <= 1e-12


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


def test_torch_func_is_refused_not_answered_wrongly() -> None:
    case = layer()
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda theta: attach(Unroll(2, checkpoint=True), case, theta).sum())(case.theta)
