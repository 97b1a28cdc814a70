"""torch.func through Implicit, against dense algebra: jvp, vjp, jacrev, jacfwd, and gradients per sample."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from backward.contracts_backward import EXACT, METHODS, TIGHT, attach, error, name, sensitivity
from backward.maps_backward import Case, all_cases, layer
from backward.systems_backward import Reports
from banach import (
    JFB,
    Anderson,
    Broyden,
    Implicit,
    Mode,
    Neumann,
    NormalCG,
    Picard,
    Tolerance,
    Unroll,
    fixed_point,
)
from networks import by_hand, linear_network
from problems import normal

# torch's own forward mode, when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

methods = pytest.mark.parametrize("method", METHODS, ids=str)


def flat(parts: Any) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def matrix(blocks: Any, rows: int) -> Tensor:
    return torch.cat([block.reshape(rows, -1) for block in blocks], 1)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("mode", [*EXACT, JFB(), Neumann(3), Unroll(3, damping=0.4)], ids=name)
def test_products_and_matrices(mode: Mode, case: Case) -> None:
    _, S = sensitivity(mode, case)
    which, g = tuple(range(len(case.theta))), case.cotangent()
    t = tuple(torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t) for t in case.theta)

    def value(*theta: Tensor) -> Tensor:
        return case.vector(attach(mode, case, theta))

    assert error(jvp(value, case.theta, t)[1], S @ flat(t)) <= 1e-9
    assert error(flat(vjp(value, *case.theta)[1](g)), S.T @ g) <= 1e-9
    assert error(matrix(jacrev(value, which)(*case.theta), len(S)), S) <= 1e-9
    assert error(matrix(jacfwd(value, which)(*case.theta), len(S)), S) <= 1e-9


@methods
def test_one_linear_solve_each(method: Any) -> None:
    """For all columns of a Jacobian at once: the axis of vmap is more rows."""
    log, case = Reports(), layer()
    mode = Implicit(method, TIGHT, report=log)

    def value(x: Tensor) -> Tensor:
        return case.vector(attach(mode, case, (*case.theta[:2], x)))

    x = case.theta[2]
    jvp(value, (x,), (torch.ones_like(x),))
    vjp(value, x)[1](case.cotangent())
    assert [len(status) for status in log.status] == [3, 3]
    jacrev(value)(x)
    jacfwd(value)(x)
    assert [len(status) for status in log.status] == [3, 3, 15 * 3, 15 * 3]
    assert all(products % 3 == 0 for products in log.products)


def network(mode: Mode) -> Any:
    net = linear_network()
    net.backward = mode
    return net


@methods
def test_a_network_forwards_and_backwards(method: Any) -> None:
    """Through the solve: z* is found without a derivative, whatever the transform."""
    net, d, t = network(Implicit(method, TIGHT)), normal(4, 5, seed=141), normal(4, 5, seed=142)
    assert error(jvp(net, (d,), (t,))[1], jvp(lambda d: by_hand(net, d), (d,), (t,))[1]) <= 1e-9
    assert error(jacrev(net)(d), jacrev(lambda d: by_hand(net, d))(d)) <= 1e-9


def test_parameters_that_were_written_to_before_the_pass() -> None:
    """By an optimizer, or by nn.init: they were refused as changed between the forward and the backward pass."""
    net, d = network(Implicit(NormalCG(), TIGHT)), normal(4, 5, seed=141)
    given = {name: p.detach().add_(0) for name, p in net.named_parameters()}
    found = jacrev(lambda given: functional_call(net, given, (d,)))(given)
    weights, outputs = list(net.parameters()), by_hand(net, d).flatten()
    rows = [torch.autograd.grad(y, weights, retain_graph=True) for y in outputs]
    assert error(matrix(found.values(), 12), torch.stack([flat(row) for row in rows])) <= 1e-9
    pull = vjp(lambda given: functional_call(net, given, (d,)), given)[1]
    for p in net.R.parameters():
        p.detach().mul_(2)  # the memory of those in `given`
    with pytest.raises(RuntimeError, match=r"R's parameter .* was changed in place between"):
        pull(torch.ones_like(by_hand(net, d)))


# Per sample: solve first, then vmap(grad(...)) with z0=z* and max_steps=0.


def found_first(net: Any, d: Tensor) -> Tensor:
    """z*, after which the network evaluates R once, from z0=z*."""
    with torch.no_grad():
        z = net.latent(d)[1].value
    net.tolerance = Tolerance(max_steps=0)
    return z


PER_SAMPLE: list[Mode] = [
    *(Implicit(method, TIGHT) for method in METHODS),
    Implicit(NormalCG(), Tolerance(atol=0, rtol=1e-12, max_steps=30, check_every=0)),
    JFB(),
    Neumann(3),
    Unroll(4),
]


@pytest.mark.parametrize("mode", PER_SAMPLE, ids=str)
def test_gradients_per_sample(mode: Mode) -> None:
    """Against one backward pass for every sample, and for Implicit against a loop that is recorded whole."""
    net, d = network(mode), normal(6, 5, seed=143)
    outputs = [by_hand(net, d[i : i + 1]) if isinstance(mode, Implicit) else net(d[i : i + 1]) for i in range(6)]
    wanted = [torch.autograd.grad(y.square().sum(), list(net.parameters())) for y in outputs]
    z = found_first(net, d)

    def loss(weights: dict[str, Tensor], d: Tensor, z: Tensor) -> Tensor:
        y: Tensor = functional_call(net, weights, (d[None],), {"z0": z[None]})
        return y.square().sum()

    found = vmap(grad(loss), (None, 0, 0))({key: p.detach() for key, p in net.named_parameters()}, d, z)
    for i, values in enumerate(wanted):
        for key, value in zip(found, values, strict=True):
            assert error(found[key][i], value) <= 1e-9


@methods
def test_jacobians_per_sample(method: Any) -> None:
    """Two vmaps in each other."""
    net, d = network(Implicit(method, TIGHT)), normal(4, 5, seed=144)
    wanted = vmap(jacrev(lambda d: by_hand(net, d[None])[0]))(d)
    z = found_first(net, d)
    for way in (jacrev, jacfwd):
        found = vmap(way(lambda d, z: net(d[None], z0=z[None])[0]))(d, z)
        assert error(found, wanted) <= 1e-9


@pytest.mark.parametrize("mode", [JFB(), Implicit()], ids=name)
@pytest.mark.parametrize("check_every", [0, 1])
def test_vmap_of_grad_through_a_solve_is_refused_in_a_sentence(mode: Mode, check_every: int) -> None:
    """Found as "Cannot access data pointer of Tensor": grad hid from the loop that it was mapped over."""
    net, d = network(mode), normal(4, 5, seed=146)
    net.tolerance = Tolerance(check_every=check_every)
    says = r"solve first, then vmap\(grad\(...\)\) with z0=z\* and max_steps=0"
    with pytest.raises(RuntimeError, match=says):
        vmap(grad(lambda d: net(d[None]).sum()))(d)
    with pytest.raises(RuntimeError, match=says):
        vmap(lambda d: net(d[None]))(d)


# An ensemble: the weights are mapped over, the latent is not.


def ensemble() -> tuple[list[Any], dict[str, Tensor], Any, Tensor]:
    """Return three networks' R, their weights stacked, R as a function of weights, and v."""
    members = [linear_network(seed).R for seed in range(3)]
    weights, _ = stack_module_state(members)
    return members, weights, partial(functional_call, members[0]), normal(4, 6, seed=148)


