"""One solve: what stays the same from step to step, the step, the host check, and the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from banach.latent import Latent, Space, leaves, select
from banach.solve.context import is_transformed, rounding, with_autocast_of
from banach.solve.picard import Picard
from banach.solve.solution import DEFERRED, Solution, Status
from banach.solve.solver import Point, Solver
from banach.solve.state import DIVERGED, IDLE, Array, State, all_on_device, on_device, to_numpy
from banach.solve.tolerance import RMS, Euclidean, Tolerance, WorstPixel

Map = Callable[..., Latent]
Versions = list[int | None]


class Run:
    """A solve in progress, and the samples that have left its batch."""

    def __init__(
        self,
        T: Map,
        solver: Solver,
        tolerance: Tolerance,
        space: Space,
        inputs: tuple[Any, ...],
        *,
        on_host: bool = False,
    ) -> None:
        self.T, self.solver, self.tolerance = with_autocast_of(space, T), solver, tolerance
        self.space = self.space_of_all = space
        self.inputs, self.on_host = inputs, on_host
        self.plain = space.is_matrix  # a latent that is its own rows
        self.busy = True
        self.shown = False  # True if `on_step` may hold the iterates
        self.measure, self.scale = tolerance.norm.measure, float(tolerance.norm.scale(space))
        # In the units of norm.measure, so that no step has to scale a residual; and a number of the rows' type.
        self.atol = float(tolerance.atol / self.scale)
        if self.atol > 1e30:
            self.atol = min(self.atol, torch.finfo(space.rows_dtype).max)
        self.whole: State | None = None  # the whole batch, once some samples have left it
        self.index: np.ndarray | None = None  # which samples of the whole batch are still here
        # What host checks have seen: all numbers at the last one, how many samples were nonfinite, the residual at
        # an evaluation soon after a sample froze, and which samples rose above the tolerance after they froze.
        self.seen: np.ndarray | None = None
        self.nonfinite = 0
        self.after: np.ndarray | None = None
        self.earlier: np.ndarray | None = None  # `after` before the last check
        self.risen: np.ndarray | None = None

    def start(self, z0: Latent) -> State:
        rows = self.space.rows(z0, "start").contiguous()
        memory = () if type(self.solver) is Picard else self.solver.start(rows)
        return State.start(rows, memory, relative=self.tolerance.rtol > 0, on_host=self.on_host)

    def sprint(self, state: State, *, compact: bool) -> int:
        """Take Picard steps while all residuals fall, and return how many.

        The common case of `step` and `check` in a few lines, for small networks on a CPU: every active sample is
        better than before, and every frozen one stays converged. `step` finishes the evaluation that ended it.
        """
        # These norms give new memory each time, in the type of the rows; not inside a torch.func transform.
        known = type(self.tolerance.norm) in (RMS, Euclidean, WorstPixel) and not is_transformed()
        if type(self.solver) is not Picard or not known or self.tolerance.rtol:
            return 0
        z, now, count, damping = state.z, state.least, state.count, self.solver.damping
        evaluate, measure, space, counted = self.evaluate, self.measure, self.space, np.count_nonzero
        atol = np.array(self.atol, now.dtype)  # compared faster than a float
        most, k, left, below = self.tolerance.max_steps, 0, count, now
        while left and k < most:
            Tz = state.Tz = evaluate(z, first=not k)
            seen = to_numpy(measure(Tz - z, space))
            active, frozen = seen > atol, left < count
            here = counted(active)
            if counted(seen < below) < count or (compact and here < count):
                state.pending = Tz - z, seen
                break
            state.best_z, now, k, left = z, seen, k + 1, here
            # A copy of T(z), since T may write its next value into the same memory.
            moved = torch.lerp(Tz, z, damping) if damping else Tz if frozen else Tz.clone()
            z = torch.where(state.mask, moved, z) if frozen else moved
            below = seen
            if left < count:
                state.record(k, seen, active)
                below = np.maximum(seen, atol)
        state.z = z
        if k:
            self._sprinted(state, now, k)
        return k

    def _sprinted(self, state: State, now: np.ndarray, k: int) -> None:
        """Note what the last of k evaluations saw, which is what a check sees: every residual is the least one."""
        stats = self.seen = state.stats
        self.busy = bool(state.count)
        if state.count == len(now):
            stats[:, 0], stats[:, 1] = now, k
        elif self.busy:
            stats[1] = stats[0]
            self.after = np.where(stats[0, 1] < k, now, np.nan)

    def step(self, state: State, k: int | Tensor, turn: int) -> None:
        """Evaluate T once, record the residual, move every sample that is still active.

        `turn` is the step as the solver counts it; in an exported program k is a tensor and turn repeats.
        """
        rtol = self.tolerance.rtol
        r, residual = self._measured(state, first=turn == 1)
        Tz = cast(Tensor, state.Tz)
        state.observe(k, residual, (self.measure(Tz, self.space).to(residual.dtype), rtol) if rtol else None)
        if type(self.solver) is Picard:
            damping = self.solver.damping
            proposal = torch.lerp(Tz, state.z, damping) if damping else Tz
        else:
            point = Point(turn, state.z, Tz, r, *state.numbers(), k)
            proposal, state.memory = self.solver.step(state.memory, point)
        state.advance(proposal)
        state.freeze(self.atol)

    def _measured(self, state: State, *, first: bool) -> tuple[Tensor, Array]:
        """Return T(z) - z and its norm per sample, from an evaluation at z unless there was one."""
        if state.pending is not None:
            known, state.pending = state.pending, None
            return known
        state.Tz = self.evaluate(state.z, first=first)
        r = state.Tz - state.z
        residual = self.measure(r, self.space)
        if first and residual.shape != r.shape[:1]:
            got = tuple(residual.shape)
            raise ValueError(f"norm.measure must give one number for each of {len(r)} rows, got shape {got}")
        return r, residual if residual.dtype == r.dtype else residual.to(r.dtype)

    def evaluate(self, z: Tensor, *, first: bool) -> Tensor:
        """Return the rows of T(z). The first evaluation also looks for mistakes that a T may make."""
        if first:
            return self._evaluate_first(z)
        if not self.plain:
            return self.space.rows(self.T(self.space.nest(z), *self.inputs))
        value = self.T(z, *self.inputs)
        if type(value) is Tensor and value.shape == z.shape and value.dtype == z.dtype:
            return value  # another device is refused by the subtraction
        return self.space.rows(value)

    def _evaluate_first(self, z: Tensor) -> Tensor:
        """Return the rows of T(z), and refuse a T that writes to what it was given.

        A tensor made in inference mode does not count writes, so T gets a copy of z that does.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling and z.is_inference():
            with torch.inference_mode(False):
                z = z.clone()
        given = [] if compiling else [z, *leaves(self.inputs)]  # Dynamo does not see the counts
        before = _versions(given)
        try:
            value = self.T(self.space.nest(z), *self.inputs)
        except RuntimeError as error:
            if any(word in str(error) for word in ("dtype", "scalar type", "device")):
                raise TypeError(
                    f"T cannot take z0 of {self.space.dtype} on {self.space.device} ({error}); "
                    "give z0 the dtype and device of T's weights"
                ) from error
            raise
        rows, after = self.space.rows(value), _versions(given)
        if after != before:
            what = "its input" if after[0] != before[0] else "`inputs` (in a network: R must not change v)"
            raise ValueError(f"T must not change {what} in place: begin with an operation that is not in place")
        return rows

    def check(self, state: State, k: int, *, compact: bool) -> State:
        """Find which samples are done; judge stalling; let done samples leave the batch. Syncs with the host."""
        stats = self.seen = state.stats if state.on_host else to_numpy(state.stats)
        test = stats[0, state.tested]
        active = test > self.atol
        if state.stalled is not None:
            active &= ~self._on_host(state.stalled)
        if k > IDLE:
            active &= ~self._stalled(state, active & (stats[1, 1] <= k - IDLE), stats[0, 0])
        count = np.count_nonzero(active)
        self.busy = bool(count)
        if count < len(active):
            self._note_frozen(stats, k)
            nonfinite = int(np.count_nonzero(~(test > -np.inf)))
            if nonfinite > self.nonfinite:
                self.nonfinite = nonfinite
                state.scrub()
        return self._without(state, ~active) if compact and self.busy else state

    def _stalled(self, state: State, idle: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Stall the idle samples whose residual is not more than rounding, and return which these are.

        In a divergence the norm of T(z) may overflow before that of the residual: then it tells nothing.
        """
        if not np.count_nonzero(idle) or state.Tz is None:
            return np.zeros_like(idle)
        size = to_numpy(self.measure(state.Tz, self.space))
        flat = idle & (residual <= rounding(self.space) * size) & (size < np.inf)
        if flat.any():
            state.stall(flat)
        return flat

    def _note_frozen(self, stats: np.ndarray, k: int) -> None:
        """Keep the residual of every frozen sample at the first check after it froze."""
        if self.after is None:
            self.after = np.full_like(stats[2, 0], np.nan)
        self.earlier = self.after.copy()
        np.copyto(self.after, stats[2, 0], where=np.isnan(self.after) & (stats[0, 1] < k))

    def _risen(self, state: State) -> np.ndarray | None:
        """Return the numbers of samples that converged and froze, but are above the tolerance now; None if none.

        Not those whose residual another sample cannot have raised: where T expands, the last step of a sample can
        raise its residual a little, to a value that then stays the same at every evaluation.
        """
        if self.seen is None or self.after is None or self.whole is not None:
            return None
        test, now, now_test = self.seen[0, state.tested], self.seen[2, 0], self.seen[2, state.tested]
        risen = (test <= self.atol) & ~(now_test <= self.atol)
        if not np.count_nonzero(risen):
            return None
        with np.errstate(invalid="ignore", over="ignore"):  # samples that diverge have infinite residuals
            earlier = np.nan if self.earlier is None else self.earlier
            steady = np.abs(now - earlier) <= 1e-3 * np.abs(earlier)
            alone = steady & (now <= 10 * (now - now_test + self.atol))  # 10 times what the tolerance allows
        found = np.flatnonzero(risen & ~alone)
        return found if len(found) else None

    def everyone(self, state: State) -> State:
        """Return the whole batch: the samples that are here put back among those that have left."""
        if self.whole is None or self.index is None:
            return state
        self.whole.put(self.index, state)
        return self.whole

    def _without(self, state: State, done: np.ndarray) -> State:
        """Return the state without those that are done, if enough are: leaving costs a copy of what stays."""
        if 16 * done.sum() < done.size:
            return state
        stay = np.flatnonzero(~done)
        self.whole = self.everyone(state)
        self.index = stay if self.index is None else self.index[stay]
        self.inputs = select(self.inputs, on_device(stay, state.z))
        self.space = self.space.resized(len(stay))
        self.nonfinite, self.after, self.earlier = 0, None, None
        left = state.take(stay)
        self.whole.memory = ()
        return left

    def residual(self, state: State) -> Tensor:
        """Return a copy of the residuals of the whole batch, as they are now, in the units of norm.measure."""
        now = self.everyone(state).residual
        return on_device(now.copy(), state.z) if self.on_host else now.clone()

    def finish(self, state: State, trace: list[Tensor] | None) -> Solution:
        """Return the solution: scaled residuals, and the best iterate where that is kept.

        If the host keeps the numbers, they become tensors when they are read, which most passes never do.
        """
        self.risen = self._risen(state)
        state = self.everyone(state)
        found: dict[str, Any] = {"solver": self.solver, "tolerance": self.tolerance}
        if trace is not None:
            found["residuals"] = tuple(self.space_of_all.spread(row * self.scale) for row in trace)
        met = state.test <= self.atol
        if not self.on_host or state.tested or np.count_nonzero(met) < len(met):
            return self._finish(state, met, found)
        if state.Tz is None or self.shown:  # the value would share its memory with z0, or with what on_step saw
            state.z = state.z.clone()
        numbers = partial(_numbers, self.space_of_all, self.scale, state.reached, met)
        return Solution.deferred(self.space_of_all.nest(state.z), numbers, found)

    def _finish(self, state: State, met: Any, found: dict[str, Any]) -> Solution:
        space, nonfinite, residual = self.space_of_all, state.nonfinite, state.residual
        stalled = met ^ met if state.stalled is None else state.stalled
        diverged = (residual > DIVERGED * state.least) & ~(met | stalled | nonfinite)
        best, met = nonfinite | diverged, met & ~nonfinite
        mask = on_device(best, state.z) if self.on_host else best
        value = space.nest(torch.where(mask[:, None], state.best_z, state.z).detach())
        reached = (np.where if self.on_host else torch.where)(best, state.best, state.reached)
        steps = state.reached[1]
        if self.seen is not None:
            found["failures"] = self._failures(state)
        if self.on_host:
            numbers = partial(
                _numbers, space, self.scale, (reached[0], steps), met, (stalled, nonfinite, diverged)
            )
            return Solution.deferred(value, numbers, found)
        parts = (reached[0] * self.scale, met, steps.long(), stalled, nonfinite, diverged)
        named: dict[str, Any] = dict(zip(DEFERRED, map(space.spread, parts), strict=True))
        return Solution(value=value, **named, **found)

    def _failures(self, state: State) -> frozenset[Status]:
        """Return how samples failed, from what the last check has seen, for warnings that need no host sync."""
        seen = self.seen if self.whole is None else self._on_host(state.stats)
        test = cast(np.ndarray, seen)[0, state.tested]
        nonfinite = ~(test > -np.inf)
        stalled = np.zeros_like(nonfinite) if state.stalled is None else self._on_host(state.stalled)
        masks = (nonfinite, stalled, (test > self.atol) & ~stalled)
        kinds = (Status.NONFINITE, Status.STALLED, Status.MAX_STEPS)
        return frozenset(status for status, mask in zip(kinds, masks, strict=True) if mask.any())

    def _on_host(self, part: Any) -> np.ndarray:
        return part if isinstance(part, np.ndarray) else to_numpy(part)


def _numbers(space: Space, scale: float, reached: Any, met: np.ndarray, flags: Any = None) -> dict[str, Tensor]:
    """Return the tensors of a solution, by name, from arrays: (residual, steps), met, and the three flags."""
    residual = reached[0] * reached[0].dtype.type(scale)
    flags = [np.zeros(len(met), bool) for _ in range(3)] if flags is None else flags
    arrays = (residual, met, reached[1].astype(np.int64), *flags)
    shown = all_on_device(arrays, leaves(space.template)[0])
    return dict(zip(DEFERRED, map(space.spread, shown), strict=True))


def _versions(tensors: list[Tensor]) -> Versions:
    """Return how often each tensor was written to; None where that is not counted."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]
