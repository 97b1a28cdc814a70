"""stride(): Picard on a GPU, where a host check costs more than a step: several steps between two checks.

It does what `Run.step` and `Run.check` do, as long as nothing unusual happens: residuals are finite, no sample may
have stalled. Then the general loop takes one step, and it goes on after that.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from banach.solve.picard import Picard
from banach.solve.run import Run
from banach.solve.state import IDLE, RESIDUAL, State, count_nonzero, to_numpy

FIRST_CHECK, MOST_AHEAD = 3, 8  # steps to the first check, and at most to the next
ROOM = 1 << 26  # bytes that the iterates between two checks may take


def stride(run: Run, state: State, k: int) -> int:
    """Take several Picard steps between two host checks, at which samples go back to where they met the tolerance.

    Until then they move on. The next check comes when the last sample is expected to meet the tolerance.
    """
    count, first, most = len(state.z), k, run.tolerance.max_steps
    atol = np.array(run.atol, state.least.dtype)
    least, least_at = run.least_of(state)
    now = test = earlier = least
    usual, risen, ahead, room = True, False, FIRST_CHECK, max(1, ROOM // max(state.z.nbytes, 1))
    while usual and state.count and k < most:
        iterates, numbers = _steps(run, state.z, k, min(ahead, most - k, room))
        before, frozen_at, best_at = state.active, np.full(count, -1), np.full(count, -1)
        last, risen = 0, False
        for j, (residual, excess) in enumerate(numbers):
            better, active = residual < least, (excess > atol) & state.active
            idle = active & ~better & (k + 1 >= least_at + IDLE)
            usual = count_nonzero((residual < np.inf) & (excess > -np.inf) | ~state.active) == count
            usual = usual and not run.stalls(idle, residual, excess, iterates[j + 1])
            if not usual:
                break
            k, now, test, last = k + 1, residual, excess, j + 1
            risen = risen or bool(count_nonzero(before & ~state.active & (excess > atol)))
            better &= state.active
            best_at[better], frozen_at[state.active & ~active] = j, j
            least, least_at = np.where(better, residual, least), np.where(better, k, least_at)
            if count_nonzero(active) < count:
                state.record(k, residual, excess, active, of_frozen=not j)
            if not state.count:
                break
        _move(state, iterates, before, last, frozen_at, best_at)
        run.lasts = run.lasts[1], state.now[RESIDUAL].copy()
        earlier = numbers[-2][0] if len(numbers) > 1 else earlier
        residual, excess = numbers[-1]
        here = state.active
        ahead = _steps_ahead(earlier[here], residual[here], excess[here], atol)
        earlier = residual
    if k > first:
        run.note_last(state, k, (now, test), (least, least_at))
    if risen and (k == most or not state.count):
        _look_again(run, state, k)
    return k


def _look_again(run: Run, state: State, k: int) -> None:
    """Measure samples where they froze: their residuals rose as they moved on, so that T may mix samples."""
    residual, excess = _steps(run, state.z, k, 1)[1][0]
    state.now[state.tested], state.now[RESIDUAL] = excess, residual
    run.lasts = run.lasts[1], residual


def _steps(run: Run, z: Tensor, k: int, steps: int) -> tuple[list[Tensor], list[tuple[np.ndarray, np.ndarray]]]:
    """Return z and the next iterates; and of every step the residual, and the same minus its relative part."""
    damping, rtol = cast(Picard, run.solver).damping, run.tolerance.rtol
    iterates, measured = [z], []
    for j in range(steps):
        try:
            Tz = run.evaluate(z, first=not k and not j)
        except Exception:  # T need not be defined where a sample is only because it has moved on
            if not j:
                raise
            break
        measured += [run.measure(part, run.space) for part in ((Tz - z, Tz) if rtol else (Tz - z,))]
        z = torch.lerp(Tz, z, damping) if damping else Tz.clone()  # T may write to it again
        iterates.append(z)
    numbers = to_numpy(torch.stack(measured))
    if not rtol:
        return iterates, [(residual, residual) for residual in numbers]
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        return iterates, [
            (residual, residual - numbers.dtype.type(rtol) * size)
            for residual, size in zip(numbers[::2], numbers[1::2], strict=True)
        ]


def _steps_ahead(before: np.ndarray, residual: np.ndarray, excess: np.ndarray, atol: np.ndarray) -> int:
    """Return how many steps the slowest of these samples needs, from the last two of its residuals."""
    with np.errstate(all="ignore"):
        left = np.log((residual - excess + atol) / residual) / np.log(residual / before)
    known = np.isfinite(left) & (left > 0)
    slowest = left.max() if len(left) and known.all() else MOST_AHEAD
    return int(min(max(slowest, 1), MOST_AHEAD))


def _move(
    state: State, iterates: list[Tensor], before: np.ndarray, last: int, frozen_at: np.ndarray, best_at: np.ndarray
) -> None:
    """Give every sample the iterate at which it froze, else the last one; and keep its best one."""
    z = iterates[last]
    if not before.all():
        z = torch.where(state.column(before), z, iterates[0])
    for j in set(frozen_at[frozen_at >= 0].tolist()) - {last - 1}:
        z = torch.where(state.column(frozen_at == j), iterates[j + 1], z)
    state.z = z
    best_at[~state.active] = -1  # frozen samples keep what they have
    places = set(best_at.tolist())
    if len(places) == 1 and best_at[0] >= 0:
        state.best_z = iterates[best_at[0]]
        return
    for j in places - {-1}:
        state.best_z = torch.where(state.column(best_at == j), iterates[j], state.best_z)
