"""y = d + y^5, |d| <= 1/2, has one root with |y| <= 10^(-1/4), found by iteration; explicitly it is a series.

The toy example (section "Why implicit networks" and the last appendix): T(y) = d + y^5 is a 1/2-contraction on
|y| <= 10^(-1/4), and y = d 4F3(1/5, 2/5, 3/5, 4/5; 1/2, 3/4, 5/4; 3125 d^4 / 256). Statements are checked on grids
in float64. The paper trains nothing on this example.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import torch
from torch import Tensor

from banach import Euclidean, Solution, Tolerance, contraction_factor, solve
from banach.diagnose import observed_rate
from reproduction.study import Options, panels, store, table

RECORDS = "toy.jsonl"
ALPHA, BOUND, GAMMA = 10**-0.25, 0.5, 0.5  # |y| <= ALPHA, |d| <= BOUND, and the paper's contraction factor
POINTS = 201


@dataclass(frozen=True)
class Row:
    """One statement; `paper` is None for what the paper does not state."""

    key: str
    what: str
    paper: str | None
    ours: float
    holds: bool | None


def run(options: Options) -> list[Row]:
    """Check all statements; seconds on a CPU."""
    store(options.records / RECORDS, rows := statements())
    return rows


def values(rows: Sequence[Row]) -> dict[str, Any]:
    """Return every value by its key, how many printed statements hold, and the table."""
    judged = [row.holds for row in rows if row.holds is not None and row.paper is not None]
    lines = [[row.what, row.paper, row.ours, row.holds] for row in rows]
    counts = {"checked": len(judged), "held": sum(judged), "points": POINTS}
    tabled = table(lines, "statement|paper|ours|holds")
    return {row.key: row.ours for row in rows} | counts | {"table": tabled}


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


def statements() -> list[Row]:
    """Check contraction, roots, iteration and series on grids of y and d."""
    y, d = grid(POINTS, ALPHA), grid(POINTS)
    factor = float(contraction_factor(T, y, (torch.zeros_like(y),)).max())
    reach = float(T(y[-1:], d[-1:]))  # T increases in y and in d, and is odd
    inside, outside = real_roots(d)
    iterates, found = iterate(d)
    assert found.trace is not None
    # The floor leaves out residuals that are rounding: near d = 0 a step or two is exact.
    rate = float(observed_rate(found.trace, found.steps, floor=1e-14).nan_to_num(nan=0.0).max())
    error = float((found.value - root(d)).abs().max())
    other = max(abs(series(x) - y) for x, y in zip(*(z.flatten().tolist() for z in (d, root(d))), strict=True))
    printed, corrected = (violations(iterates, root(d), power) for power in (1, 2))
    return [
        Row("factor", "largest |dT/dy| on |y| <= 10^(-1/4)", "0.5", factor, abs(factor - GAMMA) < 1e-9),
        Row("reach", "largest |T(y)| from there", f"< {ALPHA:.4f}", reach, reach < ALPHA),
        Row("inside", f"real roots there, for each of {POINTS} d", "1", max(inside), set(inside) == {1}),
        Row("outside", "least |y| of any other real root", f"> {ALPHA:.4f}", min(outside), min(outside) > ALPHA),
        Row("rate", "largest observed rate of the iteration", "<= 0.5", rate, rate <= GAMMA),
        Row("error", "largest error after convergence, against Newton", "0", error, error < 1e-11),
        Row("steps", "most steps until they are below 1e-12", None, int(found.steps.max()), None),
        Row("printed", "d that violate |y - y_n| <= 2^(1-n) |y_2 - y_1|", "0", printed, printed == 0),
        Row("corrected", "d that violate |y - y_n| <= 2^(2-n) |y_2 - y_1|", None, corrected, corrected == 0),
        Row("series", "largest error of the series, against Newton", "0", other, other < 1e-13),
    ]


def real_roots(d: Tensor) -> tuple[list[int], list[float]]:
    """Return how many real roots of y^5 - y + d have |y| <= ALPHA, for each d, and the sizes of all others."""
    found = [np.roots([1.0, 0.0, 0.0, 0.0, -1.0, value]) for value in d.flatten().tolist()]
    real = [np.abs(roots.real[np.abs(roots.imag) < 1e-9]) for roots in found]
    return [int((r <= ALPHA).sum()) for r in real], [float(x) for r in real for x in r if x > ALPHA]


def series(d: float) -> float:
    """Return the paper's explicit solution, a hypergeometric series."""
    upper, lower = [0.2, 0.4, 0.6, 0.8], [0.5, 0.75, 1.25]
    return d * float(mpmath.hyper(upper, lower, 3125 * d**4 / 256))


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Draw the paper's plot with the iterates, and the speed of the iteration."""
    figure, (plot, pace) = panels(2)
    y, third, half = grid(401, 1.0)[:, 0], torch.full((1, 1), 1 / 3, dtype=torch.float64), grid(2)[-1:]
    plot.plot(y, y, label="y")
    plot.plot(y, T(y, third[0]), label="d + y^5, d = 1/3")
    across = [value for value in iterate(third)[0][0, :8].tolist() for _ in range(2)]
    plot.plot(across[:-1], [0.0, *across[2:]], color="black", linewidth=0.8, marker=".", label="iterates from 0")
    plot.axvspan(-ALPHA, ALPHA, alpha=0.1, label="|y| <= 10^(-1/4)")
    plot.set(title="the fixed point", xlabel="y", ylabel="y, T(y)", xlim=(-1, 1), ylim=(-0.7, 1.35))
    pace.semilogy((iterate(half)[0][0, :31] - root(half)[0]).abs(), marker=".", label="k steps of T")
    pace.semilogy([GAMMA**k for k in range(31)], color="black", linestyle=":", label="2^-k")
    pace.set(title="d = 1/2", xlabel="k", ylabel="error", ylim=(1e-12, 1))
    for axes in (plot, pace):
        axes.legend(fontsize="small")
    return {"toy": figure}
