"""When a sample stops: the residual, the test, the steps, the budget and the trace."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from banach import (
    Anderson,
    Broyden,
    NotConverged,
    Picard,
    Solver,
    Status,
    Tolerance,
    solve,
)
from problems import mixed_rates, normal, translation

SOLVERS: list[Solver] = [Picard(), Picard(0.5), Anderson(), Broyden()]
solvers = pytest.mark.parametrize("solver", SOLVERS, ids=repr)


def halving(start: float = 1.0, n: int = 4) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """T(z) = z / 2: after k evaluations the residual is exactly start / 2^k, in every norm up to sqrt(n)."""
    return lambda z: z / 2, torch.full((1, n), start, dtype=torch.float64)


@pytest.mark.parametrize("n", range(1, 8))
def test_residual_is_that_of_the_iterate_before(n: int) -> None:
    T, z0 = halving()
    found = solve(T, z0, tolerance=Tolerance(atol=0, max_steps=n))
    assert found.value.unique().tolist() == [2.0**-n]
    assert found.residual.tolist() == [2.0**-n]
    assert found.steps.tolist() == [n]
    assert found.status == (Status.MAX_STEPS,)


def test_the_test_includes_equality() -> None:
    T, z0 = halving()
    found = solve(T, z0, tolerance=Tolerance(atol=2.0**-5))
    assert (found.steps.item(), found.status) == (5, (Status.CONVERGED,))
    assert solve(T, z0, tolerance=Tolerance(atol=2.0**-5 * (1 - 1e-9))).steps.item() == 6


def test_relative_part_is_relative_to_T() -> None:
    # T(z) = z/2 + 1 from 0: z_k = 2 - 2^(1-k), residual 2^(1-k) at evaluation k, |T(z)| = 2 - 2^(1-k).
    rtol = 0.4
    first = next(k for k in range(1, 50) if 2.0 ** (1 - k) <= rtol * (2 - 2.0 ** (1 - k)))
    found = solve(lambda z: z / 2 + 1, torch.zeros(2, 4), tolerance=Tolerance(atol=0, rtol=rtol))
    assert found.steps.tolist() == [first, first]
    assert found.residual.tolist() == [2.0 ** (1 - first)] * 2
    both = solve(lambda z: z / 2 + 1, torch.zeros(2, 4), tolerance=Tolerance(atol=2.0**-2, rtol=rtol))
    assert (
        both.steps.tolist()
        == [next(k for k in range(1, 50) if 2.0 ** (1 - k) <= 0.25 + rtol * (2 - 2.0 ** (1 - k)))] * 2
    )


@solvers
def test_zero_tolerance_is_met_by_an_exact_hit_alone(solver: Solver) -> None:
    found = solve(lambda z: torch.full_like(z, 3.0), torch.zeros(2, 3), solver, tolerance=Tolerance(atol=0))
    assert found.status == (Status.CONVERGED,) * 2
    assert (found.value == 3).all()
    assert found.residual.tolist() == [0.0, 0.0]


@solvers
@pytest.mark.parametrize("record", [False, True])
def test_no_step_at_all(solver: Solver, record: bool) -> None:
    z0 = normal(3, 4)

    def T(z: Tensor) -> Tensor:
        raise AssertionError("max_steps=0 evaluates nothing")

    found = solve(T, z0, solver, tolerance=Tolerance(max_steps=0), record=record)
    assert torch.equal(found.value, z0)
    assert found.residual.tolist() == [math.inf] * 3
    assert found.steps.tolist() == [0, 0, 0]
    assert found.status == (Status.MAX_STEPS,) * 3
    assert not found.converged.any()
    assert (found.trace is not None) is record
    assert found.trace is None or found.trace.shape == (0, 3)


@solvers
def test_max_steps_returns_the_last_iterate(solver: Solver) -> None:
    p = translation()
    seen: list[Tensor] = []
    found = solve(
        p.T,
        p.z0,
        solver,
        inputs=p.inputs,
        tolerance=Tolerance(max_steps=17),
        on_step=lambda k, z: seen.append(z),
    )
    assert found.status == (Status.MAX_STEPS,) * 3
    assert found.steps.tolist() == [17] * 3
    assert torch.equal(found.value, seen[-1])
    assert len(seen) == 17


@pytest.mark.parametrize("every", [1, 2, 3, 7, 0])
def test_steps_are_exact_whatever_check_every(every: int) -> None:
    # Residual of sample i at evaluation k: q^(k-1) |b|; so the step it meets 1e-6 is known beforehand.
    p = mixed_rates(batch=8, high=0.8)
    q, b = p.inputs
    size = b.square().mean(1).sqrt()
    expected = [
        next(k for k in range(1, 200) if float(q[i]) ** (k - 1) * float(size[i]) <= 1e-6) for i in range(8)
    ]
    calls: list[int] = []

    def T(z: Tensor, q: Tensor, b: Tensor) -> Tensor:
        calls.append(1)
        return p.T(z, q, b)

    tolerance = Tolerance(atol=1e-6, max_steps=100, check_every=every)
    found = solve(T, p.z0, inputs=p.inputs, tolerance=tolerance, record=True)
    assert found.steps.tolist() == expected
    needed = max(expected)
    assert len(calls) == (100 if not every else math.ceil(needed / every) * every)
    assert found.trace is not None
    assert found.trace.shape == (needed, 8), "trimmed to the longest sample, whatever the loop ran"


def test_trace_holds_what_happened() -> None:
    p = mixed_rates(batch=6, high=0.7)
    q, b = p.inputs
    found = solve(p.T, p.z0, inputs=p.inputs, tolerance=Tolerance(atol=1e-6), record=True)
    assert found.trace is not None
    size = b.square().mean(1).sqrt()
    for i, n in enumerate(found.steps.tolist()):
        expected = size[i] * q[i] ** torch.arange(n, dtype=q.dtype)
        torch.testing.assert_close(found.trace[:n, i], expected, rtol=1e-5, atol=1e-15)
        assert (found.trace[n:, i] == found.trace[n - 1, i]).all()
    assert torch.equal(found.trace[-1], found.residual)


def test_on_step_sees_every_iterate_in_the_latents_own_type() -> None:
    seen: list[tuple[int, Tensor]] = []
    z0 = torch.ones(2, 3, dtype=torch.bfloat16)
    solve(lambda z: z / 2, z0, tolerance=Tolerance(atol=0, max_steps=3), on_step=lambda k, z: seen.append((k, z)))
    assert [k for k, _ in seen] == [1, 2, 3]
    assert [z.dtype for _, z in seen] == [torch.bfloat16] * 3
    assert [z.unique().item() for _, z in seen] == [0.5, 0.25, 0.125]


def test_throw_says_why_and_keeps_the_solution() -> None:
    p = mixed_rates(batch=4)
    tolerance = Tolerance(atol=1e-6, max_steps=12)
    with pytest.raises(NotConverged, match="3 of 4 samples: stopped at max_steps") as caught:
        solve(p.T, p.z0, inputs=p.inputs, tolerance=tolerance, throw=True)
    found = caught.value.solution
    assert found.converged.tolist() == [True, False, False, False]
    assert solve(p.T, p.z0, inputs=p.inputs, tolerance=Tolerance(max_steps=500), throw=True).converged.all()


def test_solve_records_no_gradient() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    modes: list[bool] = []

    def T(z: Tensor, x: Tensor) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return z / 2 + x

    found = solve(T, torch.zeros(2, 3, requires_grad=True), inputs=(x,))
    assert not any(modes)
    assert not found.value.requires_grad


def test_solve_leaves_the_start_alone() -> None:
    z0 = torch.zeros(4, 3)
    p = mixed_rates(4, 3, dtype=torch.float32)
    for solver in SOLVERS:
        for compact in (False, True):
            solve(p.T, z0, solver, inputs=p.inputs, compact=compact, tolerance=Tolerance(max_steps=40))
            assert (z0 == 0).all()
