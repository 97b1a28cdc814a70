"""y = d + y^5, |d| <= 1/2, has one root with |y| <= 10^(-1/4), found by iteration; explicitly it is a series.

The toy example (section "Why implicit networks" and the last appendix): T(y) = d + y^5 is a 1/2-contraction on
|y| <= 10^(-1/4), and y = d 4F3(1/5, 2/5, 3/5, 4/5; 1/2, 3/4, 5/4; 3125 d^4 / 256). Statements are checked on
grids in float64, the series to 30 digits. The paper trains nothing here; we also train a small network f to learn
y(d) from 128 samples: implicitly, y = d + f(y), by JFB and by exact gradients, and explicitly, y = d + f(d).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from banach import JFB, Euclidean, Implicit, ImplicitNetwork, Mode, Solution, Tolerance, contraction_factor, solve
from banach.diagnose import measure_contraction, observed_rate
from reproduction.intervals import Interval
from reproduction.study import Options, panels, store, table

RECORDS = "toy.jsonl"
ALPHA, BOUND, GAMMA = 10**-0.25, 0.5, 0.5  # |y| <= ALPHA, |d| <= BOUND, and the paper's contraction factor
POINTS, DIGITS = 201, 30
UPPER = (Fraction(1, 5), Fraction(2, 5), Fraction(3, 5), Fraction(4, 5))  # of the paper's 4F3,
LOWER = (Fraction(1, 2), Fraction(3, 4), Fraction(5, 4))
FACTOR = Fraction(3125, 256)  # which is taken at FACTOR d^4
STEEP = 12.0  # initial slope of f's units: they bend within |y| < 0.56 rather than outside
SAMPLES = 128
WAYS: dict[str, tuple[str, Mode | None]] = {
    "explicit": ("explicit, y = d + f(d)", None),
    "jfb": ("implicit, y = d + f(y), JFB", JFB()),
    "exact": ("implicit, y = d + f(y), exact gradient", Implicit()),
}


@dataclass(frozen=True)
class Row:
    """One statement of the paper, or the RMS test error of one way to learn y(d).

    `seeds` are the errors that `ours` is the mean of; `curve` is what the first seed learned, on a grid of d.
    `holds` of a learned implicit network: T contracts on all test points.
    """

    key: str
    what: str
    paper: str | None
    ours: float
    holds: bool | None
    seeds: tuple[float, ...] = ()
    curve: tuple[float, ...] = ()


def run(options: Options) -> list[Row]:
    """Check the statements and train the networks; seconds on a CPU."""
    size = {"seeds": 2, "steps": 60} if options.quick else {"seeds": 5, "steps": 1000}
    rows = [*equation_rows(), *series_rows(), *(learn(key, **size) for key in WAYS)]
    store(options.records / RECORDS, rows, torch.device("cpu"))
    return rows


def values(rows: Sequence[Row]) -> dict[str, Any]:
    """Return values and intervals by key, the gain of JFB over the explicit network, counts and the table."""
    found: dict[str, Any] = {row.key: row.ours for row in rows}
    judged = [row.holds for row in rows if row.holds is not None and row.paper is not None]
    found |= {"checked": len(judged), "held": sum(judged), "points": POINTS}
    errors = {row.key: Interval.of(1e3 * error for error in row.seeds) for row in rows if row.seeds}
    gain = errors["explicit"].minus(errors["jfb"])
    found |= {f"{key}.interval": error for key, error in errors.items()} | {"seeds": gain.count, "gain": gain}
    found["gain.verdict"] = "excludes 0" if abs(gain.mean) > gain.half else "contains 0: undecided"
    lines = [[row.what, row.paper, row.ours, row.holds] for row in rows]
    return found | {"table": table(lines, ["statement", "paper", "ours", "holds"])}


def T(y: Tensor, d: Tensor) -> Tensor:
    """Return d + y^5."""
    return d + y**5


def grid(count: int, bound: float = BOUND) -> Tensor:
    """Return `count` numbers from -bound to bound, as a column."""
    return torch.linspace(-bound, bound, count, dtype=torch.float64)[:, None]


def root(d: Tensor) -> Tensor:
    """Return the fixed point by Newton's method, independently of T's iteration."""
    y = d.clone()
    for _ in range(50):
        y = y - (y - T(y, d)) / (1 - 5 * y**4)
    return y


def iterate(d: Tensor) -> tuple[Tensor, Solution]:
    """Return Picard's iterates from 0, one row per d, and the solution."""
    seen, tolerance = [torch.zeros_like(d)], Tolerance(atol=1e-12, max_steps=60, norm=Euclidean())
    options: dict[str, Any] = {"inputs": (d,), "tolerance": tolerance, "record": True}
    found = solve(T, seen[0], on_step=lambda _, y: seen.append(y.clone()), **options)
    return torch.cat(seen, 1), found


