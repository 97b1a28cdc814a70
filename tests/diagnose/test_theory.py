"""The paper's Lemma, Assumption, Theorem and Corollary, on random matrices, small networks and real digits."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import ImplicitNetwork, Tolerance
from banach.diagnose import Linearised, conditioning, corollary, identity, lemma, linearise, theorem


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_case(seed: int, n: int = 4, c: int = 2, p: int = 9) -> Linearised:
    """gradient = M J~'^-1 v and p = -M v for a random contraction J and a random M, well conditioned or not."""
    unit = torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()
    A = normal(n, n, seed=seed)
    if unit[2] < 0.3:  # symmetric: where the coercivity bound is nearly attained
        A = A @ A.T
    J = (0.02 + 0.9 * unit[0]) * A / torch.linalg.matrix_norm(A, 2)
    left = torch.linalg.qr(normal(p, n + c, seed=seed + 1))[0]
    right = torch.linalg.qr(normal(n + c, n + c, seed=seed + 2))[0]
    spread = 1 + 3 * unit[1] * torch.rand(
        n + c, generator=torch.Generator().manual_seed(seed + 3), dtype=torch.float64
    )
    M, v = left @ torch.diag(spread) @ right.T, normal(n + c, seed=seed + 4)
    J_tilde = torch.block_diag(torch.eye(c, dtype=torch.float64), torch.eye(n, dtype=torch.float64) - J)
    return Linearised(J, M, v, M @ torch.linalg.solve(J_tilde.T, v), -M @ v, outputs=c)


CASES = [random_case(10 * i) for i in range(600)]


def squares(y: Tensor) -> Tensor:
    return y.square().sum() + y[..., 0].sum()


def test_lemma_on_random_contractions() -> None:
    for at in CASES[:100]:
        found = lemma(at)
        A = torch.eye(4, dtype=torch.float64) - at.J
        x = normal(4, 2000, seed=3)
        x = x / x.norm(dim=0)
        least = [float((x * (B @ x)).sum(0).min()) for B in (A, torch.linalg.inv(A))]
        assert found.coercivity <= least[0] + 1e-12
        assert found.coercivity == pytest.approx(least[0], abs=0.05)  # the samples come near the minimum
        assert found.inverse <= least[1] + 1e-12
        assert found.holds
        assert found.coercivity_bound == pytest.approx(1 - float(torch.linalg.svdvals(at.J)[0]))


def test_lemma_is_attained_and_can_fail_to_apply() -> None:
    at = dataclasses.replace(CASES[0], J=0.75 * torch.eye(4, dtype=torch.float64))
    found = lemma(at)
    assert found.coercivity == pytest.approx(0.25)
    assert found.inverse == pytest.approx(4.0)
    assert found.inverse_bound == pytest.approx(0.25 / 1.75**2)
    singular = lemma(dataclasses.replace(at, J=torch.eye(4, dtype=torch.float64)))
    assert math.isnan(singular.inverse)
    assert not singular.holds


def test_identity_needs_the_transpose() -> None:
    for at in CASES[:100]:
        found = identity(at)
        assert found.error < 1e-12
        skew = float(torch.linalg.matrix_norm(at.J - at.J.T))
        assert (found.error_printed > 1e-6) == (skew > 1e-6)


def test_theorem_holds_and_the_printed_factor_two_does_not() -> None:
    found = [theorem(at) for at in CASES]
    assert all(case.holds for case in found)
    printed = [case for case in found if not case.printed_holds]
    assert len(printed) > 50
    assert all(case.descends for case in found if case.applies)
    assert sum(case.applies for case in found) > 50
    for case, at in zip(found, CASES, strict=True):
        eigenvalues = torch.linalg.eigvalsh(torch.linalg.inv(at.M.T @ at.M))
        w = at.M.T @ at.gradient
        gamma = float(torch.linalg.svdvals(at.J)[0])
        expected = -float((eigenvalues[0] - gamma * eigenvalues[-1]) * w @ w)
        assert case.bound == pytest.approx(expected, rel=1e-8)
        assert case.printed == pytest.approx(2 * expected, rel=1e-8)
        assert case.inner == pytest.approx(float(at.gradient @ at.direction))


def test_theorem_applies_exactly_where_the_assumption_is_strict() -> None:
    for at in CASES[:100]:
        held = conditioning(at)
        singular = torch.linalg.svdvals(at.M)
        assert held.kappa == pytest.approx(float((singular[0] / singular[-1]) ** 2))
        assert held.limit == pytest.approx(1 / float(torch.linalg.svdvals(at.J)[0]))
        assert held.holds == theorem(at).applies


def test_rank_deficiency() -> None:
    M = CASES[0].M.clone()
    M[:, 0] = M[:, 1]
    held = conditioning(dataclasses.replace(CASES[0], M=M))
    assert (held.rank, held.columns, held.kappa, held.holds) == (5, 6, math.inf, False)
    case = theorem(dataclasses.replace(CASES[0], M=M))
    assert case.bound == math.inf  # it says nothing
    assert not case.applies


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


def test_corollary_radius_ends_at_the_first_ascent() -> None:
    at = dataclasses.replace(
        CASES[0],
        u=torch.zeros(4, dtype=torch.float64),
        direction_at=lambda u: (0.5 - u.norm()) * -CASES[0].gradient,
    )
    found = corollary(at, (0.1, 0.4, 0.6, 0.9))
    assert found.radius == 0.4
    assert [inner < 0 for inner in found.inner] == [True, True, False, False]
    assert corollary(at, (0.7,)).radius == 0.0
    with pytest.raises(ValueError, match="got bare matrices; use linearise"):
        corollary(CASES[0])


def test_corollary_reports_the_worst_direction() -> None:
    seen: list[Tensor] = []

    def direction_at(u: Tensor) -> Tensor:
        seen.append(u)
        return (u[0] - 1) * CASES[0].gradient

    at = dataclasses.replace(CASES[0], u=torch.zeros(4, dtype=torch.float64), direction_at=direction_at)
    found = corollary(at, (0.5,), directions=6)
    assert len(seen) == 6
    assert all(float(u.norm()) == pytest.approx(0.5) for u in seen)
    squared = float(CASES[0].gradient @ CASES[0].gradient)
    assert found.inner[0] == pytest.approx(max(float(u[0]) - 1 for u in seen) * squared)
    gaps = [float((direction_at(u) - CASES[0].direction).norm()) for u in list(seen)]
    assert found.moved[0] == pytest.approx(max(gaps))


@pytest.mark.parametrize("training", [True, False])
def test_real_digit_with_batch_norm_in_R(conv: Any, digits: Any, training: bool) -> None:
    net = conv().train(training)
    image, label = digits(1)
    at = linearise(net, image, lambda y: nn.functional.cross_entropy(y, label))
    assert lemma(at).holds
    held = conditioning(at)
    assert held.columns == 32 + 10
    # In train mode batch norm holds the mean of each of the two channels: two directions are missing.
    assert held.rank == (40 if training else 42)
    assert theorem(at).holds
    assert theorem(at).descends
    if not training:
        assert identity(at).error < 1e-6
    assert corollary(at, (1e-3,), directions=2).radius == 1e-3


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
    with pytest.raises(ValueError, match="needs weights in Q or R"):
        linearise(bare, data[:1], squares)
    several = ImplicitNetwork(nn.Linear(4, 2).double(), lambda u, v: 0.5 * u + v, lambda u: (u, u))
    with pytest.raises(TypeError, match="S must return one tensor to be linearised, got tuple"):
        linearise(several, data[:1], lambda y: y[0].sum())
