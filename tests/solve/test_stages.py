"""A solve in stages is the solve: the same iterates, residuals and ends, whatever the stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from banach.solve import Anderson, Broyden, Picard, Solver, Tolerance, solve
from banach.solve.loop import stage

SLOPES = torch.tensor([0.1, 0.5, 0.8, 0.95], dtype=torch.float64)
TOLERANCE = Tolerance(atol=1e-4, max_steps=12)


def T(u: Tensor, v: Tensor) -> Tensor:
    """Each sample contracts at its own rate, and not linearly."""
    return v + SLOPES[: len(u), None] * torch.tanh(u).roll(1, 1)


def data(count: int = 4) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("cuts", [(12,), (1, 12), (3, 7, 12), (5, 6, 12)])
@pytest.mark.parametrize("solver", [Picard(), Picard(damping=0.3), Anderson(3), Broyden(4)], ids=str)
def test_stages_are_the_solve(solver: Solver, cuts: tuple[int, ...]) -> None:
    v = data()
    wanted = solve(T, torch.zeros_like(v), solver, inputs=(v,), tolerance=TOLERANCE)
    z, begin = torch.zeros_like(v), 0
    carried: tuple[Tensor, ...] = ()
    for end in cuts:
        found, carried = stage(T, z, solver, range(begin, end), inputs=(v,), tolerance=TOLERANCE, carried=carried)
        z, begin = found.value, end
    torch.testing.assert_close(found.value, wanted.value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.residual, wanted.residual, rtol=1e-9, atol=1e-15)
    assert torch.equal(found.steps, wanted.steps)
    assert torch.equal(found.converged, wanted.converged)
    assert 0 < int(wanted.converged.sum()) < 4  # some stop early, and stay where they are


@pytest.mark.parametrize("solver", [Anderson(3), Broyden(4)], ids=str)
def test_some_samples_can_go_on_alone(solver: Solver) -> None:
    v, then = data(3), range(4, 9)
    whole, carried = stage(T, torch.zeros_like(v), solver, range(4), inputs=(v,), tolerance=TOLERANCE)
    both, _ = stage(T, whole.value, solver, then, inputs=(v,), tolerance=TOLERANCE, carried=carried)
    few = tuple(part[:2] for part in carried)
    alone, _ = stage(T, whole.value[:2], solver, then, inputs=(v[:2],), tolerance=TOLERANCE, carried=few)
    torch.testing.assert_close(alone.value, both.value[:2], rtol=1e-12, atol=1e-12)
    assert torch.equal(alone.steps, both.steps[:2])
