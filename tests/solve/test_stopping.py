"""When a sample stops: the norms, the test, the steps and the budget; what `throw` says."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import RMS, Euclidean, NotConverged, Solver, Status, Tolerance, WorstPixel, solve
from banach.solve import Norm
from contracts import solvers
from problems import mixed_rates, normal

IMAGE, VECTOR, NUMBER = normal(2, 3, 4, 4), normal(2, 7, seed=1), normal(2, seed=2)
FLAT = torch.cat([IMAGE.flatten(1), VECTOR, NUMBER[:, None]], 1)
PIXEL = IMAGE.square().sum(1).sqrt().amax((1, 2))
NEST = {"image": IMAGE, "vector": VECTOR, "number": NUMBER}


@pytest.mark.parametrize(
    ("norm", "x", "expected"),
    [
        (RMS(), IMAGE, IMAGE.square().mean((1, 2, 3)).sqrt()),
        (Euclidean(), IMAGE, IMAGE.square().sum((1, 2, 3)).sqrt()),
        (WorstPixel(), IMAGE, PIXEL),
        (WorstPixel(), VECTOR, VECTOR.square().sum(1).sqrt()),
        (RMS(), NEST, FLAT.square().mean(1).sqrt()),
        (Euclidean(), NEST, FLAT.square().sum(1).sqrt()),
        (WorstPixel(), NEST, torch.stack([PIXEL, VECTOR.square().sum(1).sqrt(), NUMBER.abs()]).amax(0)),
    ],
)
def test_norms(norm: Norm, x: Any, expected: Tensor) -> None:
    zero = {name: torch.zeros_like(part) for name, part in x.items()} if x is NEST else torch.zeros_like(x)
    found = solve(lambda z: x, zero, tolerance=Tolerance(max_steps=1, norm=norm))
    torch.testing.assert_close(found.residual, expected)


class Scalar(Euclidean):
    """One number for all rows: the axis was forgotten."""

    def measure(self, rows: Tensor, space: Any) -> Tensor:
        return rows.norm()


class Long(Euclidean):
    """Computed in float64."""

    def measure(self, rows: Tensor, space: Any) -> Tensor:
        return rows.double().norm(dim=1)


@pytest.mark.parametrize("every", [0, 1, 4])
def test_a_norm_that_a_user_writes(every: int) -> None:
    rate, start = torch.linspace(0.1, 0.8, 5)[:, None], torch.ones(5, 3)
    with pytest.raises(ValueError, match=r"one number for each of 5 rows, got shape \(\)"):
        solve(lambda z: rate * z, start, tolerance=Tolerance(norm=Scalar(), check_every=every))
    found = [
        solve(lambda z: rate * z, start, record=True, tolerance=Tolerance(norm=norm, check_every=every))
        for norm in (Euclidean(), Long())
    ]
    assert found[0].converged.all()
    for other in found[1:]:
        torch.testing.assert_close(other.trace, found[0].trace)
        torch.testing.assert_close(other.value, found[0].value)


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
def test_no_step_at_all(solver: Solver) -> None:
    z0 = normal(3, 4)

    def T(z: Tensor) -> Tensor:
        raise AssertionError("max_steps=0 evaluates nothing")

    found: Any = solve(T, z0, solver, tolerance=Tolerance(max_steps=0), record=True)
    assert torch.equal(found.value, z0)
    assert found.residual.tolist() == [math.inf] * 3
    assert found.steps.tolist() == [0, 0, 0]
    assert found.status == (Status.MAX_STEPS,) * 3
    assert not found.converged.any()
    assert found.trace.shape == (0, 3)
    assert solve(T, z0, solver, tolerance=Tolerance(max_steps=0)).trace is None


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
