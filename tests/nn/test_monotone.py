"""Monotone layers and the two splittings, against dense matrices and unrolled autograd in float64."""

import copy
import pickle
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from banach import Implicit, ImplicitNetwork, Picard, Status, Tolerance, Unroll, solve
from banach.backward.jacobian import Jacobian, plain_vjp
from banach.latent import Space, leaves, map_leaves
from banach.nn import (
    ForwardBackward,
    MonotoneConv2d,
    MonotoneLinear,
    MonotoneWarning,
    PeacemanRachford,
    monotonicity,
    tune_alpha,
)
from banach.nn.monotone import inverse_of
from banach.solve.context import constant_weights, loops_by
from banach.solve.device import loop_eagerly
from nn.parts_nn import close, gradients, normal

SHAPES: dict[Any, list[tuple[int, ...]]] = {
    3: [(3, 6, 6)],
    (2, 3): [(2, 8, 8), (3, 5, 5)],
    (2, 3, 4): [(2, 10, 10), (3, 6, 6), (4, 4, 4)],
}
CASES = list(SHAPES)
TIGHT = Tolerance(atol=1e-13, max_steps=3000)
SPLITTINGS = [ForwardBackward, PeacemanRachford]


def layer(channels: Any, m: float = 0.3, raised: float = 1.0, seed: int = 0) -> MonotoneConv2d:
    torch.manual_seed(seed)
    made = MonotoneConv2d(channels, m).double()
    with torch.no_grad():
        made.scale.add_(raised * (1 + torch.randn_like(made.scale)))
    return made


def nest(rows: Tensor, channels: Any) -> Any:
    shapes = SHAPES[channels]
    columns = rows.split([torch.Size(shape).numel() for shape in shapes], 1)
    parts = [part.reshape(len(rows), *shape) for part, shape in zip(columns, shapes, strict=True)]
    return parts[0] if len(parts) == 1 else tuple(parts)


def flat(z: Any) -> Tensor:
    return torch.cat([leaf.flatten(1) for leaf in leaves(z)], 1)


def identity(channels: Any) -> Tensor:
    return torch.eye(sum(torch.Size(shape).numel() for shape in SHAPES[channels]), dtype=torch.float64)


@torch.no_grad()
def dense(made: MonotoneConv2d, channels: Any) -> Tensor:
    return flat(made(nest(identity(channels), channels))).T


def latent(channels: Any, batch: int = 3, seed: int = 0) -> Any:
    return nest(normal(batch, len(identity(channels)), seed=seed), channels)


def linear(m: float = 0.5, scale: float = 3.0) -> MonotoneLinear:
    torch.manual_seed(1)
    made = MonotoneLinear(6, m).double()
    with torch.no_grad():
        made.A.mul_(scale)
        made.B.mul_(scale)
    return made


@pytest.mark.parametrize(("m", "scale"), [(0.05, 10.0), (1.0, 1.0), (3.0, 0.1)])
def test_the_inequality_of_a_linear_layer(m: float, scale: float) -> None:
    made, x, eye = linear(m, scale), normal(3, 6), torch.eye(6, dtype=torch.float64)
    W = ((1 - m) * eye - made.A.T @ made.A + made.B - made.B.T).detach()
    assert float(torch.linalg.eigvalsh(eye - (W + W.T) / 2)[0]) >= m * (1 - 1e-9) - 1e-12 * scale**2
    assert torch.allclose(made(x), x @ W.T, atol=1e-12 * scale**2)


@pytest.mark.parametrize("channels", CASES)
@pytest.mark.parametrize(("m", "raised"), [(0.3, 1.0), (1.0, 5.0)])
def test_monotone_whatever_the_weights(channels: Any, m: float, raised: float) -> None:
    made = layer(channels, m, raised)
    W, eye = dense(made, channels), identity(channels)
    least = float(torch.linalg.eigvalsh(eye - (W + W.T) / 2)[0])
    assert m - 1e-9 <= least < m + 0.1
    seen, L = monotonicity(made, [torch.Size((1, *shape)) for shape in SHAPES[channels]])
    assert least - 1e-9 <= seen
    exact = float(torch.linalg.matrix_norm(eye - W, 2))
    assert 0.98 * exact < L < 1.001 * exact


