"""The norms: on one tensor, on a nest, and the step each of them stops at."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from banach import RMS, Euclidean, Tolerance, WorstPixel, solve
from banach.latent import Space
from banach.solve import Norm
from problems import normal


def test_norms() -> None:
    x = normal(2, 3, 4, 5)
    cases: list[tuple[Norm, Tensor]] = [
        (RMS(), x.square().mean((1, 2, 3)).sqrt()),
        (Euclidean(), x.square().sum((1, 2, 3)).sqrt()),
        (WorstPixel(), x.square().sum(1).sqrt().amax((1, 2))),
    ]
    for norm, expected in cases:
        found = solve(lambda z: z + x, torch.zeros_like(x), tolerance=Tolerance(max_steps=1, norm=norm))
        torch.testing.assert_close(found.residual, expected)


def test_norms_of_a_nest() -> None:
    x = {"image": normal(2, 3, 4, 4), "vector": normal(2, 7, seed=1), "number": normal(2, seed=2)}
    flat = torch.cat([x["image"].flatten(1), x["vector"], x["number"][:, None]], 1)
    pixel = x["image"].square().sum(1).sqrt().amax((1, 2))
    worst = torch.stack([pixel, x["vector"].square().sum(1).sqrt(), x["number"].abs()]).amax(0)
    zero = {name: torch.zeros_like(part) for name, part in x.items()}
    cases: list[tuple[Norm, Tensor]] = [
        (RMS(), flat.square().mean(1).sqrt()),
        (Euclidean(), flat.square().sum(1).sqrt()),
        (WorstPixel(), worst),
    ]
    for norm, expected in cases:
        found = solve(lambda z: x, zero, tolerance=Tolerance(max_steps=1, norm=norm))
        torch.testing.assert_close(found.residual, expected)


@pytest.mark.parametrize("norm", [RMS(), Euclidean(), WorstPixel()], ids=repr)
def test_each_norm_stops_at_its_own_step(norm: Norm) -> None:
    # T(z) = z / 2 from ones: after k evaluations the residual is 2^-k in every entry.
    size = {"RMS()": 1.0, "Euclidean()": 4.0, "WorstPixel()": 4.0}[repr(norm)]
    expected = next(k for k in range(1, 50) if size * 2.0**-k <= 1e-3)
    assert (
        solve(lambda z: z / 2, torch.ones(1, 16), tolerance=Tolerance(atol=1e-3, norm=norm)).steps.item()
        == expected
    )


class Wrong:
    """One number for all rows: the axis was forgotten."""

    def measure(self, rows: Tensor, space: Space) -> Tensor:
        return rows.norm()

    def scale(self, space: Space) -> float:
        return 1.0


class Long(Wrong):
    """Computed in float64."""

    def measure(self, rows: Tensor, space: Space) -> Tensor:
        return rows.double().norm(dim=1)


@pytest.mark.parametrize("check_every", [0, 1, 4])
def test_a_norm_of_ones_own_is_checked_however_often_the_host_looks(check_every: int) -> None:
    def halve(z: Tensor) -> Tensor:
        return 0.5 * z + 1

    limits = Tolerance(norm=Wrong(), check_every=check_every, max_steps=40)
    with pytest.raises(ValueError, match="one number for each of 5 rows, got shape"):
        solve(halve, torch.zeros(5, 3), tolerance=limits)
    found = solve(halve, torch.zeros(5, 3), tolerance=replace(limits, norm=Long()))
    assert bool(found.converged.all())
    torch.testing.assert_close(found.value, torch.full((5, 3), 2.0), atol=1e-3, rtol=0)