def violations(iterates: Tensor, y: Tensor, power: int) -> int:
    """Return for how many d some n breaks |y - y_n| <= 2^(power - n) |y_2 - y_1|, where y_1 = 0."""
    n = torch.arange(1, iterates.shape[1] + 1, dtype=torch.float64)
    allowed = 2 ** (power - n) * (iterates[:, 1:2] - iterates[:, :1]).abs()
    return int(((iterates - y).abs() > allowed + 1e-15).any(1).sum())


def equation_rows() -> list[Row]:
    """Check contraction, roots and iteration on grids of y and d."""
    y, d = grid(POINTS, ALPHA), grid(POINTS)
    factor = float(contraction_factor(T, y, (torch.zeros_like(y),)).max())
    gaps, moved = (y - y.T).abs(), (y**5 - y.T**5).abs()
    pairs = float((moved[gaps > 0] / gaps[gaps > 0]).max())
    reach = float(T(y[-1:], d[-1:]))  # T increases in y and in d, and is odd
    inside, outside = real_roots(d)
    iterates, found = iterate(d)
    assert found.trace is not None
    # The floor leaves out residuals that are rounding: near d = 0 a step or two is exact.
    rate = float(observed_rate(found.trace, found.steps, floor=1e-14).nan_to_num(nan=0.0).max())
    error = float((found.value - root(d)).abs().max())
    printed, corrected = (violations(iterates, root(d), power) for power in (1, 2))
    low = f"> {ALPHA:.4f}"
    return [
        Row("factor", "largest |dT/dy| on |y| <= 10^(-1/4)", "0.5", factor, abs(factor - GAMMA) < 1e-9),
        Row("pairs", "largest |T(y) - T(z)| / |y - z| there", "<= 0.5", pairs, pairs <= GAMMA + 1e-12),
        Row("reach", "largest |T(y)| from there", f"< {ALPHA:.4f}", reach, reach < ALPHA),
        Row("inside", f"real roots there, for each of {POINTS} d", "1", max(inside), set(inside) == {1}),
        Row("outside", "least |y| of any other real root", low, min(outside), min(outside) > ALPHA),
        Row("rate", "largest observed rate of the iteration", "<= 0.5", rate, rate <= GAMMA),
        Row("error", "largest error after convergence, against Newton", "0", error, error < 1e-11),
        Row("steps", "most steps until they are below 1e-12", None, int(found.steps.max()), None),
        Row("printed", "d that violate |y - y_n| <= 2^(1-n) |y_2 - y_1|", "0", printed, printed == 0),
        Row("corrected", "d that violate |y - y_n| <= 2^(2-n) |y_2 - y_1|", None, corrected, corrected == 0),
    ]


def real_roots(d: Tensor) -> tuple[list[int], list[float]]:
    """Return how many real roots of y^5 - y + d have |y| <= ALPHA, for each d, and the sizes of all others."""
    found = [np.roots([1.0, 0.0, 0.0, 0.0, -1.0, value]) for value in d.flatten().tolist()]
    real = [np.abs(roots.real[np.abs(roots.imag) < 1e-9]) for roots in found]
    return [int((r <= ALPHA).sum()) for r in real], [float(x) for r in real for x in r if x > ALPHA]


def series_rows() -> list[Row]:
    """Check the series: its error to 30 digits, its coefficients, and its speed at d = 1/2 against T's."""
    error = series_error([Fraction(k, 40) for k in range(-20, 21)])
    printed = [Fraction(1), Fraction(1), Fraction(10, 2), Fraction(210, 6)]
    half = grid(2)[-1:]
    terms = _first_below((partial_sums(BOUND, 200) - root(half)[0]).abs(), 1e-6) + 1
    steps = _first_below((iterate(half)[0][0] - root(half)[0]).abs(), 1e-6)
    same = sum(a == b for a, b in zip(coefficients(4), printed, strict=True))
    return [
        Row("series", f"largest |series - root| over 41 d, {DIGITS} digits", "0", error, error < 10.0**-DIGITS),
        Row("coefficients", "equal ones of the first four coefficients", "4", same, same == 4),
        Row("terms", "terms of the series for an error of 1e-6 at d = 1/2", None, terms, None),
        Row("equal_steps", "steps of T for the same error", None, steps, None),
    ]


def coefficients(count: int) -> list[Fraction]:
    """Return c_k in y = sum c_k d^(4k+1), exactly, from the parameters of the paper's 4F3."""
    found = [Fraction(1)]
    for k in range(count - 1):
        found.append(
            found[-1] * FACTOR / (k + 1) * math.prod(a + k for a in UPPER) / math.prod(b + k for b in LOWER)
        )
    return found


def partial_sums(d: float, count: int) -> Tensor:
    """Return the series cut after 1, 2, ..., `count` terms."""
    terms = [float(c) * d ** (4 * k + 1) for k, c in enumerate(coefficients(count))]
    return torch.tensor(terms, dtype=torch.float64).cumsum(0)