def test_the_default_device_of_the_user_does_not_matter() -> None:
    W, shapes = MonotoneLinear(4), [torch.Size((2, 4))]
    expected = monotonicity(W, shapes)
    with torch.device("meta"):  # stands for torch.set_default_device("cuda")
        assert monotonicity(W, shapes) == expected
        assert PeacemanRachford(W, 0.5).state_dict()["alpha"] == 0.5


def test_one_tier_is_the_formula() -> None:
    """W z by circular convolutions of A and B and their transposes, which autograd gives."""
    made, z = layer(3), normal(2, 3, 6, 6)
    g, h = F.softplus(made.scale)
    A, B = (kernel / kernel.norm() for kernel in (made.A[0], made.B[0]))

    def conv(x: Tensor, kernel: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), kernel)

    def transposed(y: Tensor, kernel: Tensor) -> Tensor:
        return torch.func.vjp(lambda x: conv(x, kernel), y)[1](y)[0]

    expected = 0.7 * z - g * transposed(conv(z, A), A) + h * (conv(z, B) - transposed(z, B))
    torch.testing.assert_close(made(z), expected, rtol=0, atol=1e-13)


def test_tiers_are_the_formula() -> None:
    """The blocks between tiers: -D'D on the diagonal, -2 A'D below it, zero above it."""
    channels = (2, 3, 4)
    made = layer(channels)
    W, sizes = dense(made, channels), [200, 108, 64]
    blocks = [row.split(sizes, 1) for row in W.split(sizes)]
    assert all(float(blocks[i][j].abs().max()) == 0 for i, j in ((0, 1), (0, 2), (1, 2), (2, 0)))
    scales = F.softplus(made.scale).detach()
    for i in range(2):
        shapes = SHAPES[channels]
        D = made.D[i].detach() * (scales[6 + i].sqrt() / made.D[i].norm())
        A = made.A[i + 1].detach() * (scales[i + 1].sqrt() / made.A[i + 1].norm())
        fine = torch.eye(sizes[i], dtype=torch.float64).view(-1, *shapes[i])
        coarse = torch.eye(sizes[i + 1], dtype=torch.float64).view(-1, *shapes[i + 1])
        down = F.conv2d(F.pad(fine, (1, 1, 1, 1), mode="circular"), D, stride=2)
        down = F.pad(down, (0, 1, 0, 1)).flatten(1).T
        across = F.conv2d(F.pad(coarse, (1, 1, 1, 1), mode="circular"), A).flatten(1).T
        torch.testing.assert_close(blocks[i + 1][i], -2 * across.T @ down, rtol=0, atol=1e-13)
        alone = layer(channels)
        with torch.no_grad():
            alone.scale[6 + i] = -80.0  # this D becomes zero
        without = dense(alone, channels).split(sizes)[i].split(sizes, 1)[i]
        torch.testing.assert_close(blocks[i][i], without - down.T @ down, rtol=0, atol=1e-13)


@pytest.mark.parametrize("channels", CASES)
@pytest.mark.parametrize("alpha", [0.2, 1.0, 7.0])
def test_the_inverse(channels: Any, alpha: float) -> None:
    made = layer(channels)
    W, eye = dense(made, channels), identity(channels)
    whole = nest(eye, channels)
    V = flat(made.invert(made.inverse(made.matrices(), alpha, whole), whole)).T
    torch.testing.assert_close(V @ (eye + alpha * (eye - W)), eye, rtol=0, atol=1e-12)


@pytest.mark.parametrize("channels", CASES)
def test_one_solution_from_every_start_and_by_both_splittings(channels: Any) -> None:
    made = layer(channels, m=1.0)
    W, v = dense(made, channels), latent(channels, seed=1)
    found = []
    for R in (PeacemanRachford(made, 0.3), PeacemanRachford(made, 1.0), ForwardBackward(made, 0.05)):
        for seed in (2, 3):
            solved = solve(R, latent(channels, seed=seed), inputs=(v,), tolerance=TIGHT)
            assert solved.status == (Status.CONVERGED,) * 3
            found.append(flat(made.activate(solved.value)))
    for z in found:
        torch.testing.assert_close(z, found[0], rtol=0, atol=1e-9)
    expected = flat(made.activate(nest(found[0] @ W.T + flat(v), channels)))
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-9)


