"""NaN, overflow, divergence: reported for the samples that have them, the best iterate kept, others untouched."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import Anderson, Solution, Solver, Status, Tolerance, solve
from contracts import SOLVERS, close, replay, rms, select_solution, solvers
from problems import affine, turns_nan

compacts = pytest.mark.parametrize("compact", [False, True], ids=["freeze", "compact"])
BAD = (1, 4)


@pytest.mark.parametrize("solver", [*SOLVERS, Anderson(memory=2)], ids=repr)
@compacts
@pytest.mark.parametrize("every", [1, 3, 0])
def test_the_best_finite_iterate_survives(solver: Solver, compact: bool, every: int) -> None:
    p, clean = turns_nan(bad=BAD), affine(batch=6)
    tolerance = Tolerance(atol=1e-8, max_steps=60, check_every=every)
    seen = replay(p, solver, tolerance, compact=compact)
    found: Any = seen.solution
    assert list(found.status) == [Status.NONFINITE if i in BAD else Status.CONVERGED for i in range(6)]
    for i in BAD:
        own = torch.stack([rms(p.closed(z) - z)[i] for z in seen.iterates])
        first_bad = int((~own.isfinite()).nonzero()[0])
        assert found.steps[i] == first_bad + 1, "the evaluation that gave NaN is the last one counted"
        best = int(own[:first_bad].argmin())
        assert torch.equal(found.value[i], seen.iterates[best][i])
        torch.testing.assert_close(found.residual[i], own[best])
        assert found.trace[:first_bad, i].isfinite().all()
        assert not found.trace[first_bad:, i].isfinite().any()
    assert p.closed(found.value).isfinite().all(), "T is finite at what is returned, so attach is too"
    untouched = solve(clean.T, clean.z0, solver, inputs=clean.inputs, tolerance=tolerance)
    for i in (0, 2, 3, 5):
        close(select_solution(found, i), select_solution(untouched, i), 1e-8)


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
@pytest.mark.parametrize("coupled", [False, True])
def test_never_finite_gives_the_start_back(solver: Solver, bad: float, coupled: bool) -> None:
    x = torch.tensor([[0.5], [bad]])
    found = solve(lambda z: 0 * z + x, torch.full((2, 3), 7.0), solver, coupled=coupled)
    assert found.status == (Status.NONFINITE if coupled else Status.CONVERGED, Status.NONFINITE)
    assert (found.value[1] == 7).all()
    assert found.residual[1] == math.inf
    assert found.steps[1] == 1
    assert not found.converged[1]


@pytest.mark.parametrize("rtol", [0.0, 0.5])
def test_infinity_below_infinity_is_no_convergence(rtol: float) -> None:
    found = solve(lambda z: z + math.inf, torch.zeros(2, 2), tolerance=Tolerance(rtol=rtol))
    assert found.status == (Status.NONFINITE,) * 2
    assert not found.converged.any()


def grow(z: Tensor, g: Tensor) -> Tensor:
    """g |z| + 1: for g > 1 without a fixed point, so no solver can find one."""
    return g * z.abs() + 1


def gains(dtype: torch.dtype) -> Tensor:
    """Two that contract, and forty that leave the finite numbers at many different steps."""
    return torch.cat([torch.tensor([0.3, 0.5]), 2.45 + 0.05 * torch.arange(40)]).to(dtype)[:, None].expand(-1, 8)


def diverging(solver: Solver, dtype: torch.dtype, compact: bool, **tolerance: Any) -> Solution:
    g, steps = gains(dtype), 200 if dtype == torch.float32 else 800
    how = Tolerance(max_steps=steps, **tolerance)
    return solve(grow, torch.zeros_like(g), solver, inputs=(g,), tolerance=how, compact=compact)


ENDS = (Status.CONVERGED,) * 2 + (Status.NONFINITE,) * 40


@solvers
@pytest.mark.parametrize("tolerance", [{}, {"atol": 0, "rtol": 1e-5}], ids=["absolute", "relative"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_path_says_nonfinite(solver: Solver, dtype: torch.dtype, tolerance: dict[str, Any]) -> None:
    """Also where the norm of T(z) overflows before that of the residual, which host checks called diverged."""
    plain, g = diverging(solver, dtype, False, check_every=0, **tolerance), gains(dtype)
    for every, compact in ((1, False), (7, False), (0, False), (1, True), (7, True)):
        here = diverging(solver, dtype, compact, check_every=every, **tolerance)
        assert here.status == ENDS
        assert not here.diverged.any()
        assert here.steps.tolist() == plain.steps.tolist()
        torch.testing.assert_close(here.value, plain.value)
        assert (Status.NONFINITE in here.failures) == (every > 0), "without checks the host does not know"
        residual = rms(grow(here.value, g) - here.value)[2:]
        torch.testing.assert_close(here.residual[2:].double(), residual)
        assert (residual <= 1.0001).all(), "no worse than z0, whose residual is 1"


@pytest.mark.parametrize("every", [1, 3, 0])
def test_the_best_iterate_of_an_iteration_that_diverges(every: int) -> None:
    """Contracts first, then leaves: |r_k| falls to a least value and grows again."""
    rate = torch.tensor([[0.5, 1.6], [0.5, 0.4]])
    tolerance = Tolerance(atol=1e-9, max_steps=25, check_every=every)
    start = torch.tensor([[1.0, 1e-5], [1.0, 1e-5]])
    found: Any = solve(lambda z: rate * z, start, tolerance=tolerance, record=True)
    assert found.diverged.tolist() == [True, False]
    least = found.trace[:, 0].argmin()
    assert torch.allclose(found.value[0], rate[0] ** int(least) * start[0])
    assert torch.equal(found.residual[0], found.trace[:, 0].min())
    assert torch.allclose(found.value[1], rate[1] ** 25 * start[1])
    assert found.status == (Status.MAX_STEPS,) * 2


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 1e20), (torch.bfloat16, 1e20), (torch.float64, 1e155)]
)
def test_a_norm_that_overflows_is_not_taken_for_a_map_that_does(dtype: torch.dtype, size: float) -> None:
    found = solve(lambda z: z / 2 + size, torch.zeros(2, 3, dtype=dtype))
    assert found.status == (Status.NONFINITE,) * 2
    assert found.value.isfinite().all()
    assert "values so large that their norm overflows" in found.summary()
    assert "check the data for NaN and its size" in found.summary()
