"""Coupled samples: one residual for the whole batch, and all stop together."""

from __future__ import annotations

import pytest
import torch

from banach import Anderson, Broyden, Picard, Solver, Status, Tolerance, solve
from problems import affine, distance, mixed_rates, normal

SOLVERS: list[Solver] = [Picard(), Picard(0.5), Anderson(), Broyden()]
solvers = pytest.mark.parametrize("solver", SOLVERS, ids=repr)


@solvers
@pytest.mark.parametrize("every", [1, 4])
def test_coupled_samples_stop_as_one(solver: Solver, every: int) -> None:
    p = affine(batch=5)
    tolerance = Tolerance(atol=1e-8, max_steps=200, check_every=every)
    found = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance, coupled=True)
    assert len(found.steps.unique()) == len(found.residual.unique()) == 1
    assert found.status == (Status.CONVERGED,) * 5
    assert found.steps.shape == found.residual.shape == found.converged.shape == (5,)
    assert distance(found.value, p.solution) < 1e-6


def test_coupled_residual_is_over_the_whole_batch() -> None:
    # T(z) = q z + b, so the residual of evaluation k is q^(k-1) b, entry by entry.
    p = mixed_rates(batch=6, high=0.8)
    q, b = p.inputs
    expected = [float((q ** (k - 1) * b).square().mean().sqrt()) for k in range(1, 100)]
    n = next(k for k, size in enumerate(expected, 1) if size <= 1e-6)
    found = solve(
        p.T, p.z0, inputs=p.inputs, tolerance=Tolerance(atol=1e-6, max_steps=99), coupled=True, record=True
    )
    assert found.steps.tolist() == [n] * 6
    assert found.trace is not None
    assert found.trace.shape == (n, 6)
    torch.testing.assert_close(found.trace[:, 0], torch.tensor(expected[:n]).to(q), rtol=1e-5, atol=1e-14)


@solvers
def test_coupled_maps_that_mix_the_batch(solver: Solver) -> None:
    # T(z) = z/4 + mean over the batch / 2 + x: solved sample by sample, mean first.
    x = normal(6, 3)
    mean = 4 * x.mean(0)
    solution = (mean / 2 + x) / 0.75
    found = solve(
        lambda z: z / 4 + z.mean(0) / 2 + x,
        torch.zeros_like(x),
        solver,
        coupled=True,
        tolerance=Tolerance(max_steps=100),
    )
    assert found.converged.all()
    assert distance(found.value, solution) < 1e-3


def test_coupled_leaves_need_not_share_an_axis() -> None:
    z0 = {"pixels": torch.zeros(6, 2), "shared": torch.zeros(3)}
    found = solve(
        lambda z: {"pixels": z["pixels"] / 2 + z["shared"].sum(), "shared": z["shared"] / 2 + 1}, z0, coupled=True
    )
    assert found.converged.all()
    assert found.value["shared"].sum() == pytest.approx(6, abs=1e-2)


def test_a_lone_vector_is_a_batch_of_numbers_unless_coupled() -> None:
    b = torch.tensor([1.0, 100.0])
    apart = solve(lambda z: z / 2 + b, torch.zeros(2))
    assert apart.steps[0] < apart.steps[1]
    together = solve(lambda z: z / 2 + b, torch.zeros(2), coupled=True)
    assert together.steps[0] == together.steps[1]
