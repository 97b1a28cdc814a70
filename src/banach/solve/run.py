"""One solve: what stays the same from step to step, the step, the host check, and the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from banach.latent import Latent, Space, leaves, map_leaves, select, versions
from banach.solve.context import functorch, is_transformed, rounding, unwrap_derivatives, with_autocast_of
from banach.solve.picard import Picard
from banach.solve.solution import DEFERRED, Solution, Status
from banach.solve.solver import Map, Point, Solver
from banach.solve.state import DIVERGED, IDLE, RESIDUAL, Array, State, count_nonzero, on_device, to_numpy
from banach.solve.tolerance import Tolerance

_VMAPPED = (
    "torch.func.vmap cannot map over a solve, whose length follows the data: put what is mapped over on the first "
    "(batch) axis, for an ensemble by a T such as lambda z: vmap(R)(weights, z); for per-sample gradients solve "
    "first, then vmap(grad(...)) with z0=z* and max_steps=0"
)


@dataclass
class SolveRun:
    """A solve in progress, and the samples that have left its batch."""

    T: Map
    solver: Solver
    tolerance: Tolerance
    space: Space
    inputs: tuple[Any, ...]
    on_host: bool = False

    def __post_init__(self) -> None:
        self.T, self.space_of_all = with_autocast_of(self.space, self.T), self.space
        self.busy = True  # some sample is active, as far as the host knows
        # Picard's formula is written out here: calling its methods takes longer than a small T.
        self.damping = self.solver.damping if type(self.solver) is Picard else None
        norm = self.tolerance.norm
        self.measure, self.scale = norm.measure, float(norm.scale(self.space))
        # In the units of norm.measure, so that no step has to scale a residual, and within the range of the dtype.
        self.atol = min(float(self.tolerance.atol / self.scale), torch.finfo(self.space.rows_dtype).max)
        self.whole: State | None = None  # the whole batch, once some samples have left it
        self.index: np.ndarray | None = None  # which samples of the whole batch are still here
        # What host checks have seen: all numbers at the last one, and which samples rose above the tolerance after
        # they froze.
        self.seen: State | None = None
        self.risen: Array | None = None
        # At the last two evaluations that the host saw since a sample froze.
        self.previous_residuals: tuple[Array, Array] = (np.nan, np.nan)

    def start(self, z0: Latent) -> State:
        rows = self.space.rows(z0, "start").contiguous()
        memory, relative = self.solver.start(rows) if self.damping is None else (), self.tolerance.rtol > 0
        return State.start(rows, memory, self.atol, relative=relative, on_host=self.on_host)

    def sprint(self, state: State, k: int, *, compact: bool) -> int:
        """Run Picard steps from evaluation k on, each checked by the host, and return the new count.

        A sprint is `step` and `check`, many times, with less Python, which costs more than a small T: numbers are
        in local variables, and go to the state when samples freeze and at the end. It stops at an evaluation with
        a nonfinite residual, a sample that may have stalled or, if `compact`, a sample to remove: `step` finishes
        that one, from `state.pending`.
        """
        z, best_z, batch, count = state.z, state.best_z, len(state.z), state.count  # count: of active samples
        atol = np.array(self.atol, state.least.dtype)  # compared faster than a float
        evaluate, measure, space, counted = self.evaluate, self.measure, self.space, count_nonzero
        read = Tensor.numpy if z.is_cpu else to_numpy
        damping, first = self.damping, k
        rtol, most = self.tolerance.rtol, self.tolerance.max_steps
        least, least_at = np.where(state.active, state.least, np.inf), state.least_at
        before = now = test = least
        while count and k < most:
            Tz = evaluate(z, first=not k)
            r = Tz - z
            measured = measure(r, space)
            if rtol:
                measured = torch.stack((measured, torch.sub(measured, measure(Tz, space), alpha=rtol)))
                residual, excess = read(measured)
            else:
                residual = excess = read(measured)
            active, better = excess > atol, residual < least
            if count < batch:
                active &= state.active
            going_on, fell = counted(active), counted(better)
            if (fell < batch or rtol or compact) and (
                (compact and going_on < batch)  # samples may leave the batch
                or (rtol and counted(excess > -np.inf) < batch)  # the norm of T(z) is infinite
                or (fell < batch and counted(better | (residual < np.inf)) < batch)  # a residual is not finite
                or (fell < batch and self.flat(active & (k + 1 >= least_at + IDLE), residual, Tz).any())  # stalled
            ):
                state.Tz, state.pending = Tz, (r, measured[0] if rtol else measured)
                break
            k, before, now, test = k + 1, now, residual, excess
            if fell == batch:
                best_z, least, least_at = z, residual, k
            else:
                least, least_at = np.where(better, residual, least), np.where(better, k, least_at)
                best_z = torch.where(state.column(better), z, best_z) if fell else best_z
            if count < batch:
                z = torch.where(state.column(state.active), torch.lerp(Tz, z, damping) if damping else Tz, z)
            else:  # a copy of T(z), since T may write its next value into the same memory
                z = torch.lerp(Tz, z, damping) if damping else Tz.clone()
            if going_on < batch:
                # Frozen samples count as better, so that only an unusual one takes longer.
                least = np.where(active, least, np.inf) if rtol else np.maximum(least, atol)
                state.record(k, residual, excess, active)
                count = going_on
        state.z, state.best_z = z, best_z
        if k > first:
            self.previous_residuals = before, now
            self.note_last(state, k, (now, test), (least, least_at))
        return k

    def flat(self, idle: np.ndarray, residual: np.ndarray, Tz: Tensor) -> np.ndarray:
        """Return which idle samples have a residual of rounding alone: they stall."""
        if not count_nonzero(idle):
            return idle
        size = to_numpy(self.measure(Tz, self.space))
        # In a divergence the norm of T(z) may overflow before that of the residual: then it is ignored.
        return idle & (residual <= rounding(self.space) * size) & (size < np.inf)

    def note_last(self, state: State, k: int, last: tuple[Array, Array], best: tuple[Array, Array]) -> None:
        """Note what a check would see after the k-th evaluation."""
        self.seen, self.busy = state, bool(state.count)
        if state.count == len(state.z):
            state.record(k, *last, state.active)
        if self.busy:
            np.copyto(state.least, best[0], where=state.active)
            np.copyto(state.least_at, best[1], where=state.active)
            np.fmin(state.least, state.residual, out=state.least)  # of samples that froze meanwhile

    def step(self, state: State, k: int | Tensor, turn: int) -> None:
        """Evaluate T once, record the residual, move every sample that is still active.

        `k` counts evaluations: a tensor in a captured or exported loop, where the solver's steps, `turn`, repeat.
        """
        rtol = self.tolerance.rtol
        r, residual = self._measured(state, first=turn == 1)
        Tz = cast(Tensor, state.Tz)
        state.observe(k, residual, (self.measure(Tz, self.space).to(residual.dtype), rtol) if rtol else None)
        if self.damping is not None:
            proposal = torch.lerp(Tz, state.z, self.damping) if self.damping else Tz
        else:
            point = Point(turn, state.z, Tz, r, *state.for_solver(), k)
            proposal, state.memory = self.solver.step(state.memory, point)
        state.advance(proposal)
        state.freeze()

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
        if not self.space.is_matrix:
            return self.space.rows(self.T(self.space.nest(z), *self.inputs))
        value = self.T(z, *self.inputs)
        if type(value) is Tensor and value.shape == z.shape and value.dtype == z.dtype:
            return value  # another device is refused by the subtraction
        return self.space.rows(value)

    def _evaluate_first(self, z: Tensor) -> Tensor:
        """Return the rows of T(z), and refuse a T that writes to what it was given."""
        compiling = torch.compiler.is_compiling()
        nest = self.space.nest(z)
        if not compiling and leaves(nest)[0].is_inference():  # such a tensor does not count writes, a copy does
            with torch.inference_mode(False):
                nest = map_leaves(Tensor.clone, nest)
        # Not z, of which a nest or a short type is a copy. Dynamo does not see the counts.
        given = () if compiling else (leaves(nest), leaves(self.inputs))
        before = [versions(part) for part in given]
        try:
            value = self.T(nest, *self.inputs)
        except RuntimeError as error:  # subclasses, such as a CUDA error of an earlier kernel, have other causes
            if type(error) is RuntimeError and any(w in str(error) for w in ("dtype", "scalar type", "device")):
                got = f"T cannot take z0 of {self.space.dtype} on {self.space.device} ({error})"
                raise TypeError(f"{got}; give z0 the dtype and device of T's weights") from error
            raise
        rows, after = self.space.rows(value), [versions(part) for part in given]
        mapped = map(functorch.is_batchedtensor, map(unwrap_derivatives, (z, rows)))
        if not compiling and is_transformed() and any(mapped):
            raise RuntimeError(_VMAPPED)
        if after != before:
            what = "its input" if after[0] != before[0] else "`inputs` (in a network: R must not change v)"
            raise ValueError(f"T must not change {what} in place: begin with an operation that is not in place")
        return rows

    def check(self, state: State, k: int, *, compact: bool) -> State:
        """Find which samples are done; judge stalling; let done samples leave the batch. Syncs with the host."""
        seen = self.seen = state.read()
        if k > IDLE:
            flat = self.flat(seen.active & (seen.least_at <= k - IDLE), seen.residual, cast(Tensor, state.Tz))
            if flat.any():
                state.stall(flat)
                seen.stall(flat)
        self.busy = bool(seen.count)
        if seen.count < len(seen.active):
            self.previous_residuals = self.previous_residuals[1], seen.now[RESIDUAL].copy()
            if count_nonzero(seen.nonfinite):  # T never sees NaN, but the best finite iterate
                state.z = torch.where(state.column(state.nonfinite), state.best_z, state.z)
        return self._without(state, ~seen.active) if compact and self.busy else state

    def _risen_since_frozen(self) -> np.ndarray | None:
        """Return which samples converged and froze, but are above the tolerance now; None if none.

        Not those whose residual another sample cannot have raised: where T expands, the last step of a sample can
        raise its residual a little, to a value that is then equal at every evaluation, while other samples move.
        """
        seen = self.seen
        if seen is None or self.whole is not None:
            return None
        now, now_test = seen.now[RESIDUAL], seen.now[seen.tested]
        met_now = now_test <= self.atol
        if count_nonzero(met_now) == len(met_now):
            return None
        risen = ~met_now & (seen.test <= self.atol)
        with np.errstate(invalid="ignore", over="ignore"):  # samples that diverge have infinite residuals
            # Equal, not close: other samples may move, and raise it, slowly. 10 times what the tolerance allows.
            alone = (now == self.previous_residuals[0]) & (now <= 10 * (now - now_test + self.atol))
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
        rest = state.take(stay)
        self.whole.memory = ()
        return rest

    def residual(self, state: State) -> Tensor:
        """Return a copy of the residuals of the whole batch, as they are now, in the units of norm.measure."""
        now = self.everyone(state).residual
        return on_device(now.copy(), state.z) if self.on_host else now.clone()

    def finish(self, state: State, trace: list[Tensor] | None, *, shown: bool = False) -> Solution:
        """Return the solution. `shown`: `on_step` may hold the iterates, so the value needs memory of its own."""
        self.risen = self._risen_since_frozen()
        state, space = self.everyone(state), self.space_of_all
        found: dict[str, Any] = {"solver": self.solver, "tolerance": self.tolerance}
        if trace is not None:
            found["residuals"] = tuple(space.spread(row * self.scale) for row in trace)
        met = (state.test <= self.atol) & ((state.test > -np.inf) if state.tested else True)
        if self.on_host and count_nonzero(met) == len(met):  # most passes
            value, columns = state.z.clone() if shown else state.z, [state.residual, state.steps, met]
        else:
            met, stalled, nonfinite = self._ends(state)
            diverged = (state.residual > DIVERGED * state.least) & ~(met | stalled | nonfinite)
            best = nonfinite | diverged
            residual = (np.where if self.on_host else torch.where)(best, state.least, state.residual)
            value = torch.where(state.column(best), state.best_z, state.z).detach()
            columns = [residual, state.steps, met, stalled, nonfinite, diverged]
            found["failures"] = self._failures(state)
        value = space.nest(value)
        # It holds neither T nor its inputs. Numbers of the host become tensors when they are read: most never are.
        per_sample = partial(_per_sample, space, self.scale, columns)
        if self.on_host:
            return Solution.deferred(value, per_sample, found)
        return Solution(value, **per_sample(), **found)

    def _ends(self, state: State) -> tuple[Array, Array, Array]:
        """Return which samples converged, stalled (only checks judge that) and are nonfinite."""
        met, above = state.test <= self.atol, state.test > self.atol
        return met & ~state.nonfinite, above & ~(state.test > state.limit), state.nonfinite

    def _failures(self, state: State) -> frozenset[Status]:
        """Return how samples failed, from what the last check has seen, for warnings that need no host sync."""
        if self.seen is None:
            return frozenset()
        met, stalled, nonfinite = self._ends(self.seen if self.whole is None else state.read())
        masks = (~(met | stalled | nonfinite), stalled, nonfinite)
        return frozenset(kind for kind, mask in zip(tuple(Status)[1:], masks, strict=True) if mask.any())


def _per_sample(space: Space, scale: float, columns: Sequence[Array]) -> dict[str, Any]:
    """Return the tensors of a solution by name. The last three columns are left out if all samples converged."""
    if isinstance(columns[0], np.ndarray):
        table = np.zeros((len(DEFERRED), len(columns[0])), columns[0].dtype)
        table[: len(columns)] = columns
        columns = on_device(table, leaves(space.template)[0]).unbind()
    residual, steps, met, *flags = columns
    parts = (residual * scale, met.bool(), steps.long(), *(flag.bool() for flag in flags))
    return dict(zip(DEFERRED, map(space.spread, parts), strict=True))
