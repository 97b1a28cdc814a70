"""A diverging sample is NONFINITE on every path, also where the norm of T(z) overflows before the residual's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import (
    Anderson,
    Broyden,
    ConvergenceWarning,
    ImplicitNetwork,
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


def by_hand(g: Tensor, steps: int) -> tuple[int, bool]:
    """Of undamped Picard: the first evaluation whose residual overflows, and did T(z) overflow before it?"""
    z, earlier = torch.zeros_like(g), False
    for k in range(1, steps + 1):
        Tz = g * z.abs() + 1
        if not torch.linalg.vector_norm(Tz - z).isfinite():
            return k, earlier
        earlier = not torch.linalg.vector_norm(Tz).isfinite()
        z = Tz
    raise AssertionError("it did not overflow")


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


@dtypes
@pytest.mark.parametrize("way", WAYS)
def test_steps_of_picard_by_hand(way: str, dtype: torch.dtype) -> None:
    g, here = gains(dtype), found(Picard(), way, dtype)
    expected = [by_hand(row, 800) for row in g[2:]]
    assert here.steps[2:].tolist() == [steps for steps, _ in expected]
    assert any(earlier for _, earlier in expected), "of some T(z) overflows first, or nothing is tested"
    assert (here.value[2:] == 0).all(), "the least residual is that of z0"


@solvers
@pytest.mark.parametrize("every", [0, 1, 7])
def test_coupled_samples_fall_together(solver: Solver, every: int) -> None:
    tolerance = Tolerance(max_steps=120, check_every=every)
    for g in gains(torch.float32)[2:32:5]:
        both = torch.stack([0 * g + 0.3, g])
        here = solve(T, torch.zeros_like(both), solver, inputs=(both,), tolerance=tolerance, coupled=True)
        assert here.status == (Status.NONFINITE,) * 2
        assert here.value.abs().max() < 100


@pytest.mark.parametrize("every", [1, 7])
def test_a_network_warns_of_all_of_them(every: int) -> None:
    class Grow(nn.Module):
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return T(u, v)

    tolerance = Tolerance(max_steps=80, check_every=every)
    net = ImplicitNetwork(nn.Identity(), Grow(), nn.Identity(), tolerance=tolerance)
    with pytest.warns(ConvergenceWarning, match="T gave NaN or infinity"):
        y = net(gains(torch.float32)[2:])
    assert y.abs().max() < 100
