"""The equation y = d + y^5 itself: its contraction, its one root near 0, its series; nothing is learned here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from banach.diagnose import contraction_factor, observed_rate
from banach.solve import Euclidean, Picard, Tolerance, solve

ALPHA = 10**-0.25  # the paper's interval is [-ALPHA, ALPHA]
BOUND = 0.5  # |d| is at most this
GAMMA = 0.5  # the contraction factor that the paper proves
DIGITS = 30  # to which the series is compared with the root
UPPER = (Fraction(1, 5), Fraction(2, 5), Fraction(3, 5), Fraction(4, 5))  # of the paper's 4F3,
LOWER = (Fraction(1, 2), Fraction(3, 4), Fraction(5, 4))
FACTOR = Fraction(3125, 256)  # which is taken at FACTOR d^4


def T(y: Tensor, d: Tensor) -> Tensor:
    """d + y^5."""
    return d + y**5


def grid(count: int, bound: float = BOUND) -> Tensor:
    """`count` numbers from -bound to bound, as a column."""
    return torch.linspace(-bound, bound, count, dtype=torch.float64)[:, None]


def root(d: Tensor) -> Tensor:
    """The fixed point by Newton's method: no route through T's iteration."""
    y = d.clone()
    for _ in range(50):
        y = y - (y - T(y, d)) / (1 - 5 * y**4)
    return y


@dataclass(frozen=True)
class Contraction:
    """dT/dy on [-ALPHA, ALPHA]: the largest by autograd, by `contraction_factor` and over pairs of points."""

    derivative: float
    factor: float
    pairs: float
    reach: float  # the largest |T(y)| from the interval: below ALPHA, T maps it into itself


def contraction(count: int) -> Contraction:
    y = grid(count, ALPHA).requires_grad_()
    slope = torch.autograd.grad(T(y, torch.zeros_like(y)).sum(), y)[0].abs()
    y = y.detach()
    sigma = contraction_factor(T, y, (torch.zeros_like(y),))
    gaps, moved = (y - y.T).abs(), (y**5 - y.T**5).abs()
    apart = gaps > 0
    corners = torch.tensor([[ALPHA, -ALPHA, ALPHA, -ALPHA], [BOUND, BOUND, -BOUND, -BOUND]], dtype=torch.float64)
    return Contraction(
        derivative=float(slope.max()),
        factor=float(sigma.max()),
        pairs=float((moved[apart] / gaps[apart]).max()),
        reach=float(T(corners[0], corners[1]).abs().max()),  # T increases in y and in d
    )


@dataclass(frozen=True)
class Roots:
    """Real roots of y^5 - y + d: how many lie in [-ALPHA, ALPHA], and how near to 0 any other comes."""

    fewest: int
    most: int
    other: float


def real_roots(d: Tensor) -> Roots:
    inside, outside = [], []
    for value in d.flatten().tolist():
        found = np.roots([1.0, 0.0, 0.0, 0.0, -1.0, value])
        real = np.abs(found.real[np.abs(found.imag) < 1e-9])
        inside.append(int((real <= ALPHA).sum()))
        outside += real[real > ALPHA].tolist()
    return Roots(min(inside), max(inside), min(outside, default=math.inf))


@dataclass(frozen=True, eq=False)
class Iteration:
    """Picard's iterates y_1 = 0, y_2, ... for every d (a row each), and what the paper says of them.

    The paper bounds |y_m - y_n| by 2^(1-n) |y_2 - y_1|; counted from y_1 = 0, its sum allows 2^(2-n).
    """

    d: Tensor
    iterates: Tensor  # (d, steps + 1)
    steps: Tensor  # to within 1e-12 of the last
    rate: Tensor
    error: Tensor  # |y_n - y*|, y* by Newton

    def violations(self, power: int) -> int:
        """For how many d does some n break |y* - y_n| <= 2^(power - n) |y_2 - y_1|?"""
        n = torch.arange(1, self.iterates.shape[1] + 1, dtype=torch.float64)
        allowed = 2 ** (power - n) * (self.iterates[:, 1:2] - self.iterates[:, :1]).abs()
        return int((self.error > allowed + 1e-15).any(1).sum())


def iterate(d: Tensor, steps: int = 60) -> Iteration:
    seen: list[Tensor] = []
    tolerance = Tolerance(atol=1e-12, max_steps=steps, norm=Euclidean())
    found = solve(
        T,
        torch.zeros_like(d),
        Picard(),
        inputs=(d,),
        tolerance=tolerance,
        record=True,
        on_step=lambda _, z: seen.append(z.clone()),
    )
    assert found.trace is not None
    iterates = torch.cat([torch.zeros_like(d), *seen], 1)
    # The floor leaves out residuals that are rounding: near d = 0 a step or two is exact.
    rate = observed_rate(found.trace, found.steps, floor=1e-14)
    return Iteration(d, iterates, found.steps, rate, (iterates - root(d)).abs())


def coefficients(count: int) -> list[Fraction]:
    """c_k in y = sum c_k d^(4k+1), exactly, from the parameters of the paper's 4F3."""
    found = [Fraction(1)]
    for k in range(count - 1):
        ratio = FACTOR / (k + 1)
        for a in UPPER:
            ratio *= a + k
        for b in LOWER:
            ratio /= b + k
        found.append(found[-1] * ratio)
    return found


def series_error(d: list[Fraction], digits: int = DIGITS) -> Any:
    """The largest |series - root| over d, an mpmath number: 4F3 by mpmath against Newton, ten digits to spare."""
    import mpmath

    with mpmath.workdps(digits + 10):
        numbers = [mpmath.mpf(value.numerator) / value.denominator for value in d]
        return max(abs(_series(x) - _newton(x)) for x in numbers)


def _series(d: Any) -> Any:
    import mpmath

    upper, lower = ([mpmath.mpf(a.numerator) / a.denominator for a in side] for side in (UPPER, LOWER))
    return d * mpmath.hyper(upper, lower, mpmath.mpf(FACTOR.numerator) / FACTOR.denominator * d**4)


def _newton(d: Any) -> Any:
    import mpmath

    return mpmath.findroot(lambda y: y - d - y**5, d, solver="newton", df=lambda y: 1 - 5 * y**4)


def partial_sums(d: float, count: int) -> Tensor:
    """(count,): the series cut after 1, 2, ... terms."""
    terms = [float(c) * d ** (4 * k + 1) for k, c in enumerate(coefficients(count))]
    return torch.tensor(terms, dtype=torch.float64).cumsum(0)
