"""Picard's loop in few operations: on a CPU Python costs more than a small T, on a GPU a host check does.

Both functions do what `Run.step` and `Run.check` do, as long as nothing unusual happens: residuals are finite, no
sample may have stalled. Then the general loop takes one step, and they go on after it.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from banach.solve.context import is_transformed, rounding
from banach.solve.picard import Picard
from banach.solve.run import Run
from banach.solve.state import (
    BEST,
    IDLE,
    LIMIT,
    RESIDUAL,
    STEP,
    Array,
    State,
    count_nonzero,
    to_numpy,
)
from banach.solve.tolerance import RMS, Euclidean, WorstPixel

FIRST_CHECK, MOST_AHEAD = 3, 8  # steps on a GPU to the first check, and at most to the next
ROOM = 1 << 26  # bytes that the iterates between two checks may take


def can_sprint(run: Run) -> bool:
    """Return True for Picard and norms that give new memory in the type of the rows, outside torch.func."""
    known = type(run.tolerance.norm) in (RMS, Euclidean, WorstPixel) and not is_transformed()
    return run.on_host and known and type(run.solver) is Picard


def sprint(run: Run, state: State, k: int, *, compact: bool) -> int:
    """Take Picard steps after k evaluations, and return the evaluations then."""
    if state.z.is_cuda and run.tolerance.check_every is None and not compact:
        return stride(run, state, k)
    z, best_z, count, left = state.z, state.best_z, len(state.z), state.count
    atol = np.array(run.atol, state.least.dtype)  # compared faster than a float
    evaluate, measure, space, counted = run.evaluate, run.measure, run.space, count_nonzero
    read = Tensor.numpy if z.is_cpu else to_numpy
    damping, rtol, most, first = cast(Picard, run.solver).damping, run.tolerance.rtol, run.tolerance.max_steps, k
    least, least_at, fresh = _at_start(run, state)
    now = test = least
    while left and k < most:
        Tz = evaluate(z, first=not k)
        r = Tz - z
        measured = measure(r, space)
        if rtol:
            measured = torch.stack((measured, torch.sub(measured, measure(Tz, space), alpha=rtol)))
            residual, excess = read(measured)
        else:
            residual = excess = read(measured)
        active, better = excess > atol, residual < least
        if left < count:
            active &= state.active
        here, fell = counted(active), counted(better)
        if (fell < count or rtol or compact) and (
            (compact and here < count)
            or (rtol and counted(excess > -np.inf) < count)
            or (fell < count and counted(better | (residual < np.inf)) < count)
            or (fell < count and _stalls(run, active & (k + 1 >= least_at + IDLE), residual, excess, Tz))
        ):
            state.Tz, state.pending = Tz, (r, measured[0] if rtol else measured)
            break
        k, now, test = k + 1, residual, excess
        if fell == count:
            best_z, least, least_at = z, residual, k
        else:
            least, least_at = np.where(better, residual, least), np.where(better, k, least_at)
            best_z = torch.where(state.column(better), z, best_z) if fell else best_z
        if left < count:
            z = torch.where(state.mask, torch.lerp(Tz, z, damping) if damping else Tz, z)
        else:  # a copy of T(z), since T may write its next value into the same memory
            z = torch.lerp(Tz, z, damping) if damping else Tz.clone()
        if here < count:
            _note_frozen(run, fresh, residual)
            if here:  # else all are done
                fresh = state.active & ~active if here < left else None
                least = np.where(active, least, np.inf)
            state.record(k, residual, excess, active)
            left = here
    state.z, state.best_z = z, best_z
    if k > first:
        _note(run, state, k, (now, test), (least, least_at))
    return k


def stride(run: Run, state: State, k: int) -> int:
    """Take several Picard steps between two host checks, at which samples go back to where they met the tolerance.

    Until then they move on. The next check comes when the last sample is expected to meet the tolerance.
    """
    count, first, most = len(state.z), k, run.tolerance.max_steps
    atol = np.array(run.atol, state.least.dtype)
    least, least_at, fresh = _at_start(run, state)
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
            usual = usual and not _stalls(run, idle, residual, excess, iterates[j + 1])
            if not usual:
                break
            k, now, test, last = k + 1, residual, excess, j + 1
            risen = risen or bool(count_nonzero(before & ~state.active & (excess > atol)))
            better &= state.active
            best_at[better], frozen_at[state.active & ~active] = j, j
            least, least_at = np.where(better, residual, least), np.where(better, k, least_at)
            if count_nonzero(active) < count:
                if not j:
                    _note_frozen(run, fresh, residual)
                state.record(k, residual, excess, active, of_frozen=not j)
            if not state.count:
                break
        fresh = before & ~state.active
        _move(state, iterates, before, last, frozen_at, best_at)
        earlier = numbers[-2][0] if len(numbers) > 1 else earlier
        residual, excess = numbers[-1]
        here = state.active
        ahead = _steps_ahead(earlier[here], residual[here], excess[here], atol)
        earlier = residual
    if k > first:
        _note(run, state, k, (now, test), (least, least_at))
    if risen and (k == most or not state.count):
        _look_again(run, state, k)
    return k


def _look_again(run: Run, state: State, k: int) -> None:
    """Measure samples where they froze: their residuals rose as they moved on, so that T may mix samples."""
    residual, excess = _steps(run, state.z, k, 1)[1][0]
    state.now[state.tested], state.now[RESIDUAL] = excess, residual
    _note_frozen(run, ~state.active & np.isnan(run.after), residual)


def _steps(run: Run, z: Tensor, k: int, steps: int) -> tuple[list[Tensor], list[tuple[np.ndarray, np.ndarray]]]:
    """Return z and the next iterates; and of every step the residual, and the same minus its relative part.

    Fewer than `steps`, if T raises on the way.
    """
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


def _at_start(run: Run, state: State) -> tuple[Array, Array, np.ndarray | None]:
    """Return the least residuals, infinity for frozen samples, their steps, and the samples that froze last."""
    if state.count == len(state.z):
        return state.least, state.least_at, None
    return np.where(state.active, state.least, np.inf), state.least_at, ~state.active & np.isnan(run.after)


def _stalls(run: Run, idle: np.ndarray, residual: np.ndarray, excess: np.ndarray, Tz: Tensor) -> bool:
    """Return True if the residual of an idle sample may be no more than rounding."""
    if not count_nonzero(idle):
        return False
    rtol = run.tolerance.rtol
    size = (residual - excess) / rtol if rtol else to_numpy(run.measure(Tz, run.space))
    return bool(count_nonzero(idle & (residual <= rounding(run.space) * size)))


def _note_frozen(run: Run, fresh: np.ndarray | None, residual: np.ndarray) -> None:
    """Note the residuals of samples at the first evaluation after they froze."""
    run.earlier = run.after
    if fresh is not None:
        run.after = np.where(fresh, residual, run.after)


def _note(run: Run, state: State, k: int, last: tuple[Array, Array], best: tuple[Array, Array]) -> None:
    """Note what a check would see after the k-th evaluation."""
    stats = run.seen = state.stats
    run.busy = bool(state.count)
    if state.count == len(state.z):
        stats[:LIMIT, RESIDUAL], stats[:LIMIT, STEP] = last[0], k
        if state.tested:
            stats[:LIMIT, state.tested] = last[1]
        if best[0] is not last[0]:
            stats[BEST, RESIDUAL], stats[BEST, STEP] = best
    elif run.busy:
        for row, value in zip((RESIDUAL, STEP), best, strict=True):
            np.copyto(stats[BEST, row], value, where=state.active)
