"""What each solver is for: damping, acceleration, safeguards, and a memory that does not grow."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from banach import Anderson, Broyden, Picard, Solver, Status, Tolerance, solve
from problems import (
    Problem,
    affine,
    averaged,
    constant,
    distance,
    normal,
    rotation,
    symmetric,
    tanh_network,
    translation,
)

ACCELERATED: list[Solver] = [
    Anderson(),
    Anderson(memory=1),
    Anderson(memory=12),
    Anderson(damping=0.4),
    Anderson(ridge=0.0),
    Broyden(),
    Broyden(memory=1),
    Broyden(memory=30),
]
accelerated = pytest.mark.parametrize("solver", ACCELERATED, ids=repr)


def mean_steps(p: Problem, solver: Solver, atol: float = 1e-8) -> float:
    found = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=Tolerance(atol=atol, max_steps=2000))
    assert set(found.status) == {Status.CONVERGED}, found.summary()
    assert distance(found.value, p.solution) < 1e3 * atol
    return float(found.steps.double().mean())


def keep(seen: list[Tensor]) -> Callable[[int, Tensor], None]:
    return lambda k, z: seen.append(z)


def test_picard_is_what_it_says() -> None:
    p = affine(batch=2)
    for damping in (0.0, 0.3):
        seen: list[Tensor] = []
        tolerance = Tolerance(atol=0, max_steps=5)
        solve(p.T, p.z0, Picard(damping), inputs=p.inputs, tolerance=tolerance, on_step=keep(seen))
        z = p.z0
        for found in seen:
            z = damping * z + (1 - damping) * p.closed(z)
            torch.testing.assert_close(found, z, rtol=0, atol=1e-15)


def test_only_damping_solves_an_averaged_map() -> None:
    p, tolerance = averaged(), Tolerance(atol=1e-10, max_steps=300)
    plain = solve(p.T, p.z0, Picard(), inputs=p.inputs, tolerance=tolerance)
    assert set(plain.status) == {Status.MAX_STEPS}
    assert distance(plain.value, p.solution) > 0.1
    damped = solve(p.T, p.z0, Picard(0.5), inputs=p.inputs, tolerance=tolerance)
    assert set(damped.status) == {Status.CONVERGED}
    assert distance(damped.value, p.solution) < 1e-9
    # A quarter turn damped by half shrinks every plane by |(1 + i) / 2| = 1 / sqrt 2 per step.
    assert int(damped.steps.max()) <= 2 * 36


def test_anderson_gains_on_a_symmetric_spectrum_and_nothing_on_a_rotation() -> None:
    p = symmetric()
    picard = mean_steps(p, Picard())
    assert mean_steps(p, Anderson(memory=5)) / picard <= 0.3
    assert mean_steps(p, Anderson(memory=5, bound=math.inf)) / picard <= 0.3
    assert mean_steps(p, Broyden()) / picard <= 0.3
    turn = rotation()
    picard = mean_steps(turn, Picard())
    for solver in (Anderson(memory=5), Broyden()):
        assert 0.8 < mean_steps(turn, solver) / picard < 1.2


@pytest.mark.parametrize("memory", [1, 2, 4])
def test_anderson_is_the_least_squares_extrapolation(memory: int) -> None:
    """Against the formula with a dense least-squares solve, sample by sample, before any safeguard acts."""
    p = tanh_network(batch=2, n=6)
    seen: list[Tensor] = [p.z0]
    solver, tolerance = Anderson(memory=memory, damping=0.25, ridge=0.0), Tolerance(atol=0, max_steps=6)
    solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance, on_step=keep(seen))
    residuals = [p.closed(z) - z for z in seen]
    for k in range(6):
        for i in range(2):
            past = range(max(0, k - memory), k)
            step = 0.75 * residuals[k][i]
            if past:
                dZ = torch.stack([seen[j + 1][i] - seen[j][i] for j in past], 1)
                dR = torch.stack([residuals[j + 1][i] - residuals[j][i] for j in past], 1)
                c = torch.linalg.lstsq(dR, residuals[k][i]).solution
                step = step - (dZ + 0.75 * dR) @ c
            torch.testing.assert_close(seen[k + 1][i], seen[k][i] + step, rtol=1e-6, atol=1e-9)


def test_broyden_is_the_dense_good_method() -> None:
    """Against Broyden's update of a dense inverse, before the first restart."""
    p = tanh_network(batch=1, n=6)
    seen: list[Tensor] = [p.z0]
    tolerance = Tolerance(atol=0, max_steps=8)
    solve(p.T, p.z0, Broyden(memory=10), inputs=p.inputs, tolerance=tolerance, on_step=keep(seen))
    H = -torch.eye(6, dtype=torch.float64)
    residuals = [(p.closed(z) - z)[0] for z in seen]
    for k in range(8):
        if k:
            dz, dr = (seen[k] - seen[k - 1])[0], residuals[k] - residuals[k - 1]
            H = H + torch.outer(dz - H @ dr, dz @ H) / (dz @ H @ dr)
        torch.testing.assert_close(seen[k + 1][0], seen[k][0] - H @ residuals[k], rtol=1e-7, atol=1e-11)