def test_a_large_step_diverges_and_is_reported_while_peaceman_rachford_takes_any() -> None:
    made, v = linear(), normal(4, 6, seed=3)
    diverged = solve(ForwardBackward(made, 1.0), torch.zeros_like(v), inputs=(v,))
    assert not diverged.converged.any()
    assert "diverge" in diverged.summary() or Status.NONFINITE in diverged.status
    answers = []
    for alpha in (0.05, 0.5, 1.0, 4.0):
        found = solve(PeacemanRachford(made, alpha), torch.zeros_like(v), inputs=(v,), tolerance=TIGHT)
        assert found.converged.all(), alpha
        answers.append(torch.relu(found.value))
    for z in answers:
        torch.testing.assert_close(z, torch.relu(made(z) + v), rtol=0, atol=1e-9)
        torch.testing.assert_close(z, answers[0], rtol=0, atol=1e-9)


def network(channels: Any, kind: Any, alpha: float, **options: Any) -> ImplicitNetwork:
    """Q and S are linear maps of everything, S after the activation."""
    made, n = layer(channels, m=1.0), len(identity(channels))
    torch.manual_seed(5)
    Q, S = nn.Linear(4, n).double(), nn.Linear(n, 2).double()
    net = ImplicitNetwork(
        lambda d: nest(Q(d), channels),
        kind(made, alpha),
        lambda u: S(flat(made.activate(u))),
        **{"tolerance": TIGHT, **options},
    )
    net.parts = nn.ModuleList([Q, S])  # so that their parameters are the network's
    return net


EXACT = Implicit(Picard(), Tolerance(atol=0, rtol=1e-11, max_steps=3000))


@pytest.mark.parametrize("channels", CASES)
def test_the_exact_gradient_by_each_splitting_is_that_of_unrolled_autograd(channels: Any) -> None:
    d, answers = normal(2, 4), {}
    for kind, alpha in ((ForwardBackward, 0.25), (PeacemanRachford, 0.7)):
        net = network(channels, kind, alpha, backward=EXACT)
        answers[kind] = gradients(net, net(d).square().sum())
    unrolled = network(channels, ForwardBackward, 0.25, backward=Unroll(150), tolerance=Tolerance(max_steps=0))
    expected = gradients(unrolled, unrolled(d).square().sum())
    for got in answers.values():
        for name, value in expected.items():
            error = float((got[name] - value).norm() / value.norm())
            assert error <= 1e-6, (name, error)


@pytest.mark.parametrize("channels", [3, (2, 3)])
@pytest.mark.parametrize("size", [0.0, 1.0])
def test_peaceman_rachford_has_its_derivatives_in_the_weights_at_every_u(channels: Any, size: float) -> None:
    """With V a constant, R(0, v), the explicit twin, had no gradient in W, and a Jacobian penalty a wrong one."""
    made, alpha, eye = layer(channels), 0.7, identity(channels)
    u, v, e = (flat(latent(channels, seed=seed)) for seed in range(3))
    u = (size * u).requires_grad_()
    V = torch.linalg.inv((1 + alpha) * eye - alpha * flat(made(nest(eye, channels))).T)
    h = 2 * flat(made.activate(nest(u, channels))) - u
    found = []
    for y in (
        flat(PeacemanRachford(made, alpha)(nest(u, channels), nest(v, channels))),
        2 * (h + alpha * v) @ V.T - h,
    ):
        first = torch.autograd.grad((y * e).sum(), [u, *made.parameters()], create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), list(made.parameters()), retain_graph=True)
        found.append([y, *first, *second])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_second_derivatives_of_a_solution_by_peaceman_rachford() -> None:
    """On its positive entries D the solution is (I - D W)^-1 D v, which autograd differentiates twice."""
    made, v, e = linear(), normal(4, 6, seed=3), normal(6, 6)
    mode = Implicit(tolerance=Tolerance(atol=0, rtol=1e-12, max_steps=500), order=2)
    net = ImplicitNetwork(nn.Identity(), PeacemanRachford(made, 0.7), nn.ReLU(), tolerance=TIGHT, backward=mode)
    D = torch.diag_embed((net(v) > 0).double())
    found = []
    for z in (net(v), torch.linalg.solve(torch.eye(6).double() - D @ made.weight, D @ v[..., None])[..., 0]):
        (first,) = torch.autograd.grad(z.pow(3).sum(), made.A, create_graph=True)
        found.append([z, first, *torch.autograd.grad((first * e).sum(), list(made.parameters()))])
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-9)


