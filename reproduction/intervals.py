"""Means with 95% intervals over runs, the four verdicts on a printed number, and claims as rows of a page."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

REPRODUCED, NOT_REPRODUCED, UNDECIDED, UNTESTED = "reproduced", "not reproduced", "undecided", "untested"
WIDEST = 0.3  # points, or units of a ratio: a wider interval decides nothing
SEEDS = 3  # fewer decide nothing


@dataclass(frozen=True)
class Interval:
    """A mean over `count` runs. `half`: half-width of its 95% interval by the t quantile, NaN for one run."""

    mean: float
    half: float
    count: int

    @staticmethod
    def of(values: Iterable[float]) -> "Interval":
        """Return the interval of independent values, of which there must be one at least."""
        numbers = [float(value) for value in values]
        if not numbers:
            raise ValueError("an interval needs at least one value, got none")
        mean, n = statistics.fmean(numbers), len(numbers)
        error = statistics.stdev(numbers) / math.sqrt(n) if n > 1 else math.nan
        return Interval(mean, _quantile(n - 1) * error, n)

    def minus(self, other: "Interval") -> "Interval":
        """Return the interval of the difference of two independent means, by Welch's degrees of freedom."""
        n, mean = min(self.count, other.count), self.mean - other.mean
        if n < 2:
            return Interval(mean, math.nan, n)
        a, b = ((one.half / _quantile(one.count - 1)) ** 2 for one in (self, other))
        if a + b == 0:
            return Interval(mean, 0.0, n)
        freedom = (a + b) ** 2 / (a**2 / (self.count - 1) + b**2 / (other.count - 1))
        return Interval(mean, _quantile(freedom) * math.sqrt(a + b), n)

    def __format__(self, spec: str) -> str:
        """Return "mean ± half" in a number format, two decimals unless stated."""
        spec = spec or ".2f"
        half = "" if math.isnan(self.half) else f" ± {self.half:{spec.lstrip('+')}}"
        return f"{self.mean:{spec}}{half}"

    def __str__(self) -> str:
        return f"{self:.2f} (n = {self.count})"


def verdict(ours: Interval | None, printed: float, *, full: bool = True, strict: bool = False) -> str:
    """Return the verdict on the claim "at least `printed`", or "more than `printed`" if `strict`.

    Reproduced: the interval contains the printed value or lies above it, and is narrow. Not reproduced: it lies
    below. Undecided: it is too wide; for a strict claim also if it contains the value. Untested: shortened runs
    (`full` is False), or fewer than three.
    """
    if ours is None or not full or ours.count < SEEDS:
        return UNTESTED
    if ours.mean + ours.half < printed:
        return NOT_REPRODUCED
    inside = ours.mean - ours.half <= printed
    return UNDECIDED if ours.half > WIDEST or (strict and inside) else REPRODUCED


@dataclass(frozen=True)
class Claim:
    """A row of a page: what the paper prints, what we measured, over how many runs of which length."""

    paper: str
    ours: str = "-"
    n: int = 0
    length: str = "-"
    verdict: str = UNTESTED

    @staticmethod
    def of(printed: float, ours: Interval | None, length: str, *, sign: str = "", full: bool = True) -> "Claim":
        """Return the claim "at least `printed`"; see `verdict`."""
        paper = f"{printed:{sign}.1f}"
        if ours is None:
            return Claim(paper)
        return Claim(paper, f"{ours:{sign}.2f}", ours.count, length, verdict(ours, printed, full=full))

    @staticmethod
    def always(held: int, count: int, n: int) -> "Claim":
        """Return the claim that something holds in all cases over training: one counterexample refutes it."""
        verdict = REPRODUCED if held == count else NOT_REPRODUCED
        return Claim("always", f"{held:,} of {count:,}", n, "over training", verdict)

    def __str__(self) -> str:
        return f"{self.paper} | {self.ours} | {self.n} | {self.length} | {self.verdict}"


def percent(shares: Iterable[float | None]) -> str:
    """Return the least share. Anything short of all is shown as such, never rounded to 100%."""
    least = min((share for share in shares if share is not None), default=None)
    if least is None:
        return "-"
    return "100%" if least == 1 else f"{min(100 * least, 99.99):.2f}%"


def _quantile(freedom: float) -> float:
    """Return the 97.5% quantile of Student's t distribution, NaN without a degree of freedom."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom)) if freedom > 0 else math.nan
