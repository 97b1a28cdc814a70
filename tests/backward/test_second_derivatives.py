"""Second derivatives: the surrogate's for the plain modes; of Implicit refused, or with order=2 exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backward.contracts_backward import EXACT, attach, error, flat_grad, gradient, name, sensitivity
from backward.maps_backward import Case, all_cases, layer, nested, scalar
from banach import JFB, Implicit, Mode, Neumann, Picard, Tolerance, Unroll

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


# Every way to ask Implicit. Each takes attach(theta), theta and x, one of theta, and asks for a second derivative.
Asked = Callable[[Callable[..., Tensor], tuple[Tensor, ...]], object]


def constant_cotangent(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    """The case in which `once_differentiable` answers, wrongly: the cotangent of a sum is a constant."""
    first = flat_grad(f(*theta).sum(), theta, create_graph=True)
    flat_grad(first.sum(), theta)


def by_backward(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    f(*theta).sum().backward(create_graph=True)
    assert theta[0].grad is not None
    theta[0].grad.sum().backward()


def parameters_of_an_input_gradient(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    (first,) = torch.autograd.grad(f(*theta).sum(), theta[-1], create_graph=True)
    torch.autograd.grad(first.square().sum(), theta[0])


def upstream_cotangent(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    """A product with the Jacobian by double backward: the derivative in the cotangent."""
    value = f(*theta)
    g = torch.ones_like(value, requires_grad=True)
    (first,) = torch.autograd.grad(value, theta[0], g, create_graph=True)
    torch.autograd.grad(first.sum(), g)


def func_grad_of_autograd(f: Callable[..., Tensor], theta: tuple[Tensor, ...]) -> None:
    """An inner torch.func.grad whose result is differentiated by plain autograd."""
    first = torch.func.grad(lambda x: f(*theta[:-1], x).sum())(theta[-1])
    torch.autograd.grad(first.square().sum(), theta[0])


# torch's own forward mode, when it is first used.
jit = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

WAYS: list[Asked] = [
    constant_cotangent,
    by_backward,
    parameters_of_an_input_gradient,
    upstream_cotangent,
    func_grad_of_autograd,
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("ask", WAYS, ids=lambda way: way.__name__)
@METHODS
def test_implicit_refuses(mode: Implicit, ask: Asked) -> None:
    case = layer()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        ask(lambda *theta: case.vector(attach(mode, case, theta)), case.fresh())


@jit
@CASES
@pytest.mark.parametrize("mode", [JFB(), Neumann(3), Unroll(3, damping=0.4)], ids=name)
def test_forward_mode_of_the_others(mode: Mode, case: Case) -> None:
    """Plain autograd has it for nothing, and it agrees with dense algebra."""
    tangents = tuple(torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t) for t in case.theta)
    slope = torch.func.jvp(lambda *theta: case.vector(attach(mode, case, theta)), case.theta, tangents)[1]
    _, S = sensitivity(mode, case)
    assert error(slope, S @ torch.cat([t.reshape(-1) for t in tangents])) <= 1e-12


# With `order`: exact, against backpropagation through a long loop, which is recorded whole.
Scalar = Callable[[Tensor], Tensor]
SECOND = [Implicit(mode.method, mode.tolerance, order=2) for mode in EXACT]


def flat_theta(case: Case) -> Tensor:
    return torch.cat([t.reshape(-1) for t in case.theta])


def loss_of(case: Case, value: Callable[..., Tensor]) -> Scalar:
    """A loss that is not linear in the value, of theta as one vector."""

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([t.numel() for t in case.theta])
        u = value(*(part.view_as(t) for part, t in zip(parts, case.theta, strict=True)))
        return (u * u.sin()).sum()

    return loss


def loop(case: Case) -> Callable[..., Tensor]:
    def value(*theta: Tensor) -> Tensor:
        z = torch.zeros_like(case.vector(case.z_star))
        for _ in range(150):
            z = case.flat(z, *theta)
        return z

    return value


def implicit(mode: Implicit, case: Case) -> Scalar:
    return loss_of(case, lambda *theta: case.vector(attach(mode, case, theta)))


def double_backward(loss: Scalar, at: Tensor, v: Tensor) -> Tensor:
    at = at.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(at), at, create_graph=True)
    return torch.autograd.grad(first @ v, at)[0]


def slope_of(f: Callable[[Tensor], Tensor], v: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda at: torch.func.jvp(f, (at,), (v,))[1]


PRODUCTS: dict[str, Callable[[Scalar, Tensor, Tensor], Tensor]] = {
    "double backward": double_backward,
    "reverse over reverse": lambda f, x, v: torch.func.grad(lambda x: torch.func.grad(f)(x) @ v)(x),
    "forward over reverse": lambda f, x, v: slope_of(torch.func.grad(f), v)(x),
    "reverse over forward": lambda f, x, v: torch.func.grad(slope_of(f, v))(x),
    "hessian": lambda f, x, v: torch.func.hessian(f)(x) @ v,
    "functional.hessian": lambda f, x, v: torch.autograd.functional.hessian(f, x) @ v,
    "jacrev twice": lambda f, x, v: torch.func.jacrev(torch.func.jacrev(f))(x) @ v,
    "jacfwd twice": lambda f, x, v: torch.func.jacfwd(torch.func.jacfwd(f))(x) @ v,
}


@jit
@METHODS
@pytest.mark.parametrize("way", PRODUCTS)
def test_implicit_refuses_every_mixture_of_modes(mode: Implicit, way: str) -> None:
    case = layer(batch=1, n=2)
    at = flat_theta(case)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        PRODUCTS[way](implicit(mode, case), at, torch.ones_like(at))


@CASES
@pytest.mark.parametrize("mode", SECOND, ids=name)
def test_of_implicit_with_order_2(mode: Implicit, case: Case) -> None:
    at = flat_theta(case)
    v = torch.linspace(-1, 1, len(at), dtype=at.dtype)
    wanted = double_backward(loss_of(case, loop(case)), at, v)
    assert error(double_backward(implicit(mode, case), at, v), wanted) <= 1e-9


@jit
@pytest.mark.parametrize("way", PRODUCTS)
@pytest.mark.parametrize("case", [layer(2, 3), nested(1), scalar()], ids=lambda case: case.name)
def test_of_implicit_in_every_mixture_of_modes(case: Case, way: str) -> None:
    at = flat_theta(case)
    v = torch.linspace(-1, 1, len(at), dtype=at.dtype)
    wanted = double_backward(loss_of(case, loop(case)), at, v)
    for mode in (SECOND[0], SECOND[3]):  # NormalCG and Picard
        assert error(PRODUCTS[way](implicit(mode, case), at, v), wanted) <= 1e-9


@CASES
@pytest.mark.parametrize("mode", SECOND, ids=name)
def test_order_changes_neither_the_value_nor_the_first_derivative(mode: Implicit, case: Case) -> None:
    first = Implicit(mode.method, mode.tolerance)
    assert torch.equal(
        case.vector(attach(mode, case, case.fresh())), case.vector(attach(first, case, case.fresh()))
    )
    assert error(gradient(mode, case), gradient(first, case)) <= 1e-9


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("ask", WAYS, ids=lambda way: way.__name__)
def test_every_way_to_ask_is_answered_with_order_2(ask: Asked) -> None:
    case = layer()
    ask(lambda *theta: case.vector(attach(SECOND[1], case, theta)), case.fresh())


def repeated(f: Callable[[Tensor], Tensor], ways: str) -> Callable[[Tensor], Tensor]:
    """Derivatives of a function of one number, by grad (g) or jvp (j), the last letter first."""
    for way in reversed(ways):
        f = torch.func.grad(f) if way == "g" else slope_of(f, torch.ones((), dtype=torch.float64))
    return f


@jit
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("ways", ["ggg", "jgg", "gjg", "ggj", "jjg", "jgj", "gjj", "jjj"])
def test_derivatives_beyond_order_are_refused_and_those_up_to_it_exact(ways: str, linear: bool) -> None:
    """Also where the loss is linear: there no cotangent depends on anything."""
    case = scalar()
    d = case.theta[1]

    def loss(value: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda a: value(a, d).sum() if linear else value(a, d).sin().sum()

    def ours(order: int) -> Callable[[Tensor], Tensor]:
        mode = Implicit(SECOND[1].method, SECOND[1].tolerance, order=order)
        return loss(lambda *theta: case.vector(attach(mode, case, theta)))

    with pytest.raises(RuntimeError, match=r"order=2. gives no higher derivatives: write Implicit.order=3."):
        repeated(ours(2), ways)(case.theta[0])
    wanted = repeated(loss(loop(case)), "ggg")(case.theta[0])
    assert error(repeated(ours(3), ways)(case.theta[0]), wanted) <= 1e-9


@pytest.mark.filterwarnings("ignore:the adjoint equation missed:banach.AdjointWarning")
def test_with_order_2_a_diverging_adjoint_is_no_worse_than_g_either() -> None:
    """The second linear solve corrects the first, and must not spoil it."""
    J, x = -1.5 * torch.eye(4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    g = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    value = Implicit(Picard(), Tolerance(atol=0, rtol=1e-8, max_steps=9), order=2).attach(
        lambda z, x: z @ J.T + x, torch.zeros_like(g), (x,)
    )
    (w,) = torch.autograd.grad(value, x, g)
    assert torch.linalg.vector_norm(g - w + w @ J) <= torch.linalg.vector_norm(g @ J)
