"""When a sample stops: the residual, the test, the steps, the budget and the trace."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from banach import NotConverged, Solver, Status, Tolerance, solve
from contracts import solvers
from problems import mixed_rates, normal, translation


@pytest.mark.parametrize(
    ("atol", "max_steps", "steps", "status"),
    [
        *((0.0, n, n, Status.MAX_STEPS) for n in range(1, 6)),
        (2.0**-5, 50, 5, Status.CONVERGED),  # the test includes equality
        (2.0**-5 * (1 - 1e-9), 50, 6, Status.CONVERGED),
        (1e300, 50, 1, Status.CONVERGED),  # beyond the numbers of float32
    ],
)
def test_residual_is_that_of_the_iterate_before(atol: float, max_steps: int, steps: int, status: Status) -> None:
    # T(z) = z / 2 from 1: after k evaluations the residual is exactly 2^-k.
    z0 = torch.ones(1, 4, dtype=torch.float32 if atol > 1 else torch.float64)
    found = solve(lambda z: z / 2, z0, tolerance=Tolerance(atol=atol, max_steps=max_steps))
    assert found.value.unique().tolist() == found.residual.tolist() == [2.0**-steps]
    assert (found.steps.tolist(), found.status) == ([steps], (status,))


@pytest.mark.parametrize("atol", [0.0, 0.25])
def test_relative_part_is_relative_to_T(atol: float) -> None:
    # T(z) = z/2 + 1 from 0: z_k = 2 - 2^(1-k), residual 2^(1-k) at evaluation k, |T(z)| = 2 - 2^(1-k).
    first = next(k for k in range(1, 50) if 2.0 ** (1 - k) <= atol + 0.4 * (2 - 2.0 ** (1 - k)))
    found = solve(lambda z: z / 2 + 1, torch.zeros(2, 4), tolerance=Tolerance(atol=atol, rtol=0.4))
    assert found.steps.tolist() == [first, first]
    assert found.residual.tolist() == [2.0 ** (1 - first)] * 2


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
    tolerance = Tolerance(max_steps=17)
    found = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance, on_step=lambda k, z: seen.append(z))
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
    trace = size * q.T ** torch.arange(200, dtype=q.dtype)[:, None]
    expected = [1 + int((trace[:, i] <= 1e-6).nonzero()[0]) for i in range(8)]
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
    for i, n in enumerate(expected):
        torch.testing.assert_close(found.trace[:n, i], trace[:n, i], rtol=1e-5, atol=1e-15)
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