@accelerated
@pytest.mark.parametrize("max_steps", [1, 2, 3])
def test_a_few_steps(solver: Solver, max_steps: int) -> None:
    p = affine()
    found = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=Tolerance(max_steps=max_steps))
    assert found.steps.tolist() == [max_steps] * 3
    assert found.value.isfinite().all()


@pytest.mark.parametrize("solver", [*ACCELERATED, Anderson(bound=math.inf)], ids=repr)
def test_an_exact_hit(solver: Solver) -> None:
    p = constant()
    for z0, steps in ((p.z0, 2), (p.solution, 1)):
        for every in (0, 1):
            tolerance = Tolerance(atol=0, max_steps=200, check_every=every)
            found = solve(p.T, z0, solver, inputs=p.inputs, tolerance=tolerance)
            assert set(found.status) == {Status.CONVERGED}
            assert distance(found.value, p.solution) == 0
            assert solver == Anderson(damping=0.4) or found.steps.tolist() == [steps] * 3


@accelerated
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_translation_has_no_fixed_point_and_none_is_claimed(solver: Solver, dtype: torch.dtype) -> None:
    # Residuals differ by rounding alone: an unguarded secant jumps so far that z + x rounds to z.
    p = translation(dtype=dtype)
    for z0 in (p.z0, p.z0 + 0.1, p.z0 + 1e3):
        found = solve(p.T, z0, solver, inputs=p.inputs, tolerance=Tolerance(max_steps=100))
        assert set(found.status) == {Status.MAX_STEPS}
        assert found.value.isfinite().all()
        expected = p.inputs[0].square().mean(1).sqrt()
        torch.testing.assert_close(found.residual, expected, rtol=1e-2, atol=0)


KINKED = [Anderson(), Anderson(memory=2), Anderson(bound=math.inf), Broyden(), Broyden(memory=3)]


@pytest.mark.parametrize("solver", KINKED, ids=repr)
@pytest.mark.parametrize(("kink", "seed"), [(torch.relu, 9), (torch.abs, 5)], ids=["relu", "abs"])
def test_no_circling_on_a_kinked_contraction(solver: Solver, kink: Callable[[Tensor], Tensor], seed: int) -> None:
    """relu(W z + x) and |W z| - x, gamma = .95. Without patience up to one sample in six went round for ever."""
    W = normal(2, 2, seed=seed)
    W = 0.95 * (W + W.T) / torch.linalg.matrix_norm(W + W.T, 2)
    x = normal(200, 2, seed=100 + seed)
    T = (lambda z: kink(z @ W + x)) if kink is torch.relu else (lambda z: kink(z @ W) - x)
    found = solve(T, torch.zeros_like(x), solver, tolerance=Tolerance(atol=1e-9, max_steps=300))
    assert found.converged.all(), found.summary()
