"""Anderson without a bound on its coefficients: accelerated as with a large one, its other safeguards in force."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from banach import Anderson, Implicit, Tolerance, fixed_point, solve
from banach.solve import Point


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinity_is_no_bound(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    A: Any = torch.linalg.qr(torch.randn(12, 12, generator=draw, dtype=dtype))[0]
    A, b = A @ torch.diag(torch.linspace(-0.95, 0.95, 12, dtype=dtype)) @ A.T, torch.ones(3, 12, dtype=dtype)
    tolerance = Tolerance(atol=1e-5, max_steps=400)
    steps = {
        bound: solve(lambda z: z @ A + b, torch.zeros_like(b), Anderson(12, bound=bound), tolerance=tolerance)
        for bound in (1e4, math.inf)
    }
    assert steps[math.inf].steps.tolist() == steps[1e4].steps.tolist()
    exact = torch.linalg.solve(torch.eye(12, dtype=dtype) - A, b.T).T
    torch.testing.assert_close(steps[math.inf].value, exact, rtol=1e-2, atol=1e-2)
    assert int(steps[math.inf].steps.max()) < 40  # Picard needs some 240


@pytest.mark.parametrize(
    ("c", "residual", "least_at", "trusted"),
    [
        ([1e30, -1e30], 1.0, 20, True),
        ([torch.inf, 0.0], 1.0, 20, False),
        ([torch.nan, 0.0], 1.0, 20, False),
        ([0.5, 0.5], 11.0, 20, False),  # has grown
        ([0.5, 0.5], 1.0, 9, False),  # no new least for too long
    ],
)
def test_the_other_safeguards_stay(c: list[float], residual: float, least_at: int, trusted: bool) -> None:
    z, number = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    at = Point(20, z, z, z, residual * number, number, least_at * number, 20)
    coefficients = torch.tensor(c, dtype=torch.float64).view(1, 2, 1)
    assert Anderson(2, bound=math.inf)._trusted(coefficients, at).tolist() == [trusted]


def test_as_a_method_of_implicit() -> None:
    a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    mode = Implicit(Anderson(bound=math.inf), Tolerance(atol=0, rtol=1e-12, max_steps=8))
    z = fixed_point(lambda z: a * z + 1, torch.zeros(1, 2, dtype=torch.float64), backward=mode,
                    solver=Anderson(bound=math.inf), tolerance=Tolerance(atol=1e-13, max_steps=8))  # fmt: skip
    z.sum().backward()
    assert a.grad is not None
    assert float(a.grad) == pytest.approx(2 / (1 - 0.5) ** 2, rel=1e-10)