def series_error(d: Sequence[Fraction]) -> float:
    """Return the largest |series - root| over d: mpmath's 4F3 against Newton, with ten digits to spare."""
    import mpmath

    with mpmath.workdps(DIGITS + 10):
        upper, lower, (factor,), points = (
            [mpmath.mpf(x.numerator) / x.denominator for x in some] for some in (UPPER, LOWER, (FACTOR,), d)
        )
        sums = [x * mpmath.hyper(upper, lower, factor * x**4) for x in points]
        roots = [mpmath.findroot(lambda y, x=x: y - x - y**5, x, solver="newton") for x in points]
        return float(max(abs(a - b) for a, b in zip(sums, roots, strict=True)))


class Sum(nn.Module):
    """R(u, v) = v + f(u), f(x) = sum_i b_i tanh(a_i x + c_i) + e, for several seeds at once, one per column."""

    def __init__(self, seeds: int, width: int) -> None:
        super().__init__()
        drawn = torch.stack([_uniform((3, width), seed) for seed in range(seeds)], 1)
        self.a, self.c = nn.Parameter(STEEP * drawn[0]), nn.Parameter(STEEP * BOUND * drawn[1])
        self.b = nn.Parameter(0.1 * drawn[2] / width**0.5)
        self.e = nn.Parameter(torch.zeros(seeds, dtype=torch.float64))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return v + (torch.tanh(u[..., None] * self.a + self.c) * self.b).sum(-1) + self.e


def learn(key: str, *, seeds: int, steps: int, width: int = 16) -> Row:
    """Train f in y = d + f(y) by a backward mode, or explicitly in y = d + f(d), from equal initial weights."""
    name, backward = WAYS[key]
    R, same = Sum(seeds, width), nn.Identity()
    net = ImplicitNetwork(same, R, same, tolerance=Tolerance(atol=1e-7, max_steps=100), backward=backward or JFB())
    predict: Any = net if backward else lambda d: R(d, d)
    d = torch.stack([BOUND * _uniform((SAMPLES,), 1000 + seed) for seed in range(seeds)], 1)
    optimizer = torch.optim.Adam(R.parameters(), 1e-2, betas=(0.9, 0.99), eps=1e-14)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (predict(d) - root(d)).square().mean(0).sum().backward()
        optimizer.step()
        schedule.step()
    at = grid(1001).expand(-1, seeds).contiguous()
    with torch.no_grad():
        value = predict(at)
    rms = (value - root(at)).square().mean(0).sqrt().tolist()
    contracts = measure_contraction(net, at).contracts if backward else None
    what = f"RMS test error of a network with {3 * width + 1} weights, {name}"
    return Row(key, what, None, statistics.fmean(rms), contracts, tuple(rms), tuple(value[::5, 0].tolist()))


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Draw the paper's plot, the speed of iteration and series, and the errors of the learned functions."""
    figure, (plot, pace, errors) = panels(3)
    y, third, half = grid(401, 1.0)[:, 0], torch.full((1, 1), 1 / 3, dtype=torch.float64), grid(2)[-1:]
    plot.plot(y, y, label="y")
    plot.plot(y, T(y, third[0]), label="d + y^5, d = 1/3")
    across = [value for value in iterate(third)[0][0, :8].tolist() for _ in range(2)]
    plot.plot(across[:-1], [0.0, *across[2:]], color="black", linewidth=0.8, marker=".", label="iterates from 0")
    plot.axvspan(-ALPHA, ALPHA, alpha=0.1, label="|y| <= 10^(-1/4)")
    plot.set(title="the fixed point", xlabel="y", ylabel="y, T(y)", xlim=(-1, 1), ylim=(-0.7, 1.35))
    pace.semilogy((iterate(half)[0][0, :31] - root(half)[0]).abs(), marker=".", label="k steps of T")
    pace.semilogy((partial_sums(BOUND, 31) - root(half)[0]).abs(), marker=".", label="k + 1 terms of the series")
    pace.semilogy([BOUND * GAMMA**k for k in range(31)], color="black", linestyle=":", label="2^-(k+1)")
    pace.set(title="d = 1/2", xlabel="k", ylabel="error", ylim=(1e-12, 1))
    for row in rows:
        if row.curve:
            d = grid(len(row.curve))[:, 0]
            gap = (torch.tensor(row.curve, dtype=torch.float64) - root(d)).abs()
            errors.semilogy(d, gap.clamp(min=1e-9), label=WAYS[row.key][0])
    errors.set(title="learned from samples, equal parameters", xlabel="d", ylabel="|learned - y(d)|")
    for axes in (plot, pace, errors):
        axes.legend(fontsize="small")
    return {"toy": figure}


def _uniform(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return numbers from [-1, 1], drawn without touching the global random state."""
    return 2 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1


def _first_below(values: Tensor, limit: float) -> int:
    return int((values <= limit).nonzero()[0])
