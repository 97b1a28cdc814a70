"""A solve under the eyes of the host: it sees every residual, and so keeps all numbers itself.

The device evaluates T and one norm a step, and moves the samples. What `State` computes there with several small
kernels a step, of which each costs as much as one of T's, is arithmetic on a few numbers here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from banach.latent import Latent
from banach.solve.picard import Picard
from banach.solve.run import Base, check_measured
from banach.solve.solution import Solution
from banach.solve.solver import Memory, Point
from banach.solve.state import IDLE, all_on_device, on_device, to_numpy

Numbers = int | np.ndarray  # of evaluations: one for all samples, or one for each


@dataclass
class HostState:
    """One row per sample, whose numbers stop changing when it freezes. Arrays are replaced, never written to,
    so that tensors may share their memory. While no sample differs from another in what has to be done, which is
    most of the time, little is computed: `active` and `stalled` are None, `steps` and `least_at` one number.
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

    @staticmethod
    def start(z: Tensor, memory: Memory, *, relative: bool) -> HostState:
        unknown = np.full(len(z), np.inf, np.float64 if z.dtype == torch.float64 else np.float32)
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
        better = residual < self.least  # false for NaN and, since nothing is below it twice, for infinity
        if self.active is None and better.all():
            self.residual = self.least = residual
            self.excess = excess
            self.steps = self.least_at = k
            self.best_z = self.z
            return
        # Infinity becomes NaN: then `<=`, `<` and `>` are all false for a nonfinite residual.
        now = np.where(residual < np.inf, residual, np.nan)
        excess = None if excess is None else np.where(residual < np.inf, excess, np.nan)
        if self.active is not None:
            now = np.where(self.active, now, self.residual)
            excess = None if excess is None else np.where(self.active, excess, cast(np.ndarray, self.excess))
        better = now < self.least
        self.residual, self.excess = now, excess
        self.steps = k if self.active is None else np.where(self.active, k, self.steps)
        self.least, self.least_at = np.where(better, now, self.least), np.where(better, k, self.least_at)
        self._keep_best(better)

    def _keep_best(self, better: np.ndarray) -> None:
        """By reference where it can be: only a sample that leaves the finite numbers will need its own again."""
        waiting = better if self.active is None else better | ~self.active
        if waiting.all() and not self.nonfinite.any():
            self.best_z = self.z
        elif better.any():
            self.best_z = torch.where(on_device(better, self.z)[:, None], self.z, self.best_z)

    def told(self, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For a solver: residual, least residual and where that was. `residual` is what was just measured."""
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
            self.mask = on_device(self.active, self.z)[:, None]
        self.z = torch.where(self.mask, proposal, self.z)

    def goes_on(self, k: int, atol: float) -> bool:
        """Was evaluation k such that nothing has to be decided? All are active, finite, and better than before."""
        uniform = self.active is None and isinstance(self.least_at, int) and self.least_at == k
        return uniform and len(self.test) > 0 and bool(self.test.min() > atol)

    def settle(self, active: np.ndarray) -> None:
        """These are active from now on."""
        if active.all():
            self.active = self.mask = None
        elif self.active is None or not np.array_equal(active, self.active):
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
        left = HostState(z, best_z, **kept, memory=tuple(memory))
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
        }


class Watched(Base[HostState]):
    """A solve whose host looks at every step."""

    def start(self, z0: Latent) -> HostState:
        rows = self.space.rows(z0, "start").contiguous()
        return HostState.start(rows, self.solver.start(rows), relative=self.tolerance.rtol > 0)

    def step(self, state: HostState, k: int, turn: int) -> None:
        """Evaluate T once, look at the residual, move every sample that is still active."""
        rtol = float(self.tolerance.rtol)
        state.Tz = Tz = self.evaluate(state.z, first=turn == 1)
        r = Tz - state.z
        residual = self.size(r)
        if turn == 1:
            check_measured(residual, r)
        if rtol:
            both = torch.stack((residual, torch.sub(residual, self.size(Tz), alpha=rtol)))
            state.observe(k, *np.array(to_numpy(both), state.residual.dtype))
        else:  # a copy: a norm may write its next value into the same memory
            state.observe(k, np.array(to_numpy(residual), state.residual.dtype), None)
        if type(self.solver) is Picard:
            proposal = self.solver.propose(state.z, Tz)
        else:
            told = Point(turn, state.z, Tz, r, *state.told(residual), k)
            proposal, state.memory = self.solver.step(state.memory, told)
        state.advance(proposal)

    def check(self, state: HostState, k: int, *, compact: bool) -> HostState:
        """Which samples are done; judge stalling; let done samples leave the batch."""
        if state.goes_on(k, self.atol):
            return state
        active = state.test > self.atol
        if state.stalled is not None:
            active &= ~state.stalled
        idle = active & (state.least_at <= k - IDLE)
        if idle.any() and state.Tz is not None:
            flat = self.flat(idle, state.residual, state.Tz)
            if flat.any():
                state.stalled = flat if state.stalled is None else state.stalled | flat
                active &= ~flat
        state.settle(active)
        return self.looked(state, active, state.nonfinite, compact=compact)

    def residual(self, state: HostState) -> Tensor:
        """Of everyone, as it is now."""
        return on_device(self.everyone(state).residual, state.z)

    def finish(self, state: HostState, trace: list[Tensor] | None) -> Solution:
        """The solution a state stands for: scaled residuals, and the best iterate where T was not finite."""
        state, space = self.everyone(state), self.space_of_all
        scale = float(self.tolerance.norm.scale(space))
        nonfinite = state.nonfinite
        if nonfinite.any():
            state.scrub()
        else:
            state.z = state.z.clone()  # the value shares its memory with nobody
        count = len(nonfinite)
        numbers = (
            np.where(nonfinite, state.least, state.residual) * scale,
            (state.test <= self.atol) & ~nonfinite,
            np.full(count, state.steps),
            np.zeros(count, bool) if state.stalled is None else state.stalled,
            nonfinite,
        )
        residual, converged, steps, stalled, nonfinite_now = map(space.spread, all_on_device(numbers, state.z))
        return Solution(
            value=space.nest(state.z.detach()),
            residual=residual.to(state.z.dtype),
            converged=converged,
            steps=steps,
            stalled=stalled,
            nonfinite=nonfinite_now,
            residuals=None if trace is None else tuple(space.spread(row * scale) for row in trace),
            nonfinite_seen=self.nonfinite,
        )
