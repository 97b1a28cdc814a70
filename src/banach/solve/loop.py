"""solve(): the one loop that evaluates T, exactly once per step, whatever the solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from banach.latent import Latent, Space, detach, leaves, select
from banach.solve.exported import run_exported
from banach.solve.picard import Picard
from banach.solve.precision import rounding, with_autocast_of, without_autocast
from banach.solve.solution import NotConverged, Solution
from banach.solve.solver import Point, Solver
from banach.solve.state import Seen, State, finish, to_numpy
from banach.solve.tolerance import Tolerance

Map = Callable[..., Latent]


@torch.no_grad()
def solve(
    T: Map,
    z0: Latent,
    solver: Solver = Picard(),
    *,
    inputs: tuple[Any, ...] = (),
    tolerance: Tolerance = Tolerance(),
    coupled: bool = False,
    compact: bool = False,
    record: bool = False,
    on_step: Callable[[int, Latent], None] | None = None,
    throw: bool = False,
) -> Solution:
    """Find z = T(z, *inputs), starting at z0, without recording a gradient.

    A converged sample is frozen, so its answer does not depend on who else is in the batch; with
    `compact=True` it leaves the batch instead (then all that belongs to a sample must be in `inputs`).
    `coupled=True`: the samples share statistics, and the batch stops as one. `record=True` keeps the
    residuals (`Solution.trace`). `on_step(k, z)` sees every iterate. `throw=True` raises `NotConverged`
    unless every sample converged.
    """
    _check(T, solver, inputs, tolerance)
    space = Space.of(z0, coupled=coupled)
    if compact:
        _check_compact(space, inputs)
    # torch 2.11 says so under torch.compile as well; there the loop is Python's.
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    asks = tolerance.check_every == 1 and not exporting
    run = Run(T, solver, tolerance, space, detach(tuple(inputs)), asks_each_step=asks)
    state = run.start(detach(z0))
    trace: list[Tensor] | None = [] if record else None
    if exporting:
        state, steps = run_exported(run, state), range(0)
    else:
        steps = range(1, tolerance.max_steps + 1)
    with without_autocast(space):
        for k in steps:
            run.step(state, k, k)
            if trace is not None:
                trace.append(run.everyone(state).reached[0].clone())
            if on_step is not None:
                on_step(k, space.nest(run.everyone(state).z))
            if tolerance.check_every and k % tolerance.check_every == 0:
                state = run.check(state, k, compact=compact)
                if not run.busy:
                    break
        solution = finish(run.everyone(state), space, tolerance, trace, run.nonfinite)
    if throw and not bool(solution.converged.all()):
        raise NotConverged(solution)
    return solution


class Run:
    """One solve: what stays the same from step to step, and the samples that have left the batch."""

    def __init__(
        self,
        T: Map,
        solver: Solver,
        tolerance: Tolerance,
        space: Space,
        inputs: tuple[Any, ...],
        *,
        asks_each_step: bool = False,
    ) -> None:
        self.T, self.solver, self.tolerance = with_autocast_of(space, T), solver, tolerance
        self.space, self.inputs = space, inputs
        self.eps = rounding(space)
        self.busy = True
        # Then the host can keep the best iterate by reference, and masks nothing while all are active.
        self.asks_each_step = asks_each_step
        # In the units of norm.measure, so that no step has to scale a residual.
        self.atol = tolerance.atol / tolerance.norm.scale(space)
        self.whole: State | None = None  # the whole batch, once some samples have left it
        self.index: Tensor | None = None  # which samples of the whole batch are still here
        self.nonfinite = self.nonfinite_left = 0  # samples the host knows of: in all, and among those gone

    def start(self, z0: Latent) -> State:
        rows = self.space.rows(z0, "start").contiguous()
        return State.start(rows, self.solver.start(rows), relative=self.tolerance.rtol > 0)

    def step(self, state: State, k: int | Tensor, turn: int) -> None:
        """Evaluate T once, record the residual, move every sample that is still active.

        `turn` is the step as the solver counts it; in an exported program k is a tensor and turn repeats.
        """
        rtol = self.tolerance.rtol
        Tz = self.space.rows(self._evaluate(state.z, first=turn == 1))
        r = Tz - state.z
        state.Tz = Tz
        state.observe(k, self._size(r), (self._size(Tz), rtol) if rtol else None)
        point = Point(turn, state.z, Tz, r, state.residual, state.least, state.least_at, k)
        proposal, state.memory = self.solver.step(state.memory, point)
        state.advance(proposal)
        if not self.asks_each_step:
            state.freeze(self.atol)
            state.keep_best()

    @torch.compiler.disable  # the host decides here: traced, it would be compiled anew at every step
    def check(self, state: State, k: int, *, compact: bool) -> State:
        """Ask the host which samples are done; judge stalling; let done samples leave the batch."""
        seen = state.on_host(k, self.atol)
        active = seen.active
        if self.asks_each_step:
            self._keep_best(state, seen)
            if not active.all():
                state.freeze(self.atol)
        if seen.idle.any() and state.Tz is not None:
            flat = seen.idle & (seen.residual <= self.eps * to_numpy(self._size(state.Tz)))
            if flat.any():
                state.stall(flat)
                active = active & ~flat
        nonfinite = int(seen.nonfinite.sum()) + self.nonfinite_left
        if nonfinite > self.nonfinite:
            self.nonfinite = nonfinite
            state.scrub()
        self.busy, state.all_active = bool(active.any()), bool(active.all())
        # Leaving costs a copy of what stays: worth it when at least one in sixteen is done.
        if compact and self.busy and 16 * (active.size - active.sum()) >= active.size:
            return self._let_go(state, active)
        return state

    def _evaluate(self, z: Tensor, *, first: bool) -> Latent:
        before = _version(z) if first else None
        try:
            value = self.T(self.space.nest(z), *self.inputs)
        except RuntimeError as error:
            if first and any(word in str(error) for word in ("dtype", "scalar type", "device")):
                raise TypeError(
                    f"T cannot take z0 of {self.space.dtype} on {self.space.device} ({error}); "
                    "give z0 the dtype and device of T's weights"
                ) from error
            raise
        if first and _version(z) != before:
            raise ValueError("T must not change its input in place: begin with an operation that is not in place")
        return value

    def _size(self, rows: Tensor) -> Tensor:
        return self.tolerance.norm.measure(rows, self.space)

    def _keep_best(self, state: State, seen: Seen) -> None:
        """What `State.keep_best` does, without a kernel where all samples got better, or none did."""
        if seen.better.all():
            state.best_z = state.z_before
        elif seen.better.any():
            state.best_z = torch.where(state.better.unsqueeze(1), state.z_before, state.best_z)

    def everyone(self, state: State) -> State:
        """The whole batch: the samples that are here put back among those that have left."""
        if self.whole is None or self.index is None:
            return state
        self.whole.put(self.index, state)
        return self.whole

    def _let_go(self, state: State, active: np.ndarray) -> State:
        stay = torch.from_numpy(np.flatnonzero(active)).to(self.space.device)
        self.whole = self.everyone(state)
        self.index = stay if self.index is None else self.index.index_select(0, stay)
        self.inputs = select(self.inputs, stay)
        self.space = self.space.resized(len(stay))
        self.nonfinite_left = self.nonfinite
        left = state.take(stay)
        self.whole.memory = ()
        return left


def _version(z: Tensor) -> int | None:
    """How often z was written to, where that can be known: it costs nothing to ask."""
    return None if torch.compiler.is_compiling() or z.is_inference() else z._version


def _check(T: Map, solver: Solver, inputs: tuple[Any, ...], tolerance: Tolerance) -> None:
    if not callable(T):
        raise TypeError(f"T must be callable, got {type(T).__name__}")
    if isinstance(solver, type) or not hasattr(solver, "step"):
        raise TypeError(f"solver must be a solver object such as Picard() or Anderson(), got {solver!r}")
    if not isinstance(tolerance, Tolerance):
        raise TypeError(f"tolerance must be a Tolerance, got {tolerance!r}; write Tolerance(atol=...)")
    if not isinstance(inputs, (tuple, list)):
        raise TypeError(f"inputs must be a tuple of tensors, got {type(inputs).__name__}; write inputs=(x,)")
    leaves(inputs, "each of `inputs`")


def _check_compact(space: Space, inputs: tuple[Any, ...]) -> None:
    if space.coupled:
        raise ValueError(
            "compact=True needs independent samples, but these are coupled and stop as one; leave it out"
        )
    if not inputs:
        raise ValueError(
            "compact=True needs what belongs to a sample in `inputs`, since a closure cannot be cut: T(z, *inputs)"
        )
    for leaf in leaves(inputs):
        if leaf.shape[:1] != (space.batch,):
            raise ValueError(
                f"compact=True cuts every tensor of `inputs` along the batch: expected {space.batch} rows, "
                f"got shape {tuple(leaf.shape)}; let T close over what is not per sample"
            )