def test_guarantees_are_checked_when_the_mode_changes() -> None:
    made, v = linear(), normal(4, 6, seed=3)
    for R in (ForwardBackward(made, 1e-3), PeacemanRachford(made, 10.0)):
        R(torch.zeros_like(v), v)
        R.eval()
    R = ForwardBackward(made, 1.0)
    R.eval()  # nothing was seen yet
    R.train()
    R(torch.zeros_like(v), v)
    with pytest.warns(MonotoneWarning, match="alpha is not below"):
        R.eval()

    class Broken(MonotoneLinear):
        @property
        def weight(self) -> Tensor:
            return 2 * torch.eye(6, dtype=torch.float64)

    wrong = PeacemanRachford(Broken(6).double(), 1.0)
    wrong(torch.zeros_like(v), v)
    with pytest.warns(MonotoneWarning, match="W is not monotone"):
        wrong.eval()
    with torch.no_grad():
        made.A.fill_(torch.nan)
    with pytest.warns(MonotoneWarning, match="check that weights are finite"):
        R.train().eval()


def test_alpha_is_tuned_and_saved() -> None:
    made, v = linear(), normal(4, 6, seed=3)
    net = ImplicitNetwork(
        nn.Identity(), ForwardBackward(made, 1.0), nn.ReLU(), tolerance=Tolerance(atol=1e-6, max_steps=400)
    )
    best = tune_alpha(net, v)
    assert best == net.R.alpha < 1
    steps = []
    for net.R.alpha in (best / 2, best):
        steps.append(float(net.latent(v)[1].steps.double().mean()))
    assert steps[1] <= steps[0]
    twin = ImplicitNetwork(nn.Identity(), ForwardBackward(MonotoneLinear(6, 0.5).double(), 1.0), nn.ReLU())
    twin.load_state_dict(net.state_dict())
    assert twin.R.alpha == best
    weights = {name: value for name, value in net.state_dict().items() if name != "R.alpha"}
    twin.load_state_dict(weights)


def test_what_is_kept_for_a_pass_follows_the_weights_and_v() -> None:
    made, v = linear(), normal(4, 6, seed=3)
    R, u = PeacemanRachford(made, 1.0), normal(4, 6)
    with torch.no_grad():
        first = R(u, v)
        made.A.mul_(1.5)
        second = R(u, v)
        fresh = PeacemanRachford(made, 1.0)(u, v)
        R.alpha = 0.5
        third = R(u, v)
    assert torch.equal(second, fresh)
    assert not torch.allclose(first, second)
    assert not torch.allclose(third, second)
    J = torch.func.jacrev(lambda one: R(u[:1], one[None])[0])(v[0])  # v has no address inside torch.func
    V = torch.linalg.inv(1.5 * torch.eye(6, dtype=torch.float64) - 0.5 * made.weight.detach())
    torch.testing.assert_close(J.detach(), V, rtol=0, atol=1e-12)  # 2 V alpha
    twin = pickle.loads(pickle.dumps(copy.deepcopy(R)))
    with torch.no_grad():
        torch.testing.assert_close(twin(u, v), R(u, v))


