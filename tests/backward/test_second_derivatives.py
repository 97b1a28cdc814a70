"""Second derivatives and forward mode: the surrogate's for the plain modes, refused by Implicit, however asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backward.contracts_backward import EXACT, attach, error, flat_grad, gradient, name, sensitivity
from backward.maps_backward import Case, all_cases, layer
from banach import GMRES, JFB, Anderson, Implicit, Mode, Neumann, Picard, Unroll

CASES = pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
METHODS = pytest.mark.parametrize("mode", EXACT, ids=name)


def surrogate(mode: Mode, case: Case) -> Callable[..., Tensor]:
    """What the mode's value is a derivative of, as a function of theta with its constants written out."""
    z_star = case.vector(case.z_star)
    Tz = case.flat(z_star, *case.theta).detach()

    def unroll(*theta: Tensor) -> Tensor:
        assert isinstance(mode, Unroll)
        z = z_star
        for _ in range(mode.steps):
            z = mode.damping * z + (1 - mode.damping) * case.flat(z, *theta)
        return z

    def series(*theta: Tensor) -> Tensor:
        value = case.flat(z_star, *theta)
        for _ in range(mode.order if isinstance(mode, Neumann) else 0):
            value = case.flat(z_star + value - Tz, *theta)
        return value

    return unroll if isinstance(mode, Unroll) else series


def hessian_vector(value: Tensor, theta: tuple[Tensor, ...]) -> Tensor:
    """d/dtheta of <v, d loss / dtheta>, for a loss that is not linear in the value."""
    first = flat_grad((value * value.sin()).sum(), theta, create_graph=True)
    v = torch.linspace(-1, 1, len(first), dtype=first.dtype)
    return flat_grad(first @ v, theta)


@CASES
@pytest.mark.parametrize("mode", [JFB(), Neumann(1), Neumann(4), Unroll(3), Unroll(3, damping=0.4)], ids=name)
def test_of_the_surrogate(mode: Mode, case: Case) -> None:
    theta, again = case.fresh(), case.fresh()
    found = hessian_vector(case.vector(attach(mode, case, theta)), theta)
    assert error(found, hessian_vector(surrogate(mode, case)(*again), again)) <= 1e-12


@pytest.mark.parametrize("mode", [JFB(), Neumann(2), Unroll(3), Unroll(2, damping=0.4)], ids=name)
def test_the_surrogate_passes_gradgradcheck(mode: Mode) -> None:
    case = layer(batch=1, n=3)
    assert torch.autograd.gradgradcheck(surrogate(mode, case), case.fresh())


def test_of_a_checkpointed_unroll() -> None:
    case = layer()
    theta, again = case.fresh(), case.fresh()
    found = hessian_vector(case.vector(attach(Unroll(3, checkpoint=True), case, theta)), theta)
    assert error(found, hessian_vector(case.vector(attach(Unroll(3), case, again)), again)) <= 1e-12


# Every way to ask Implicit. Each takes attach(theta), theta and x, one of theta, and asks for a second derivative.
Asked = Callable[[Callable[..., Tensor], tuple[Tensor, ...]], object]


