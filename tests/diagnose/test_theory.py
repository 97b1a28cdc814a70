"""The paper's Lemma, Assumption, Theorem and Corollary, on random matrices."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from banach.diagnose import Linearised, conditioning, corollary, identity, lemma, theorem
from problems import normal


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
