"""A solve whose host sees every residual: the host keeps all numbers, as NumPy arrays.

The device evaluates T and one norm a step, and moves the samples. `State` computes the rest there with several
small kernels a step, each of which costs as much as one of T's; here it is arithmetic on a few numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from banach.latent import Latent, Space, leaves
from banach.solve.picard import Picard
from banach.solve.precision import is_transformed
from banach.solve.run import Base, check_measured
from banach.solve.solution import Solution
from banach.solve.solver import Memory, Point
from banach.solve.state import DIVERGED, IDLE, all_on_device, on_device, rises_alone, to_numpy
from banach.solve.tolerance import RMS, Euclidean, WorstPixel

Numbers = int | np.ndarray  # of evaluations: one for all samples, or one for each


@dataclass
class HostState:
    """One row per sample, whose numbers stop changing when it freezes. Arrays are replaced, never written to,
    so that tensors may share their memory. Little is computed while all residuals fall (`falling`): then `least`
    is `residual`, `least_at` is `steps`, and every sample is finite. While all samples are active, `active` is
    None and `steps` one number.
    """

    z: Tensor  # (samples, width)
    best_z: Tensor  # the iterate whose own residual is least, of samples that may still need it
    residual: np.ndarray  # (samples,): in the units of norm.measure; NaN where it is not finite
    least: np.ndarray
    excess: np.ndarray | None  # with a relative tolerance: residual minus its relative part
    steps: Numbers = 0
    least_at: Numbers = 0
    active: np.ndarray | None = None  # None: all are
    stalled: np.ndarray | None = None  # None: none is
    mask: Tensor | None = None  # `active` on the device
    Tz: Tensor | None = None
    memory: Memory = ()
    now: np.ndarray | None = None  # the residual at the last evaluation, of frozen samples too
    now_test: np.ndarray | None = None  # and what was compared with atol
    after: np.ndarray | None = None  # the residual at the first evaluation after a sample froze
    falling: bool = True  # at every evaluation so far, every active sample had its least residual
    pending: tuple[Tensor, Tensor, np.ndarray] | None = None  # an evaluation at z: T(z) - z and its norms

    @staticmethod
    def start(z: Tensor, memory: Memory, *, relative: bool) -> HostState:
        unknown = _infinite(len(z), z.dtype)
        return HostState(z, z, unknown, unknown, unknown if relative else None, memory=memory)

    @property
    def test(self) -> np.ndarray:
        """What is compared with atol."""
        return self.residual if self.excess is None else self.excess

    @property
    def nonfinite(self) -> np.ndarray:
        """The residual was not finite (NaN), or the norm of T(z) was not (minus infinity)."""
        return cast(np.ndarray, ~(self.test > -np.inf))

    def observe(self, k: int, residual: np.ndarray, excess: np.ndarray | None) -> None:
        """Record the residual of z at evaluation k for the active samples; keep z where it is the least so far."""
        self.now, self.now_test = residual, residual if excess is None else excess
        if self.active is not None:
            self.after = self.now if self.after is None else np.where(self.steps == k - 1, self.now, self.after)
        if self.falling and self._falls(k, residual, excess):
            return
        self.falling = False
        # Infinity becomes NaN: then `<=`, `<` and `>` are all false for a nonfinite residual.
        finite = residual < np.inf
        if np.count_nonzero(finite) < len(residual):
            residual = np.where(finite, residual, np.nan)
            excess = None if excess is None else np.where(finite, excess, np.nan)
        if self.active is not None:
            residual = np.where(self.active, residual, self.residual)
            excess = None if excess is None else np.where(self.active, excess, cast(np.ndarray, self.excess))
        better = residual < self.least
        self.residual, self.excess = residual, excess
        self.steps = k if self.active is None else np.where(self.active, k, self.steps)
        self.least, self.least_at = np.where(better, residual, self.least), np.where(better, k, self.least_at)
        self._keep_best(better)

    def _falls(self, k: int, residual: np.ndarray, excess: np.ndarray | None) -> bool:
        """Record the residuals if those of all active samples are below their least; else return False.

        Not below: NaN and, since nothing is below it twice, infinity.
        """
        active, better = self.active, residual < self.least
        if active is not None:
            better |= ~active
        if np.count_nonzero(better) < len(better):
            return False
        if active is None:
            self.residual, self.excess, self.steps = residual, excess, k
        else:
            self.residual, self.steps = np.where(active, residual, self.residual), np.where(active, k, self.steps)
            self.excess = None if excess is None else np.where(active, excess, cast(np.ndarray, self.excess))
        self.least, self.least_at, self.best_z = self.residual, self.steps, self.z
        return True

    def _keep_best(self, better: np.ndarray) -> None:
        """By reference where it can be: frozen samples do not need their best iterate."""
        waiting = better if self.active is None else better | ~self.active
        if np.count_nonzero(waiting) == len(better) and not np.count_nonzero(self.nonfinite):
            self.best_z = self.z
        elif np.count_nonzero(better):
            self.best_z = torch.where(on_device(better[:, None], self.z), self.z, self.best_z)

    def numbers_for_solver(self, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return residual, least residual and its evaluation as tensors. `residual` is what was just measured."""
        if isinstance(self.least_at, int):  # then all samples are active, and none was ever better
            return residual, residual, residual.new_full(residual.shape, self.least_at)
        numbers = all_on_device((self.residual, self.least, self.least_at), self.z)
        residual, least, least_at = (part.to(self.z.dtype) for part in numbers)
        return residual, least, least_at

    def advance(self, proposal: Tensor) -> None:
        """Move the active samples."""
        if self.active is None:  # a copy of T(z): T may write its next value into the same memory
            self.z = proposal.clone() if proposal is self.Tz else proposal
            return
        if self.mask is None:
            self.mask = on_device(self.active[:, None], self.z)
        self.z = torch.where(self.mask, proposal, self.z)

    def risen(self, atol: float) -> np.ndarray | None:
        """Return which samples converged and froze, but are above the tolerance at the last evaluation."""
        if self.now is None or self.now_test is None or self.after is None:
            return None
        risen = (self.test <= atol) & ~(self.now_test <= atol)
        if not np.count_nonzero(risen):
            return None
        known = np.where(self.steps < np.max(self.steps) - 1, self.after, np.nan)
        return cast(np.ndarray, risen & ~rises_alone(self.now, self.now_test, known, atol))

    def settle(self, active: np.ndarray) -> None:
        """Set which samples are active from now on."""
        count = np.count_nonzero(active)
        if count == len(active):
            self.active = self.mask = None
        elif self.active is None or count != np.count_nonzero(self.active):  # those active never become more
            self.active, self.mask = active, None

    def scrub(self) -> None:
        """Put the best finite iterate in place of one at which T was not finite, so T never sees NaN."""
        self.z = torch.where(on_device(self.nonfinite, self.z)[:, None], self.best_z, self.z)

    def take(self, chosen: np.ndarray) -> HostState:
        """The samples with these numbers, as a state of their own."""
        index = on_device(chosen, self.z)
        kept: dict[str, Any] = {
            name: None if old is None else old[chosen] for name, old in self._numbers().items()
        }
        z, best_z, *memory = (part.index_select(0, index) for part in (self.z, self.best_z, *self.memory))
        left = HostState(z, best_z, **kept, memory=tuple(memory), falling=False)
        left.settle(cast(np.ndarray, left.active))
        return left

    def put(self, chosen: np.ndarray, part: HostState) -> None:
        """Write the samples of `part` back to these numbers; the solver's memory is not needed again."""
        index = on_device(chosen, self.z)
        self.z = self.z.index_copy(0, index, part.z)
        self.best_z = self.best_z.index_copy(0, index, part.best_z)
        theirs = part._numbers()
        for name, old in self._numbers().items():
            if old is not None:
                new = old.copy()
                new[chosen] = theirs[name]
                setattr(self, name, new)
        self.mask = None

    def _numbers(self) -> dict[str, np.ndarray | None]:
        """Every number of every sample, by name."""
        count = len(self.residual)
        alone = {"residual": self.residual, "least": self.least, "excess": self.excess}
        return {
            **alone,
            "steps": np.broadcast_to(self.steps, count),
            "least_at": np.broadcast_to(self.least_at, count),
            "active": np.ones(count, bool) if self.active is None else self.active,
            "stalled": np.zeros(count, bool) if self.stalled is None else self.stalled,
            "now": self.now,
            "now_test": self.now_test,
            "after": self.after,
        }


