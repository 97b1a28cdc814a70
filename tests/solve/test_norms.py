"""The norms: on one tensor, on a nest, and a norm that a user writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from banach import RMS, Euclidean, Tolerance, WorstPixel, solve
from banach.solve import Norm
from problems import normal

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
        (RMS(), NEST, FLAT.square().mean(1).sqrt()),
        (Euclidean(), NEST, FLAT.square().sum(1).sqrt()),
        (WorstPixel(), NEST, torch.stack([PIXEL, VECTOR.square().sum(1).sqrt(), NUMBER.abs()]).amax(0)),
    ],
)
def test_norms(norm: Norm, x: Any, expected: Tensor) -> None:
    zero = {name: torch.zeros_like(part) for name, part in x.items()} if x is NEST else torch.zeros_like(x)
    found = solve(lambda z: x, zero, tolerance=Tolerance(max_steps=1, norm=norm))
    torch.testing.assert_close(found.residual, expected)


@pytest.mark.parametrize(("norm", "size"), [(RMS(), 1.0), (Euclidean(), 4.0), (WorstPixel(), 4.0)], ids=repr)
def test_each_norm_stops_at_its_own_step(norm: Norm, size: float) -> None:
    # T(z) = z / 2 from ones: after k evaluations the residual is 2^-k in every entry.
    found = solve(lambda z: z / 2, torch.ones(1, 16), tolerance=Tolerance(atol=1e-3, norm=norm))
    assert found.steps.item() == next(k for k in range(1, 50) if size * 2.0**-k <= 1e-3)


class Scalar(Euclidean):
    """One number for all rows: the axis was forgotten."""

    def measure(self, rows: Tensor, space: Any) -> Tensor:
        return rows.norm()


class One(Euclidean):
    def measure(self, rows: Tensor, space: Any) -> Tensor:
        return rows.norm().view(1)


class Long(Euclidean):
    """Computed in float64."""

    def measure(self, rows: Tensor, space: Any) -> Tensor:
        return rows.double().norm(dim=1)


class Reusing(Euclidean):
    """Writes all its values into the same memory."""

    def measure(self, rows: Tensor, space: Any) -> Tensor:
        self.__dict__.setdefault("buffer", rows.new_empty(len(rows)))
        return torch.linalg.vector_norm(rows, dim=1, out=self.__dict__["buffer"])


@pytest.mark.parametrize("every", [0, 1, 4])
def test_a_norm_that_a_user_writes(every: int) -> None:
    rate, start = torch.linspace(0.1, 0.8, 5)[:, None], torch.ones(5, 3)
    for wrong in (Scalar(), One()):
        with pytest.raises(ValueError, match=r"one number for each of 5 rows, got shape \(1?,?\)"):
            solve(lambda z: rate * z, start, tolerance=Tolerance(norm=wrong, check_every=every))
    found = [
        solve(lambda z: rate * z, start, record=True, tolerance=Tolerance(norm=norm, check_every=every))
        for norm in (Euclidean(), Reusing(), Long())
    ]
    assert found[0].converged.all()
    for other in found[1:]:
        torch.testing.assert_close(other.trace, found[0].trace)
        torch.testing.assert_close(other.value, found[0].value)
