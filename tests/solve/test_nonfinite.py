"""NaN and overflow: reported for the sample that has them, the best finite iterate kept, the others untouched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import (
    Anderson,
    Broyden,
    ConvergenceWarning,
    Euclidean,
    Picard,
    Solver,
    Status,
    Tolerance,
    fixed_point,
    solve,
)
from contracts import close, replay, rms, select_solution
from problems import Problem, affine, overflows, turns_nan

SOLVERS: list[Solver] = [Picard(), Picard(0.5), Anderson(), Anderson(memory=2), Broyden()]
solvers = pytest.mark.parametrize("solver", SOLVERS, ids=repr)
compacts = pytest.mark.parametrize("compact", [False, True], ids=["freeze", "compact"])
BAD = (1, 4)


@solvers
@compacts
@pytest.mark.parametrize("every", [1, 3, 0])
def test_the_best_finite_iterate_survives(solver: Solver, compact: bool, every: int) -> None:
    p = turns_nan(bad=BAD)
    tolerance = Tolerance(atol=1e-8, max_steps=60, check_every=every)
    seen = replay(p, solver, tolerance, compact=compact)
    found = seen.solution
    expected = [Status.NONFINITE if i in BAD else Status.CONVERGED for i in range(6)]
    assert list(found.status) == expected
    for i in BAD:
        own = torch.stack([rms(p.closed(z) - z)[i] for z in seen.iterates])
        first_bad = int((~own.isfinite()).nonzero()[0])
        assert found.steps[i] == first_bad + 1, "the evaluation that gave NaN is the last one counted"
        best = int(own[:first_bad].argmin())
        assert torch.equal(found.value[i], seen.iterates[best][i])
        torch.testing.assert_close(found.residual[i], own[best])
    assert p.closed(found.value).isfinite().all(), "T is finite at what is returned, so attach is too"


@solvers
@compacts
def test_the_other_samples_are_not_touched(solver: Solver, compact: bool) -> None:
    p, good = turns_nan(bad=BAD), affine(batch=6)
    tolerance = Tolerance(atol=1e-8, max_steps=60)
    found = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance, compact=compact)
    clean = solve(good.T, good.z0, solver, inputs=good.inputs, tolerance=tolerance)
    for i in (0, 2, 3, 5):
        close(select_solution(found, i), select_solution(clean, i), 1e-8)


@solvers
@compacts
@pytest.mark.parametrize("every", [1, 3])
def test_T_never_sees_nan_after_a_check(solver: Solver, compact: bool, every: int) -> None:
    p = turns_nan(bad=BAD)
    finite: list[bool] = []

    def T(z: Tensor, *inputs: Tensor) -> Tensor:
        finite.append(bool(z.isfinite().all()))
        return p.T(z, *inputs)

    tolerance = Tolerance(atol=1e-10, max_steps=60, check_every=every)
    solve(T, p.z0, solver, inputs=p.inputs, tolerance=tolerance, compact=compact)
    assert all(finite[::every])
    assert every == 1 or not all(finite), "between checks NaN may pass: otherwise this test tests nothing"


@solvers
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_never_finite_gives_the_start_back(solver: Solver, bad: float) -> None:
    z0 = torch.full((2, 3), 7.0)
    x = torch.tensor([[0.5], [bad]])
    found = solve(lambda z, x: 0 * z + x, z0, solver, inputs=(x,))
    assert found.status == (Status.CONVERGED, Status.NONFINITE)
    assert (found.value[1] == 7).all()
    assert found.residual[1] == math.inf
    assert found.steps[1] == 1
    assert not found.converged[1]


@solvers
@pytest.mark.parametrize("rtol", [0.0, 1e-3])
def test_overflow(solver: Solver, rtol: float) -> None:
    # T(z) = z^2 + x with x > 1: for Picard every residual is larger than the one before, so z0 is the best.
    p = overflows()
    found = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=Tolerance(rtol=rtol, max_steps=200))
    assert found.status == (Status.NONFINITE,) * 3
    assert found.residual.isfinite().all()
    assert p.closed(found.value).isfinite().all()
    if solver == Picard():
        assert torch.equal(found.value, p.z0)
        torch.testing.assert_close(found.residual.double(), rms(p.inputs[0]))


@pytest.mark.parametrize("rtol", [0.0, 0.5])
def test_infinity_below_infinity_is_no_convergence(rtol: float) -> None:
    found = solve(lambda z: z + math.inf, torch.zeros(2, 2), tolerance=Tolerance(rtol=rtol))
    assert found.status == (Status.NONFINITE,) * 2
    assert not found.converged.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_norm_of_T_that_overflows_before_the_residual_is_no_convergence(dtype: torch.dtype) -> None:
    # T(z) = 2 z + 1 diverges, and |T(z)| passes the largest number one step before |T(z) - z| does.
    tolerance = Tolerance(rtol=1e-3, max_steps=2000, norm=Euclidean())
    found = solve(lambda z: 2 * z + 1, torch.zeros(2, 3, dtype=dtype), tolerance=tolerance)
    assert found.status == (Status.NONFINITE,) * 2
    assert not found.converged.any()
    assert (found.value == 0).all()
    assert found.failures == {Status.NONFINITE}


def test_inf_and_nan_in_the_trace_end_it() -> None:
    p = turns_nan(bad=(1,), batch=3)
    found = solve(p.T, p.z0, inputs=p.inputs, tolerance=Tolerance(atol=1e-9, max_steps=80), record=True)
    assert found.trace is not None
    n = int(found.steps[1])
    assert found.trace[: n - 1, 1].isfinite().all()
    assert not found.trace[n - 1 :, 1].isfinite().any()
    assert found.trace[:, [0, 2]].isfinite().all()


@solvers
def test_coupled_samples_fall_together(solver: Solver) -> None:
    x = torch.tensor([[1.0], [math.nan]])
    found = solve(lambda z: z / 2 + x, torch.ones(2, 1), solver, coupled=True)
    assert found.status == (Status.NONFINITE,) * 2
    assert (found.value == 1).all()


def test_a_diverging_map_is_never_returned_silently() -> None:
    with pytest.warns(ConvergenceWarning, match="T gave NaN or infinity"):
        fixed_point(lambda z: z * z + 2, torch.ones(2, 2))


@compacts
def test_samples_that_fail_one_after_another(compact: bool) -> None:
    """Sample i turns NaN at evaluation i + 2: each is scrubbed at its own check, also when others have left."""
    limit = torch.arange(8, dtype=torch.float64)[:, None]
    finite: list[bool] = []

    def T(z: Tensor, limit: Tensor) -> Tensor:
        finite.append(bool(z.isfinite().all()))
        return torch.where(z > limit, torch.nan, z + 1)

    p = Problem("staircase", T, torch.zeros(8, 1, dtype=torch.float64), (limit,), None)
    found = solve(p.T, p.z0, inputs=p.inputs, compact=compact)
    assert found.status == (Status.NONFINITE,) * 8
    assert found.steps.tolist() == [i + 2 for i in range(8)]
    assert (found.value == 0).all(), "all residuals are 1: the first is kept"
    assert all(finite)


def test_a_nest_keeps_the_best_of_every_part() -> None:
    def T(z: dict[str, Any]) -> dict[str, Any]:
        a, b = z["a"] / 2 + 1, z["b"] / 2
        return {"b": torch.where(a[:, 0] > 1.9, torch.nan, b), "a": a}

    z0 = {"a": torch.zeros(2, 3), "b": torch.ones(2)}
    found = solve(T, z0)
    assert found.status == (Status.NONFINITE,) * 2
    assert found.value["a"].unique().tolist() == [1.75]  # from 1.875 T gives 1.9375, beyond 1.9
    assert found.value["b"].unique().tolist() == [0.125]