@pytest.mark.parametrize("mode", [JFB(), Implicit()], ids=name)
@pytest.mark.parametrize("tolerance", [Tolerance(), Tolerance(check_every=0), Tolerance(check_every=3)], ids=str)
@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden()], ids=str)
def test_vmap_over_weights_alone_is_refused_in_a_sentence(solver: Any, tolerance: Tolerance, mode: Mode) -> None:
    """Found as "vmap: It looks like you're calling .item() on a Tensor"."""
    _, weights, R, v = ensemble()

    def one(weights: dict[str, Tensor]) -> Tensor:
        how: Any = {"solver": solver, "tolerance": tolerance, "backward": mode}
        found: Tensor = fixed_point(lambda u: R(weights, (u, v)), torch.zeros_like(v), **how)
        return found

    for way in (one, grad(lambda weights: one(weights).sum())):
        with pytest.raises(RuntimeError, match=r"vmap cannot map over a solve.* for an ensemble by a T such as"):
            vmap(way)(weights)


@methods
def test_an_ensemble_on_the_batch_axis(method: Any) -> None:
    members, weights, R, v = ensemble()

    def T(u: Tensor) -> Tensor:
        found: Tensor = vmap(lambda weights, u: R(weights, (u, v)))(weights, u)
        return found

    z0, tolerance = torch.zeros(3, *v.shape, dtype=v.dtype), Tolerance(atol=1e-14, max_steps=500)
    u = fixed_point(T, z0, tolerance=tolerance, backward=Implicit(method, TIGHT))
    found = torch.autograd.grad(u.pow(3).sum(), list(weights.values()))
    for index, R in enumerate(members):
        w = torch.zeros_like(v)
        for _ in range(150):
            w = R(w, v)
        assert error(u[index], w) <= 1e-9
        wanted = torch.autograd.grad(w.pow(3).sum(), list(R.parameters()))
        assert error(flat(part[index] for part in found), flat(wanted)) <= 1e-9


def test_a_derivative_from_outside_of_a_vmap_is_refused_in_a_sentence() -> None:
    net, d = network(Implicit()), normal(4, 5, seed=147)
    z = found_first(net, d)

    def values(d: Tensor) -> Tensor:
        return vmap(lambda d, z: net(d[None], z0=z[None])[0])(d, z)

    value = values(d)  # the value itself is given
    assert error(value, by_hand(net, d)) <= 1e-9
    for ask in (
        lambda: value.sum().backward(),
        lambda: grad(lambda d: values(d).sum())(d),
        lambda: jvp(values, (d,), (d,)),
    ):
        with pytest.raises(RuntimeError, match=r"from outside of a vmap: .* as vmap\(grad\(f\)\)"):
            ask()
