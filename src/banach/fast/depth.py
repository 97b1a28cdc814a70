"""The depth of the next captured step, from residuals that arrive a few steps late."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean

LAG = 8  # training steps between a residual and the first step that uses it
WINDOW = 64  # residuals that are remembered
TREND, _LEAST = 16, 4  # at most and at least so many are averaged, and compared with as many before them
SHARE = 0.98  # of the remembered steps would have met the tolerance at the chosen depth
_FASTEST, _SLOWEST = 0.2, 0.97  # limits for the estimated rate of convergence


@dataclass(frozen=True)
class Ladder:
    """The depths that may be captured: few, since each is a CUDA graph."""

    rungs: tuple[int, ...]

    @staticmethod
    def up_to(max_steps: int) -> Ladder:
        """Return 1, 2, ... 16, then every second, fourth, eighth, and `max_steps`: at most an eighth too deep."""
        if max_steps < 1:
            raise ValueError(f"a ladder needs at least one step, got max_steps={max_steps}")
        rungs, depth = [], 1
        while depth < max_steps:
            rungs.append(depth)
            depth += max(1, 2 ** (depth.bit_length() - 4)) if depth >= 16 else 1
        return Ladder((*rungs, max_steps))

    def at_least(self, need: float) -> int:
        """Return the lowest rung that is deep enough, or the last one."""
        return next((rung for rung in self.rungs if rung >= need), self.rungs[-1])


class DepthControl:
    """The depth of the next step, from what earlier steps reached.

    A step at depth k gives its excess e_k = residual / tolerance, and e_{k+1}. Their ratio is the rate of the
    iteration, so e_k would have been 1 at depth k + log(e_k) / log(1 / rate). The next depth is the rung for the
    largest remembered need, except for the few largest. Where needs rise, as at the start of a training, their
    trend is extrapolated. The residual of step n counts from step n + LAG on, whenever it arrived: so a run
    repeats.
    """

    def __init__(self, ladder: Ladder, start: int) -> None:
        self.ladder, self.depth = ladder, ladder.at_least(start)
        self._needs: deque[float] = deque([start], maxlen=WINDOW)  # the first steps are at least as deep

    def observe(self, depth: int, excess: float, next_excess: float) -> None:
        """Take in what a step at `depth` reached."""
        self._needs.append(need(depth, excess, next_excess))
        worst = sorted(self._needs)[math.ceil(SHARE * len(self._needs)) - 1]
        self.depth = self.ladder.at_least(worst + self._rise())

    def _rise(self) -> float:
        """Extrapolate the rise of the mean need to the step that uses it."""
        half = min(len(self._needs) // 2, TREND)
        if half < _LEAST:
            return 0.0
        needs = list(self._needs)
        rise = (fmean(needs[-half:]) - fmean(needs[-2 * half : -half])) / half * (LAG + half / 2)
        return max(0.0, rise) if math.isfinite(rise) else 0.0


def need(depth: int, excess: float, next_excess: float) -> float:
    """Return the depth at which the excess would have been 1; infinite if the excess is not finite."""
    if not math.isfinite(excess):
        return math.inf
    if excess <= 0:
        return 1.0
    rate = next_excess / excess
    rate = min(max(rate, _FASTEST), _SLOWEST) if math.isfinite(rate) else _SLOWEST
    return max(1.0, math.ceil(depth + math.log(excess) / -math.log(rate)))
