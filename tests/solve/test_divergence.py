"""A diverging sample is NONFINITE on every path, also where the norm of T(z) overflows before the residual's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from banach import (
    Anderson,
    Broyden,
    Picard,
    Solution,
    Solver,
    Status,
    Tolerance,
    solve,
)

SOLVERS: list[Solver] = [Picard(), Picard(0.2), Anderson(), Broyden()]
solvers = pytest.mark.parametrize("solver", SOLVERS, ids=repr)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
WAYS: dict[str, dict[str, Any]] = {
    "each step": {},
    "every 7": {"check_every": 7},
    "never": {"check_every": 0},
    "compact": {"compact": True},
    "compact, every 7": {"compact": True, "check_every": 7},
}


def T(z: Tensor, g: Tensor) -> Tensor:
    """g |z| + 1: for g > 1 without a fixed point, so no solver can find one."""
    return g * z.abs() + 1


def gains(dtype: torch.dtype) -> Tensor:
    """Two that contract, and forty that leave the finite numbers at many different steps."""
    return torch.cat([torch.tensor([0.3, 0.5]), 2.45 + 0.05 * torch.arange(40)]).to(dtype)[:, None].expand(-1, 8)


def found(solver: Solver, way: str, dtype: torch.dtype) -> Solution:
    how = dict(WAYS[way])
    steps = 80 if dtype == torch.float32 else 800
    tolerance = Tolerance(max_steps=steps, check_every=how.pop("check_every", 1))
    g = gains(dtype)
    return solve(T, torch.zeros_like(g), solver, inputs=(g,), tolerance=tolerance, **how)


@solvers
@dtypes
@pytest.mark.parametrize("way", WAYS)
def test_every_path_says_nonfinite(solver: Solver, way: str, dtype: torch.dtype) -> None:
    here, plain = found(solver, way, dtype), found(solver, "never", dtype)
    assert here.status == (Status.CONVERGED,) * 2 + (Status.NONFINITE,) * 40
    assert here.steps.tolist() == plain.steps.tolist()
    torch.testing.assert_close(here.value, plain.value)
    assert (Status.NONFINITE in here.failures) == (way != "never"), "without checks the host does not know"
    g = gains(dtype)
    residual = (T(here.value, g) - here.value).double().square().mean(1).sqrt()[2:]
    torch.testing.assert_close(here.residual[2:].double(), residual)
    assert (residual <= 1.0001).all(), "no worse than z0, whose residual is 1"


@pytest.mark.parametrize("every", [1, 3, 0])
def test_a_sample_that_is_not_finite_is_not_called_diverged_as_well(every: int) -> None:
    """By a relative tolerance T(z) overflows while the residual is finite: host checks and the device differed."""
    g = gains(torch.float32)
    tolerance = Tolerance(atol=0, rtol=1e-5, max_steps=200, check_every=every)
    here = solve(T, torch.zeros_like(g), Picard(0.3), inputs=(g,), tolerance=tolerance)
    assert here.status == (Status.CONVERGED,) * 2 + (Status.NONFINITE,) * 40
    assert here.diverged is not None
    assert not bool(here.diverged.any())
