"""stride(): Picard on a GPU, where a host check costs more than a step.

A stride is several steps between two checks, with the same result as `SolveRun.step` and `check` after each of
them. It needs finite residuals and no sample that may have stalled. Otherwise the general loop takes one step, and
`stride` goes on after that.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from banach.latent import rebuild
from banach.solve.run import SolveRun
from banach.solve.state import IDLE, RESIDUAL, Array, State, count_nonzero, on_device, to_numpy
from banach.solve.tolerance import WorstPixel

FIRST_CHECK, MOST_AHEAD = 3, 8  # steps to the first check, and at most to the next, or a quarter of those taken
LARGE = 1 << 24  # bytes of an iterate; by its bandwidth a GPU reads them in about the time of one host operation
ROOM = 1 << 28  # bytes that the iterates between two checks and their differences may take


def stride(run: SolveRun, state: State, k: int) -> int:
    """Take several Picard steps between two host checks, at which samples go back to where they met the tolerance.

    Until then they move on. The next check comes when the last sample is expected to meet the tolerance.
    """
    first, most = k, run.tolerance.max_steps
    atol = np.array(run.atol, state.least.dtype)
    least, least_at = np.where(state.active, state.least, np.inf), state.least_at
    now = test = earlier = least
    usual, risen, ahead, room = True, False, FIRST_CHECK, max(1, ROOM // max(2 * state.z.nbytes, 1))
    while usual and state.count and k < most:
        iterates, residual, excess = _steps(run, state.z, k, min(ahead, most - k, room))
        before, above = state.active, excess > atol
        taken = _as_one(above, residual, excess, least) if state.count == len(before) else 0
        if taken:  # the usual case, in less time
            k, now, test = k + taken, residual[taken - 1], excess[taken - 1]
            least, least_at, state.z = now, np.full_like(least_at, k), iterates[taken].clone()
            run.previous_residuals = run.previous_residuals[1], now
            if above[taken - 1, 0]:
                state.best_z = iterates[taken - 1].clone()
                ahead = _steps_ahead(residual[-2] if len(residual) > 1 else earlier, now, test, atol, k)
                earlier = now
            else:
                state.record(k, now, test, above[taken - 1])
            continue
        active, moving, idle, lowest, lowest_at = _histories(k, before, above, residual, (least, least_at))
        finite = ~moving | ((residual < np.inf) & (excess > -np.inf))
        taken = _usual_steps(run, finite, idle, active, residual, iterates)
        usual = taken == len(residual) or (taken > 0 and not active[taken - 1].any())
        if not taken:
            break
        risen = bool(count_nonzero((before & ~moving & above)[:taken]))
        now, test, least, least_at = residual[taken - 1], excess[taken - 1], lowest[taken], lowest_at[taken]
        _go_back(state, k, iterates, (residual, excess), active[:taken], least_at)
        run.previous_residuals = run.previous_residuals[1], state.now[RESIDUAL].copy()
        k, here = k + taken, state.active
        if not state.count:
            break
        before_last = residual[-2] if len(residual) > 1 else earlier
        ahead = _steps_ahead(before_last[here], residual[-1][here], excess[-1][here], atol, k)
        earlier = residual[-1]
    if k > first:
        run.note_last(state, k, (now, test), (least, least_at))
    if risen and (k == most or not state.count):
        # Residuals of samples that froze rose as they moved on, so T may mix samples: they are measured again.
        _, residual, excess = _steps(run, state.z, k, 1)
        state.now[state.tested], state.now[RESIDUAL] = excess[0], residual[0]
        run.previous_residuals = run.previous_residuals[1], residual[0]
    return k


def _histories(
    k: int, before: Array, above: Array, residual: Array, best: tuple[Array, Array]
) -> tuple[Array, Array, Array, Array, Array]:
    """Return, one row per step: who is active after it, who was before it, who is idle; and the least residuals
    and their steps, which begin with those of `best`."""
    active = np.logical_and.accumulate(above) & before
    moving = np.concatenate((before[None], active[:-1]))
    lowest = np.minimum.accumulate(np.concatenate((best[0][None], np.where(moving, residual, np.inf))))
    better, steps = lowest[1:] < lowest[:-1], k + 1 + np.arange(len(residual))[:, None]
    lowest_at = np.maximum.accumulate(np.concatenate((best[1][None], np.where(better, steps, 0))))
    return active, moving, active & ~better & (steps >= lowest_at[:-1] + IDLE), lowest, lowest_at


def _go_back(
    state: State, k: int, iterates: Tensor, measured: tuple[Array, Array], active: Array, least_at: Array
) -> None:
    """Put samples where they froze, and keep the best iterate of the others. `active` has one row per step."""
    place = np.where(active[-1], len(active), active.argmin(0) + 1) * state.active  # 0: frozen before
    index = np.maximum(place - 1, 0), np.arange(len(place))
    state.z = _pick(iterates, place)
    state.record(k + 1 + index[0], measured[0][index], measured[1][index], active[-1])
    if state.count:  # of frozen samples, only nonfinite ones need their best iterate
        best = np.maximum(least_at - k, 0).astype(int)  # 0: before this stride
        best = np.where(state.active, best, np.where(state.nonfinite, 0, best[state.active.argmax()]))
        picked = _pick(iterates, np.maximum(best - 1, 0))
        state.best_z = picked if best.all() else torch.where(state.column(best > 0), picked, state.best_z)


def _usual_steps(
    run: SolveRun, finite: Array, idle: Array, active: Array, residual: Array, iterates: Tensor
) -> int:
    """Return how many steps to take: until nobody is active, or before one that the general loop should take."""
    fine, going_on = np.logical_and.reduce(finite, 1), np.logical_or.reduce(active, 1)
    for j in range(len(residual)):
        if not fine[j] or run.flat(idle[j], residual[j], iterates[j + 1]).any():
            return j
        if not going_on[j]:
            return j + 1
    return len(residual)


def _steps(run: SolveRun, z: Tensor, k: int, steps: int) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Return z and the next iterates; and (steps, samples): the residuals, and these minus their relative part."""
    rtol = run.tolerance.rtol
    # The iterates; T at all but the last, where damping makes these something else; the differences.
    memory = z.new_empty((3 if run.damping else 2) * steps + 1, *z.shape)
    memory[0].copy_(z)
    done, norms = _evaluate(run, memory, k, steps)
    if done < steps:
        return _steps(run, z, k, done)
    *size, residual = to_numpy(norms.view(-1, steps, len(z)))
    if not rtol:
        return memory[: steps + 1], residual, residual
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        return memory[: steps + 1], residual, residual - residual.dtype.type(rtol) * size[0]