def constant_cotangent(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    """The case in which `once_differentiable` answers, wrongly: the cotangent of a sum is a constant."""
    first = flat_grad(f(*theta).sum(), theta, create_graph=True)
    flat_grad(first.sum(), theta)


def linear_penalty(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    (first,) = torch.autograd.grad(f(*theta).sum(), theta[-1], create_graph=True)
    torch.autograd.grad(first.square().sum(), theta[-1])


def by_backward(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    f(*theta).sum().backward(create_graph=True)
    assert theta[0].grad is not None
    theta[0].grad.sum().backward()


def by_backward_of_inputs(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    f(*theta).sum().backward(create_graph=True, inputs=[theta[-1]])
    assert theta[-1].grad is not None
    theta[-1].grad.square().sum().backward(inputs=[theta[0]])


def parameters_of_an_input_gradient(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    (first,) = torch.autograd.grad(f(*theta).sum(), theta[-1], create_graph=True)
    torch.autograd.grad(first.square().sum(), theta[0])


def inputs_of_a_parameter_gradient(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    (first,) = torch.autograd.grad(f(*theta).sum(), theta[0], create_graph=True)
    torch.autograd.grad(first.sum(), theta[-1])


def upstream_cotangent(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    """A product with the Jacobian by double backward: the derivative in the cotangent."""
    value = f(*theta)
    g = torch.ones_like(value, requires_grad=True)
    (first,) = torch.autograd.grad(value, theta[0], g, create_graph=True)
    torch.autograd.grad(first.sum(), g)


def nonlinear_loss(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    first = flat_grad(f(*theta).square().sum(), theta, create_graph=True)
    flat_grad(first.sum(), theta)


def func_grad_twice(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    inner = torch.func.grad(lambda t: f(t, *theta[1:]).sum())
    torch.func.grad(lambda t: inner(t).sum())(theta[0].detach())


def func_grad_crosswise(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    inner = torch.func.grad(lambda x, t: f(t, *theta[1:-1], x).sum())
    torch.func.grad(lambda t: inner(theta[-1].detach(), t).sum())(theta[0].detach())


def func_grad_of_autograd(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    """An inner torch.func.grad whose result is differentiated by plain autograd."""
    first = torch.func.grad(lambda x: f(*theta[:-1], x).sum())(theta[-1])
    torch.autograd.grad(first.square().sum(), theta[0])


def functional_hessian(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    torch.autograd.functional.hessian(lambda *t: f(*t).sum(), theta)


# torch's own forward mode, when it is first used.
jit = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

WAYS: list[Asked] = [
    constant_cotangent,
    linear_penalty,
    by_backward,
    by_backward_of_inputs,
    parameters_of_an_input_gradient,
    inputs_of_a_parameter_gradient,
    upstream_cotangent,
    nonlinear_loss,
    func_grad_twice,
    func_grad_crosswise,
    func_grad_of_autograd,
    functional_hessian,
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("ask", WAYS, ids=lambda way: way.__name__)
@METHODS
def test_implicit_refuses(mode: Implicit, ask: Asked) -> None:
    case = layer()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        ask(lambda *theta: case.vector(attach(mode, case, theta)), case.fresh())


@CASES
@pytest.mark.parametrize(
    "mode", [Implicit(), Implicit(GMRES()), Implicit(Picard()), Implicit(Anderson())], ids=name
)
def test_implicit_refuses_on_every_map(mode: Implicit, case: Case) -> None:
    with pytest.raises(RuntimeError, match="no second derivatives"):
        constant_cotangent(lambda *theta: case.vector(attach(mode, case, theta)), case.fresh())


@CASES
@METHODS
def test_first_derivatives_with_create_graph(mode: Implicit, case: Case) -> None:
    theta = case.fresh()
    found = flat_grad(case.vector(attach(mode, case, theta)) @ case.cotangent(), theta, create_graph=True)
    assert found.requires_grad
    assert torch.equal(found, gradient(mode, case))


def test_a_second_derivative_that_needs_only_a_first_of_implicit() -> None:
    """The gradient in S's own weight depends on u once: its derivative in theta is a first derivative."""
    case = layer()
    theta, s = case.fresh(), torch.ones((), dtype=torch.float64, requires_grad=True)
    value = case.vector(attach(Implicit(), case, theta))
    (first,) = torch.autograd.grad((s * value) @ case.cotangent(), s, create_graph=True)
    assert error(flat_grad(first, theta), gradient(Implicit(), case)) <= 1e-12


def forward_mode(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    torch.func.jvp(f, tuple(t.detach() for t in theta), tuple(torch.ones_like(t) for t in theta))


def forward_mode_without_grad_mode(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    with torch.no_grad():
        forward_mode(f, theta)


def forward_mode_of_leaves(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    with torch.autograd.forward_ad.dual_level():
        f(*(torch.autograd.forward_ad.make_dual(t, torch.ones_like(t)) for t in theta))


def forward_over_reverse(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    t, first = theta[0].detach(), torch.func.grad(lambda t: f(t, *theta[1:]).sum())
    torch.func.jvp(first, (t,), (torch.ones_like(t),))


def reverse_over_forward(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    def slope(t: Tensor) -> Tensor:
        return torch.func.jvp(lambda t: f(t, *theta[1:]).sum(), (t,), (torch.ones_like(t),))[1]

    torch.func.grad(slope)(theta[0].detach())


FORWARD: list[Asked] = [
    forward_mode,
    forward_mode_without_grad_mode,
    forward_mode_of_leaves,
    forward_over_reverse,
    reverse_over_forward,
]


@jit
@pytest.mark.parametrize("ask", FORWARD, ids=lambda way: way.__name__)
def test_implicit_refuses_forward_mode(ask: Asked) -> None:
    """Found as a tangent that was JFB's: the Function was passed by, since nothing wanted a gradient."""
    case = layer()
    with pytest.raises(RuntimeError, match=r"no forward-mode derivative"):
        ask(lambda *theta: case.vector(attach(Implicit(), case, theta)), case.fresh())


@jit
@CASES
@pytest.mark.parametrize("mode", [JFB(), Neumann(3), Unroll(3, damping=0.4)], ids=name)
def test_forward_mode_of_the_others(mode: Mode, case: Case) -> None:
    """Plain autograd has it for nothing, and it agrees with dense algebra."""
    tangents = tuple(torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t) for t in case.theta)
    slope = torch.func.jvp(lambda *theta: case.vector(attach(mode, case, theta)), case.theta, tangents)[1]
    _, S = sensitivity(mode, case)
    assert error(slope, S @ torch.cat([t.reshape(-1) for t in tangents])) <= 1e-12