@functools.lru_cache(maxsize=64)
def _infinite(count: int, dtype: torch.dtype) -> np.ndarray:
    """Return an array of infinities. Cached: nobody writes to the arrays of a state."""
    return np.full(count, np.inf, np.float64 if dtype == torch.float64 else np.float32)


class Watched(Base[HostState]):
    """A solve with a host check at every step."""

    def start(self, z0: Latent) -> HostState:
        # Norms of our own give new memory each time, in the type of the rows; not inside a torch.func transform.
        self.fresh = type(self.tolerance.norm) in (RMS, Euclidean, WorstPixel) and not is_transformed()
        rows = self.space.rows(z0, "start").contiguous()
        return HostState.start(rows, self.solver.start(rows), relative=self.tolerance.rtol > 0)

    def sprint(self, state: HostState, k: int, most: int) -> int:
        """Take Picard steps from evaluation k on while there is nothing to decide; return where that ended.

        The common case of `step` and `check` in a few lines, for small networks on a CPU: all samples are active,
        better than before and above the tolerance. `step` finishes the evaluation that ended it.
        """
        plain = type(self.solver) is Picard and self.fresh and not self.tolerance.rtol
        if not plain or not state.falling or state.active is not None or not len(state.least):
            return k
        z, least, count, damping = state.z, state.least, len(state.least), cast(Picard, self.solver).damping
        evaluate, measure, space, atol = self.evaluate, self.measure, self.space, self.atol
        counted = np.count_nonzero
        while True:
            Tz = evaluate(z, first=k == 1)
            r = Tz - z
            residual = measure(r, space)
            seen = to_numpy(residual)
            done = counted(seen <= atol) or counted(seen < least) < count
            if done or k >= most:
                break
            state.best_z, least, k = z, seen, k + 1
            z = torch.lerp(Tz, z, damping) if damping else Tz.clone()  # T may write its next value into Tz
        if least is not state.least:
            state.residual = state.least = state.now = state.now_test = least
            state.steps = state.least_at = k - 1
        state.z, state.Tz, state.pending = z, Tz, (r, residual, seen)
        return k

    def step(self, state: HostState, k: int, turn: int) -> None:
        """Evaluate T once, look at the residual, move every sample that is still active."""
        z, excess = state.z, None
        if state.pending is None:
            state.Tz = self.evaluate(z, first=turn == 1)
            r = state.Tz - z
            residual = self.measure(r, self.space)
            if turn == 1:
                check_measured(residual, r)
            seen, excess = self._numbers(state, residual)
        else:
            (r, residual, seen), state.pending = state.pending, None
        state.observe(k, seen, excess)
        Tz = cast(Tensor, state.Tz)
        if type(self.solver) is Picard:
            proposal = self.solver.propose(z, Tz)
        else:
            point = Point(turn, z, Tz, r, *state.numbers_for_solver(residual), k)
            proposal, state.memory = self.solver.step(state.memory, point)
        state.advance(proposal)

    def _numbers(self, state: HostState, residual: Tensor) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the residuals on the host and, with a relative tolerance, what exceeds it."""
        rtol = self.tolerance.rtol
        if rtol:
            size = self.size(cast(Tensor, state.Tz))
            both = torch.stack((residual, torch.sub(residual, size, alpha=float(rtol))))
            seen, excess = np.array(to_numpy(both), state.residual.dtype)
            return seen, excess
        # A copy if the norm is not ours: it may write its next value into the same memory.
        seen = to_numpy(residual)
        return seen if self.fresh else np.array(seen, state.residual.dtype), None

    def check(self, state: HostState, k: int, *, compact: bool) -> HostState:
        """Find which samples are done; judge stalling; let done samples leave the batch."""
        active = state.test > self.atol
        if state.falling and not compact:  # nobody has stalled, and all are finite
            state.settle(active)
            self.busy = bool(np.count_nonzero(active))
            return state
        if state.stalled is not None:
            active &= ~state.stalled
        idle = active & (state.least_at <= k - IDLE) if k > IDLE else None
        if idle is not None and idle.any() and state.Tz is not None:
            flat = self.flat(idle, state.residual, state.Tz)
            if flat.any():
                state.stalled = flat if state.stalled is None else state.stalled | flat
                active &= ~flat
        state.settle(active)
        return self.looked(state, active, state.nonfinite, compact=compact)

    def residual(self, state: HostState) -> Tensor:
        """Return the residuals of the whole batch, as they are now."""
        return on_device(self.everyone(state).residual, state.z)

    def finish(self, state: HostState, trace: list[Tensor] | None) -> Solution:
        """Return the solution a state stands for: scaled residuals, and the best iterate where that is kept.

        If all samples converged, the numbers become tensors when they are read, which most passes never do.
        """
        if state.after is not None:
            self.risen = self.present(state.risen(self.atol))
        state = self.everyone(state)
        met = state.test <= self.atol
        plain = state.excess is None and np.count_nonzero(met) == len(met) and trace is None
        if not plain:
            return self._finish(state, met, trace)
        if state.Tz is None or self.shown:  # the value would share its memory with z0, or with what on_step saw
            state.z = state.z.clone()
        numbers = functools.partial(numbers_of, self.space_of_all, self.scale, state.residual, state.steps, met)
        known = {"solver": self.solver, "tolerance": self.tolerance, "failures": self.failures}
        return Solution.deferred(self.space_of_all.nest(state.z), numbers, known)

    def _finish(self, state: HostState, met: np.ndarray, trace: list[Tensor] | None) -> Solution:
        space, residual = self.space_of_all, state.residual
        nonfinite, stalled = state.nonfinite, np.zeros_like(met) if state.stalled is None else state.stalled
        diverged = (residual > DIVERGED * state.least) & ~(met | stalled | nonfinite)
        best = nonfinite | diverged
        met, residual = met & ~nonfinite, np.where(best, state.least, residual)
        if self.tolerance.max_steps:
            self.count_failures(met, stalled, nonfinite)
        value = torch.where(on_device(best[:, None], state.z), state.best_z, state.z)
        return Solution(
            value=space.nest(value.detach()),
            **numbers_of(space, self.scale, residual, state.steps, met, stalled, nonfinite, diverged),
            residuals=None if trace is None else tuple(space.spread(row * self.scale) for row in trace),
            solver=self.solver,
            tolerance=self.tolerance,
            failures=self.failures,
        )


def numbers_of(space: Space, scale: float, residual: np.ndarray, *others: Any) -> dict[str, Any]:
    """Return the tensors of a solution, by name. `others`: steps, met and, if any is true, the three flags."""
    steps, met, *flags = others
    given = flags or [np.zeros(len(met), bool) for _ in range(3)]
    arrays = (residual * residual.dtype.type(scale), met, np.full(len(met), steps), *given)
    shown = all_on_device(arrays, leaves(space.template)[0])
    names = ("residual", "converged", "steps", "stalled", "nonfinite", "diverged")
    return dict(zip(names, map(space.spread, shown), strict=True))