@pytest.mark.parametrize("kind", SPLITTINGS)
@pytest.mark.parametrize("channels", CASES)
def test_recorded_and_silent_evaluations_agree_also_in_bfloat16(kind: Any, channels: Any) -> None:
    """By autocast and throughout; FFTs and inverses run in float32, in which V is exact enough."""
    R, u, v = kind(layer(channels), 0.4), latent(channels), latent(channels, seed=1)
    with torch.no_grad():
        silent = R(u, v)
    torch.testing.assert_close(flat(silent), flat(R(u, v)).detach(), rtol=0, atol=1e-12)
    R, v = kind(layer(channels).float(), 0.3), map_leaves(Tensor.float, latent(channels))
    exact = R(map_leaves(torch.zeros_like, v), v)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = R(map_leaves(torch.zeros_like, v), v)
    R.bfloat16()
    v = map_leaves(Tensor.bfloat16, v)
    with torch.no_grad():
        short = R(map_leaves(torch.zeros_like, v), v)
    assert {leaf.dtype for leaf in leaves(mixed)} == {torch.float32}
    assert {leaf.dtype for leaf in leaves(short)} == {torch.bfloat16}
    for other in (mixed, short):
        torch.testing.assert_close(flat(other).float(), flat(exact), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", SPLITTINGS)
@pytest.mark.parametrize("channels", CASES)
def test_products_with_the_jacobian_in_u_differentiate_no_weights(
    kind: Any, channels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, u, v = layer(channels), latent(channels), latent(channels, seed=1)
    R, w, space = kind(made, 0.4), Space.of(u).rows(latent(channels, seed=2)), Space.of(u)
    expected = torch.func.vjp(lambda u: R(u, v), u)[1](space.nest(w))[0]
    product = Mock(wraps=made.product)
    monkeypatch.setattr(made, "product", product)
    J = Jacobian(lambda u: R(u, v), u, space)
    torch.testing.assert_close(J.transposed(w), space.rows(expected), rtol=0, atol=1e-12)
    assert product.call_count == (kind is ForwardBackward)


@pytest.mark.parametrize("kind", SPLITTINGS)
def test_weights_that_depend_on_u_are_differentiated(kind: Any) -> None:
    R, u, v = kind(linear(), 0.4), normal(4, 6), normal(4, 6, seed=1)

    def T(u: Tensor) -> Tensor:
        A = R.layer.A.detach() * (2 + u.sum())
        found: Tensor = torch.func.functional_call(R, {"layer.A": A}, (u, v))
        return found

    w = normal(4, 6, seed=2)
    expected = torch.func.vjp(T, u)[1](w)[0]
    torch.testing.assert_close(Jacobian(T, u, Space.of(u)).transposed(w), expected, rtol=0, atol=1e-12)
    with constant_weights():
        pull = plain_vjp(T, u)[1]
    torch.testing.assert_close(pull(w)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", SPLITTINGS)
def test_a_step_of_a_fused_optimizer_is_a_change_of_the_weights(kind: Any) -> None:
    """It leaves their `_version` as it is: for the same v, the matrices of before the step were used."""
    R, u, v = kind(linear().float(), 0.1), normal(4, 6).float(), normal(4, 6, seed=1).float()
    R(u, v).square().sum().backward()
    torch.optim.Adam(R.parameters(), 0.1, fused=True).step()
    with torch.no_grad():
        assert torch.equal(R(u, v), copy.deepcopy(R)(u, v))


def test_bad_input_gets_one_sentence() -> None:
    with pytest.raises(ValueError, match="m must be above 0 and finite, got 0"):
        MonotoneLinear(3, 0)
    with pytest.raises(ValueError, match="alpha must be above 0 and finite, got -1"):
        ForwardBackward(linear(), -1)
    made = MonotoneConv2d((1, 1))
    v = torch.zeros(1, 1, 9, 9), torch.zeros(1, 1, 5, 5)
    with pytest.raises(ValueError, match="needs an even size, border included, got 9"):
        made.inverse(made.matrices(), 1.0, v)


@pytest.mark.parametrize("skew", [0.1, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.complex64])
def test_inverses_in_a_capture_need_no_lapack(dtype: torch.dtype, skew: float) -> None:
    draw = torch.Generator().manual_seed(0)
    G = torch.randn(2, 5, 9, 9, generator=draw, dtype=dtype)
    M = torch.eye(9, dtype=dtype) + G @ G.mH + skew * (G - G.mH)
    with loops_by(loop_eagerly), torch.autocast("cpu", torch.bfloat16):
        made = inverse_of(M)
    exact = torch.linalg.inv(M.to(torch.complex128))
    error = torch.linalg.matrix_norm(made - exact) / torch.linalg.matrix_norm(exact)
    assert error.max() < (1e-4 if dtype == torch.complex64 else 1e-9)


@pytest.mark.parametrize("kind", SPLITTINGS)
@pytest.mark.parametrize("before", [lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode])
def test_nothing_is_kept_from_a_pass_in_another_arithmetic(kind: Any, before: Any) -> None:
    """W is rounded under autocast; autograd refuses what inference mode has made."""
    R, v = kind(linear().float(), 0.1), normal(4, 6).float()
    net = ImplicitNetwork(nn.Identity(), R, nn.Identity(), tolerance=Tolerance(atol=1e-6, max_steps=500))
    twin = copy.deepcopy(net)
    with before(), torch.no_grad():
        R(torch.zeros_like(v), v)  # the same v: Q is the identity
    found, expected = net(v), twin(v)
    assert torch.equal(found, expected)
    assert close(gradients(net, found.sum()), gradients(twin, expected.sum()), 0.0)
