"""One solve: what stays the same from step to step, the step, and the look from the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from banach.latent import Latent, Space, leaves, select
from banach.solve.precision import rounding, with_autocast_of
from banach.solve.solution import Solution, Status
from banach.solve.solver import Memory, Point, Solver
from banach.solve.state import State, finish, on_device, rises_alone, to_numpy
from banach.solve.tolerance import Tolerance

Map = Callable[..., Latent]
Versions = list[int | None]


class Samples(Protocol):
    """What a run knows of a state: it can be rid of NaN, and samples taken out of it and put back."""

    z: Tensor
    memory: Memory

    def scrub(self) -> None: ...

    def take(self, chosen: np.ndarray) -> Self: ...

    def put(self, chosen: np.ndarray, part: Self) -> None: ...


S = TypeVar("S", bound=Samples)


class Base(Generic[S]):
    """What a run is made of, and the samples that have left its batch."""

    def __init__(
        self, T: Map, solver: Solver, tolerance: Tolerance, space: Space, inputs: tuple[Any, ...]
    ) -> None:
        self.T, self.solver, self.tolerance = with_autocast_of(space, T), solver, tolerance
        self.space, self.inputs = space, inputs
        self.space_of_all = space
        self.plain = space.is_matrix  # a latent that is its own rows
        self.busy = True
        self.shown = False  # does anybody hold the iterates?
        self.measure, self.scale = tolerance.norm.measure, float(tolerance.norm.scale(space))
        # In the units of norm.measure, so that no step has to scale a residual; and a number of the rows' type.
        self.atol = float(tolerance.atol / self.scale)
        if self.atol > 1e30:
            self.atol = min(self.atol, torch.finfo(space.rows_dtype).max)
        self.whole: S | None = None  # the whole batch, once some samples have left it
        self.index: np.ndarray | None = None  # which samples of the whole batch are still here
        # What host checks have seen: how often nonfinite (here, and among those that left), how samples failed,
        # and which ones converged but were above the tolerance later.
        self.nonfinite = self.nonfinite_left = 0
        self.failures: frozenset[Status] = frozenset()
        self.failures_left: frozenset[Status] = frozenset()
        self.risen: np.ndarray | None = None
        self.after: np.ndarray | None = None  # the residual at the first check that found a sample frozen

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
        given = [z, *leaves(self.inputs)] if self.inputs else [z]
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
        rows = self.space.rows(value)
        self._check_unwritten(z, value, before, _versions(given))
        return rows

    def _check_unwritten(self, z: Tensor, value: Latent, before: Versions, after: Versions) -> None:
        """Refuse a T that has written to what it was given.

        A tensor made in inference mode has no version: a write to z is noticed where T returns z's own memory,
        and a write to `inputs` is not.
        """
        if not after or (after == before and after[0] is not None):  # not counted while compiling
            return
        if after[0] != before[0] or (after[0] is None and _shares_memory(z, value) and self._writes_to(z)):
            raise ValueError("T must not change its input in place: begin with an operation that is not in place")
        if after != before:
            raise ValueError(
                "T must not change `inputs` (in a network: R must not change v) in place: "
                "begin with an operation that is not in place"
            )

    def _writes_to(self, z: Tensor) -> bool:
        """Does T write to its input? Asked once more, of a copy that has a version; the identity does not."""
        with torch.inference_mode(False):
            copy = z.clone()
        before = copy._version
        self.T(self.space.nest(copy), *self.inputs)
        return copy._version != before

    def size(self, rows: Tensor) -> Tensor:
        return self.measure(rows, self.space)

    def flat(self, idle: np.ndarray, residual: np.ndarray, Tz: Tensor) -> np.ndarray:
        """Of the idle samples, those whose residual is no more than rounding.

        In a divergence the norm of T(z) may overflow before that of the residual: then it tells nothing.
        """
        size = to_numpy(self.size(Tz))
        return idle & (residual <= rounding(self.space) * size) & (size < np.inf)

    def present(self, risen: np.ndarray | None) -> np.ndarray | None:
        """Return the numbers, in the whole batch, of the samples in this mask; None if there are none."""
        if risen is None or not risen.any():
            return None
        here = np.flatnonzero(risen)
        return here if self.index is None else self.index[here]

    def count_failures(self, met: np.ndarray, stalled: np.ndarray, nonfinite: np.ndarray) -> None:
        """Record how samples failed, for warnings that need no host sync."""
        kinds = set()
        if not met.all():
            kinds |= {Status.NONFINITE} if nonfinite.any() else set()
            kinds |= {Status.STALLED} if stalled.any() else set()
            kinds |= {Status.MAX_STEPS} if not (met | nonfinite | stalled).all() else set()
        self.failures = self.failures_left | kinds

    def everyone(self, state: S) -> S:
        """The whole batch: the samples that are here put back among those that have left."""
        if self.whole is None or self.index is None:
            return state
        self.whole.put(self.index, state)
        return self.whole

    def looked(self, state: S, active: np.ndarray, nonfinite: np.ndarray, *, compact: bool) -> S:
        """The end of a look: T never sees NaN again; is there more to do, and for whom?"""
        count = int(np.count_nonzero(nonfinite)) + self.nonfinite_left
        if count > self.nonfinite:
            self.nonfinite = count
            state.scrub()
        self.busy = bool(np.count_nonzero(active))
        return self.without(state, ~active) if compact and self.busy else state

    def without(self, state: S, done: np.ndarray) -> S:
        """The state without those that are done, if enough are: leaving costs a copy of what stays."""
        if 16 * done.sum() < done.size:
            return state
        stay = np.flatnonzero(~done)
        self.whole = self.everyone(state)
        self.index = stay if self.index is None else self.index[stay]
        self.inputs = select(self.inputs, on_device(stay, state.z))
        self.space = self.space.resized(len(stay))
        self.nonfinite_left, self.failures_left = self.nonfinite, self.failures - {Status.MAX_STEPS}
        self.after = None
        left = state.take(stay)
        self.whole.memory = ()
        return left


def check_measured(residual: Tensor, rows: Tensor) -> None:
    """Is it one number for every row?"""
    if residual.shape != rows.shape[:1]:
        got = tuple(residual.shape)
        raise ValueError(f"norm.measure must give one number for each of {len(rows)} rows, got shape {got}")


class Run(Base[State]):
    """The device keeps the numbers, so that the host need not be asked."""

    def start(self, z0: Latent) -> State:
        rows = self.space.rows(z0, "start").contiguous()
        return State.start(rows, self.solver.start(rows), relative=self.tolerance.rtol > 0)

    def step(self, state: State, k: int | Tensor, turn: int) -> None:
        """Evaluate T once, record the residual, move every sample that is still active.

        `turn` is the step as the solver counts it; in an exported program k is a tensor and turn repeats.
        """
        rtol = self.tolerance.rtol
        state.Tz = Tz = self.evaluate(state.z, first=turn == 1)
        r = Tz - state.z
        residual, kind = self.size(r), state.residual.dtype  # a norm may compute in a longer type
        if turn == 1:
            check_measured(residual, r)
        state.observe(k, residual.to(kind), (self.size(Tz).to(kind), rtol) if rtol else None)
        point = Point(turn, state.z, Tz, r, state.residual, state.least, state.least_at, k)
        proposal, state.memory = self.solver.step(state.memory, point)
        state.advance(proposal)
        state.freeze(self.atol)
        state.keep_best()

    @torch.compiler.disable  # the host decides here: traced, it would be compiled anew at every step
    def check(self, state: State, k: int, *, compact: bool) -> State:
        """Ask the host which samples are done; judge stalling; let done samples leave the batch."""
        seen = state.on_host(k, self.atol)
        active = seen.active
        if seen.idle.any() and state.Tz is not None:
            flat = self.flat(seen.idle, seen.residual, state.Tz)
            if flat.any():
                state.stall(flat)
                active = active & ~flat
        before = np.full_like(seen.now, np.nan) if self.after is None else self.after
        self.risen = self.present(seen.risen & ~rises_alone(seen.now, seen.now_test, before, self.atol))
        self.after = np.where(seen.active | ~np.isnan(before), before, seen.now)
        stalled = np.zeros_like(active) if state.stalled is None else to_numpy(state.stalled)
        self.count_failures(~active & ~seen.nonfinite & ~stalled, stalled, seen.nonfinite)
        return self.looked(state, active, seen.nonfinite, compact=compact)

    def residual(self, state: State) -> Tensor:
        """Of everyone, as it is now: a copy."""
        return self.everyone(state).reached[0].clone()

    def finish(self, state: State, trace: list[Tensor] | None) -> Solution:
        known = {"solver": self.solver, "failures": self.failures}
        return finish(self.everyone(state), self.space_of_all, self.tolerance, trace, **known)


def _versions(tensors: list[Tensor]) -> Versions:
    """Return how often each tensor was written to; None where that is not counted."""
    if torch.compiler.is_compiling():
        return []
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def _shares_memory(z: Tensor, value: Latent) -> bool:
    """Return True if a part of the value is where z is. A T that is not in place makes new memory."""
    if torch.compiler.is_compiling():
        return False
    try:
        where = z.untyped_storage().data_ptr()
        return any(leaf.untyped_storage().data_ptr() == where for leaf in leaves(value))
    except NotImplementedError:  # inside a torch.func transform a tensor has no storage of its own
        return False