def _evaluate(run: SolveRun, memory: Tensor, k: int, steps: int) -> tuple[int, Tensor]:
    """Write the iterates, T at them and the differences; return how many steps T allowed; if all, the norms.

    The norms are taken together after the last step, since a small operation takes the host as long as a large
    one; those of large iterates at every step, while the host prepares the next.
    """
    rows, damping = memory.unbind(), run.damping
    values, differences, space = rows[-2 * steps : -steps], rows[-steps:], run.space
    sizes, norms = [], []
    several = len(space.shapes) > 1 and not (space.coupled or damping) and space.dtype == memory.dtype
    write: Callable[[Tensor], None] | None = None
    by_pixels = type(run.tolerance.norm) is WorstPixel and space.coupled and len(space.shapes) > 1
    together = rows[0].nbytes <= LARGE and not by_pixels
    for j in range(steps):
        try:
            if several and (k or j):
                write = write or _by_leaves(run, rows[j])
                write(values[j])
            else:  # a copy, since T may write its next value into the same memory
                values[j].copy_(run.evaluate(rows[j], first=not k and not j))
        except Exception:  # T need not be defined where a sample is only because it has moved on
            if not j:
                raise
            return j, memory[:0]
        if damping:
            torch.lerp(values[j], rows[j], damping, out=rows[j + 1])
        if not together:
            torch.sub(values[j], rows[j], out=differences[j])
            norms.append(run.measure(differences[j], space))
            if run.tolerance.rtol:
                sizes.append(run.measure(values[j], space))
    return steps, _norms(run, memory, steps) if together else torch.stack(sizes + norms)


def _norms(run: SolveRun, memory: Tensor, steps: int) -> Tensor:
    """Write the differences; return the norms of T at the iterates, where they are needed, and of these."""
    torch.sub(memory[-2 * steps : -steps], memory[:steps], out=memory[-steps:])
    rows = memory[-2 * steps if run.tolerance.rtol else -steps :].flatten(0, 1)
    space = run.space
    if type(run.tolerance.norm) is WorstPixel:  # the only norm that looks at the space
        space = space.resized(len(rows) * (space.batch if space.coupled else 1))
    return run.measure(rows, space)


def _by_leaves(run: SolveRun, z: Tensor) -> Callable[[Tensor], None]:
    """Return a function that writes the rows of the next iterate of a nest: T(z), then T of that, and so on.

    Leaves have memory of their own, in turn one of two, so that T gets them without a copy.
    """
    space = run.space
    turns = [(leaves, space.columns(leaves)) for leaves in (space.empty(), space.empty())]

    def keep(parts: list[Tensor]) -> None:
        for leaf, part in zip(turns[0][0], parts, strict=True):
            leaf.copy_(part)

    def write(out: Tensor) -> None:
        parts = space.check(run.T(rebuild(space.template, turns[0][0]), *run.inputs))
        turns.reverse()
        keep(parts)
        torch.cat(turns[0][1], 1, out=out)

    keep(space.parts(z))
    return write


def _as_one(above: Array, residual: Array, excess: Array, least: Array) -> int:
    """Return how many steps all samples take together, 0 if they do not: all go on, or all meet the tolerance.

    Every residual is below the one before it, the first below `least`, and none rises above the tolerance later.
    """
    everyone = above.all(1)
    first = len(above) if everyone.all() else int(everyone.argmin())
    taken = min(first + 1, len(above))
    together = taken == first or not (above[first:].any() or (excess[first] == -np.inf).any())
    fell = together and (residual[0] < least).all() and (residual[1:taken] < residual[: taken - 1]).all()
    return taken if fell else 0


def _steps_ahead(before: Array, residual: Array, excess: Array, atol: Array, k: int) -> int:
    """Return how many steps the slowest of these samples needs after k, from the last two of its residuals."""
    with np.errstate(all="ignore"):
        needed = np.log((residual - excess + atol) / residual) / np.log(residual / before)
    known = np.isfinite(needed) & (needed > 0)
    slowest = needed.max() if len(needed) and known.all() else MOST_AHEAD
    return int(min(np.ceil(slowest), max(MOST_AHEAD, k // 4)))


def _pick(iterates: Tensor, index: np.ndarray) -> Tensor:
    """Return a copy of the rows of iterates[index], one number per sample."""
    if index.min() == index.max():
        return iterates[int(index[0])].clone()
    rows = index * len(index) + np.arange(len(index))
    return iterates.flatten(0, 1).index_select(0, on_device(rows, iterates))
