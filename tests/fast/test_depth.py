"""The ladder of depths, and the control that climbs it."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise

import pytest

from banach.fast.depth import LAG, SHARE, WINDOW, DepthControl, Ladder, need


@pytest.mark.parametrize("most", [1, 2, 15, 16, 17, 50, 200, 500])
def test_rungs_rise_to_the_last_and_are_close(most: int) -> None:
    rungs = Ladder.up_to(most).rungs
    assert rungs[0] == 1
    assert rungs[-1] == most
    assert all(a < b for a, b in pairwise(rungs))
    assert all(b - a <= max(1, a / 8) for a, b in pairwise(rungs))
    assert len(rungs) < 80
    with pytest.raises(ValueError, match="at least one step"):
        Ladder.up_to(0)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("depth", [3, 10, 30])
def test_the_need_of_a_geometric_residual_is_exact(rate: float, depth: int) -> None:
    """Excess 100 rate^k: the first k with it at most 1, whatever the depth it is seen from."""
    first = next(k for k in range(1000) if 100 * rate**k <= 1)
    assert need(depth, 100 * rate**depth, 100 * rate ** (depth + 1)) == first
    assert need(depth, math.nan, 1.0) == need(depth, math.inf, math.inf) == math.inf
    assert need(depth, 0.0, 0.0) == 1


def test_a_diverging_iteration_goes_to_the_last_rung() -> None:
    control = DepthControl(Ladder.up_to(50), 5)
    for _ in range(3):
        control.observe(control.depth, 8.0, 9.0)
    assert control.depth == 50


def test_the_control_settles_where_most_steps_meet_the_tolerance() -> None:
    """Needs vary from step to step: over a long run the tolerance is met as often as promised, at little more."""
    control = DepthControl(Ladder.up_to(200), 3)
    rate, met, depths, wanted = 0.7, 0, [], []
    for step in range(1000):
        start = 300.0 * (1 + 0.5 * math.sin(step) + 0.3 * math.sin(7.3 * step))
        excess = start * rate**control.depth
        met += excess <= 1
        depths.append(control.depth)
        wanted.append(next(k for k in range(1000) if start * rate**k <= 1))
        control.observe(control.depth, excess, rate * excess)
    assert met >= 0.95 * 1000
    assert sum(depths) <= 1.15 * sum(wanted) + 1000


def test_needs_that_rise_are_met_though_what_is_told_comes_late() -> None:
    """One step deeper every eight: what counts now is LAG steps old, and the need has risen since."""
    control, late, met, depths = DepthControl(Ladder.up_to(200), 5), deque[tuple[int, float, float]](), 0, 0
    for step in range(400):
        excess = 0.7 ** (control.depth - 5 - step / 8)
        met, depths = met + (excess <= 1), depths + control.depth
        late.append((control.depth, excess, 0.7 * excess))
        if len(late) > LAG:
            control.observe(*late.popleft())
    assert met >= 0.95 * 400
    assert depths <= 1.15 * sum(math.ceil(5 + step / 8) for step in range(400))


def test_the_control_comes_down_again() -> None:
    control = DepthControl(Ladder.up_to(50), 40)
    for _ in range(2 * WINDOW):
        control.observe(control.depth, 0.5**control.depth * 32, 0.5 ** (control.depth + 1) * 32)
    assert control.depth == 5


@pytest.mark.parametrize("outlier", [30.0, math.inf])
def test_an_outlier_does_not_set_the_depth(outlier: float) -> None:
    control = DepthControl(Ladder.up_to(50), 5)
    for step in range(WINDOW):
        control.observe(5, outlier if step == 7 else 0.9, 15.0 if step == 7 else 0.45)
    assert 1 / WINDOW < 1 - SHARE + 1e-9
    assert control.depth == 5
