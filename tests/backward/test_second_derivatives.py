"""Second derivatives: the surrogate's for the plain modes; of Implicit refused, or with order=2 exact."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp
from torch.nn.functional import scaled_dot_product_attention

from backward.contracts_backward import EXACT, attach, error, gradient, name
from backward.maps_backward import Case, all_cases, curvature, layer, nested, scalar
from banach import JFB, Implicit, Mode, Neumann, Picard, Tolerance, fixed_point
from problems import normal

CASES = pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
SECOND = [Implicit(mode.method, mode.tolerance, order=2) for mode in EXACT]
# torch's own forward mode, when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
Scalar = Callable[[Tensor], Tensor]
Value = Callable[..., Tensor]


def flat_theta(case: Case) -> Tensor:
    return torch.cat([t.reshape(-1) for t in case.theta])


def loss_of(case: Case, value: Value) -> Scalar:
    """A loss that is not linear in the value, of theta as one vector."""

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([t.numel() for t in case.theta])
        u = value(*(part.view_as(t) for part, t in zip(parts, case.theta, strict=True)))
        return (u * u.sin()).sum()

    return loss


def ours(mode: Mode, case: Case) -> Value:
    return lambda *theta: case.vector(attach(mode, case, theta))


def surrogate(mode: Mode, case: Case) -> Value:
    """What JFB or Neumann differentiates, as a function of theta with its constants written out."""
    z_star = case.vector(case.z_star)
    Tz = case.flat(z_star, *case.theta).detach()

    def series(*theta: Tensor) -> Tensor:
        value = case.flat(z_star, *theta)
        for _ in range(mode.order if isinstance(mode, Neumann) else 0):
            value = case.flat(z_star + value - Tz, *theta)
        return value

    return series


def loop(case: Case) -> Value:
    """A long loop from zero, which is recorded whole."""

    def value(*theta: Tensor) -> Tensor:
        z = torch.zeros_like(case.vector(case.z_star))
        for _ in range(150):
            z = case.flat(z, *theta)
        return z

    return value


def double_backward(loss: Scalar, at: Tensor, v: Tensor) -> Tensor:
    at = at.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(at), at, create_graph=True)
    return torch.autograd.grad(first @ v, at)[0]


def slope_of(f: Callable[[Tensor], Tensor], v: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda at: jvp(f, (at,), (v,))[1]


PRODUCTS: dict[str, Callable[[Scalar, Tensor, Tensor], Tensor]] = {
    "double backward": double_backward,
    "reverse over reverse": lambda f, x, v: grad(lambda x: grad(f)(x) @ v)(x),
    "forward over reverse": lambda f, x, v: slope_of(grad(f), v)(x),
    "reverse over forward": lambda f, x, v: grad(slope_of(f, v))(x),
    "hessian": lambda f, x, v: hessian(f)(x) @ v,
    "functional.hessian": lambda f, x, v: torch.autograd.functional.hessian(f, x) @ v,
    "jacrev twice": lambda f, x, v: jacrev(jacrev(f))(x) @ v,
    "jacfwd twice": lambda f, x, v: jacfwd(jacfwd(f))(x) @ v,
}


def check(found: Value, wanted: Value, case: Case, allowed: float, way: str = "double backward") -> None:
    """Compare products with the Hessian of a loss."""
    at = flat_theta(case)
    v = torch.linspace(-1, 1, len(at), dtype=at.dtype)
    product = PRODUCTS[way](loss_of(case, found), at, v)
    assert error(product, double_backward(loss_of(case, wanted), at, v)) <= allowed


@CASES
@pytest.mark.parametrize("mode", [JFB(), Neumann(4)], ids=name)
def test_of_the_surrogate(mode: Mode, case: Case) -> None:
    check(ours(mode, case), surrogate(mode, case), case, 1e-12)


@CASES
@pytest.mark.parametrize("mode", SECOND, ids=name)
def test_of_implicit_with_order_2(mode: Implicit, case: Case) -> None:
    """Exact, while neither the value nor the first derivative changes."""
    check(ours(mode, case), loop(case), case, 1e-9)
    first = Implicit(mode.method, mode.tolerance)
    assert torch.equal(ours(mode, case)(*case.fresh()), ours(first, case)(*case.fresh()))
    assert error(gradient(mode, case), gradient(first, case)) <= 1e-9


def test_of_implicit_with_order_2_through_torchs_attention() -> None:
    """Its fast kernels have no second derivative."""
    x, weight = normal(2, 1, 5, 4, seed=1), 0.2 * normal(48, seed=2)

    def T(z: Tensor, weight: Tensor, attend: Value) -> Tensor:
        return attend(*((z + x) @ weight.view(4, 12)).chunk(3, -1))

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT / 2, -1) @ v

    def loop(weight: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(150):
            z = T(z, weight, by_hand)
        return z

    def implicit(weight: Tensor) -> Tensor:
        mode = Implicit(tolerance=Tolerance(atol=0, rtol=1e-12, max_steps=200), order=2)
        return mode.attach(lambda z: T(z, weight, scaled_dot_product_attention), loop(weight.detach()))

    v = torch.ones_like(weight)
    found = double_backward(lambda weight: implicit(weight).sin().sum(), weight, v)
    assert error(found, double_backward(lambda weight: loop(weight).sin().sum(), weight, v)) <= 1e-9


@pytest.mark.parametrize("way", PRODUCTS)
@pytest.mark.parametrize("case", [layer(2, 3), nested(1), scalar(), curvature()], ids=lambda case: case.name)
def test_of_implicit_in_every_mixture_of_modes(case: Case, way: str) -> None:
    for mode in (SECOND[0], SECOND[3]):  # NormalCG and Picard
        check(ours(mode, case), loop(case), case, 1e-9, way)


@pytest.mark.parametrize("mode", EXACT, ids=name)
@pytest.mark.parametrize("way", PRODUCTS)
def test_implicit_refuses_every_mixture_of_modes(mode: Implicit, way: str) -> None:
    case = layer(batch=1, n=2)
    at = flat_theta(case)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        PRODUCTS[way](loss_of(case, ours(mode, case)), at, torch.ones_like(at))


def test_a_constant_cotangent_is_refused_or_with_order_2_answered() -> None:
    """That of a sum: the case in which `once_differentiable` answers, wrongly."""
    case = layer()

    def ask(mode: Mode) -> None:
        theta = case.fresh()
        first = torch.autograd.grad(ours(mode, case)(*theta).sum(), theta, create_graph=True)
        torch.autograd.grad(first[0].sum() + first[1].sum(), theta)

    for first, second in zip(EXACT, SECOND, strict=True):
        with pytest.raises(RuntimeError, match="no second derivatives"):
            ask(first)
        ask(second)


def repeated(f: Callable[[Tensor], Tensor], ways: str) -> Callable[[Tensor], Tensor]:
    """Derivatives of a function of one number, by grad (g) or jvp (j), the last letter first."""
    for way in reversed(ways):
        f = grad(f) if way == "g" else slope_of(f, torch.ones((), dtype=torch.float64))
    return f


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("ways", ["ggg", "jgg", "gjg", "ggj", "jjg", "jgj", "gjj", "jjj"])
def test_derivatives_beyond_order_are_refused_and_those_up_to_it_exact(ways: str, linear: bool) -> None:
    """Also where the loss is linear: there no cotangent depends on anything."""
    case = scalar()
    a, d = case.theta

    def loss(value: Value) -> Callable[[Tensor], Tensor]:
        return lambda a: value(a, d).sum() if linear else value(a, d).sin().sum()

    def of(order: int) -> Callable[[Tensor], Tensor]:
        return loss(ours(Implicit(SECOND[1].method, SECOND[1].tolerance, order=order), case))

    with pytest.raises(RuntimeError, match=r"order=2. gives no higher derivatives: write Implicit.order=3."):
        repeated(of(2), ways)(a)
    assert error(repeated(of(3), ways)(a), repeated(loss(loop(case)), "ggg")(a)) <= 1e-9


@pytest.mark.filterwarnings("ignore:the adjoint equation missed:banach.AdjointWarning")
def test_with_order_2_a_diverging_adjoint_is_no_worse_than_g_either() -> None:
    """The second linear solve corrects the first, and must not spoil it."""
    J, x = -1.5 * torch.eye(4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    g = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    mode = Implicit(Picard(), Tolerance(atol=0, rtol=1e-8, max_steps=9), order=2)
    (w,) = torch.autograd.grad(mode.attach(lambda z, x: z @ J.T + x, torch.zeros_like(g), (x,)), x, g)
    assert torch.linalg.vector_norm(g - w + w @ J) <= torch.linalg.vector_norm(g @ J)


@pytest.mark.parametrize("mode", EXACT, ids=name)
def test_a_fixed_number_of_steps_needs_no_data_at_any_order(mode: Implicit) -> None:
    """On the meta device a look at a value raises. Order 2 looked at a residual, so a capture of it failed."""
    fixed = Tolerance(atol=0, rtol=1e-6, max_steps=4, check_every=0)
    twice = Implicit(mode.method, fixed, order=2)
    a, z0 = torch.ones(3, device="meta", requires_grad=True), torch.zeros(2, 3, device="meta")
    z = fixed_point(lambda z: torch.tanh(a * z), z0, tolerance=fixed, backward=twice)
    (slope,) = torch.autograd.grad(z.square().sum(), a, create_graph=True)
    assert torch.autograd.grad(slope.sum(), a)[0].shape == a.shape
