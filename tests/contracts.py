"""What every solver must pass, whatever its algorithm. Each function takes a solver and a problem, and asserts.

`replay` is the independent route: it sees only the iterates, evaluates T again and computes every residual
from the definition, in float64.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import Anderson, Broyden, Picard, Solution, Solver, Status, Tolerance, solve
from banach.latent import Latent, leaves, leaves_like, map_leaves
from banach.solve import Memory, Point
from banach.solve.solution import DEFERRED
from problems import Problem, distance

SOLVERS: list[Solver] = [Picard(), Picard(0.5), Anderson(), Broyden()]
solvers = pytest.mark.parametrize("solver", SOLVERS, ids=repr)


@dataclass(frozen=True)
class Replay:
    """All that a solve did: z_0 .. z_n as it showed them, and the residual of each but the last."""

    solution: Solution
    iterates: list[Latent]
    residuals: Tensor  # (steps, batch)
    evaluations: int


@dataclass
class Spy:
    """A solver that passes on to another, and keeps what it was given, with copies."""

    inner: Solver
    seen: list[tuple[Tensor, ...]] = field(default_factory=list)
    copies: list[tuple[Tensor, ...]] = field(default_factory=list)
    sizes: set[int] = field(default_factory=set)  # of the memory, in bytes
    dtypes: set[torch.dtype] = field(default_factory=set)
    autocast: set[bool] = field(default_factory=set)

    def start(self, z: Tensor) -> Memory:
        return self.inner.start(z)

    def step(self, memory: Memory, at: Point) -> tuple[Tensor, Memory]:
        self.seen.append((at.z, at.Tz, at.r, at.residual, at.least, at.least_at))
        self.copies.append(tuple(part.clone() for part in self.seen[-1]))
        proposal, memory = self.inner.step(memory, at)
        self.sizes.add(sum(part.untyped_storage().nbytes() for part in memory))
        self.dtypes |= {part.dtype for part in (*self.seen[-1], proposal, *memory)}
        self.autocast.add(torch.is_autocast_enabled("cpu"))
        return proposal, memory


def rms(nest: Latent) -> Tensor:
    """(batch,): the root mean square of everything a sample holds, in float64."""
    flat = torch.cat([leaf.double()[:, None].flatten(1) for leaf in leaves(nest)], 1)
    return flat.square().mean(1).sqrt()


def residual_at(problem: Problem, z: Latent) -> Tensor:
    """(batch,): the RMS of T(z) - z."""
    value = problem.closed(z)
    leaves_like(z, value, "T")
    return rms(map_leaves(lambda a, b: b.double() - a.double(), z, value))


def replay(problem: Problem, solver: Solver, tolerance: Tolerance, *, compact: bool = False) -> Replay:
    """Solve, and compute every residual again from the iterates alone."""
    iterates: list[Latent] = [problem.z0]
    calls: list[int] = []

    def T(z: Latent, *inputs: Latent) -> Latent:
        calls.append(leaves(z)[0].shape[0])
        return problem.T(z, *inputs)

    def see(k: int, z: Latent) -> None:
        assert k == len(iterates) == len(calls), "on_step sees every iterate once, in order"
        iterates.append(z)

    how: dict[str, Any] = {"compact": compact, "record": True, "on_step": see}
    found = solve(T, problem.z0, solver, inputs=problem.inputs, tolerance=tolerance, **how)
    rows = [residual_at(problem, z) for z in iterates[:-1]]
    batch = len(found.steps)
    residuals = torch.stack(rows) if rows else torch.empty(0, batch, dtype=torch.float64)
    return Replay(found, iterates, residuals, len(calls))


def finds(solver: Solver, problem: Problem, atol: float) -> None:
    """It converges, to the fixed point, and what it returns is as good as it says."""
    tolerance = Tolerance(atol=atol, max_steps=400)
    found = solve(problem.T, problem.z0, solver, inputs=problem.inputs, tolerance=tolerance)
    assert set(found.status) <= {Status.CONVERGED}, found.summary()
    assert (found.residual <= atol * (1 + 1e-6)).all()
    assert (residual_at(problem, found.value) <= 20 * atol).all()
    if found.steps.numel():
        assert distance(found.value, problem.solution) < 50 * atol


def reports_what_happened(solver: Solver, problem: Problem, atol: float) -> None:
    """value, residual, steps, converged and trace are those of the definition, sample by sample."""
    tolerance = Tolerance(atol=atol, max_steps=12)
    seen = replay(problem, solver, tolerance)
    found, trace = seen.solution, seen.solution.trace
    assert trace is not None
    rounding = 30 * torch.finfo(leaves(problem.z0)[0].dtype).eps * (1 + rms(problem.solution))
    assert seen.evaluations == int(found.steps.max()), "T is evaluated once per step, and no more than needed"
    assert trace.shape == (int(found.steps.max()), len(found.steps))
    for i, n in enumerate(found.steps.tolist()):
        before, last = seen.residuals[: n - 1, i], seen.residuals[n - 1, i]
        assert (before > atol - rounding[i]).all(), "no earlier residual met the tolerance"
        assert found.converged[i] == (n < 12 or last <= atol)
        torch.testing.assert_close(
            trace[:n, i].double(), seen.residuals[:n, i], rtol=1e-4, atol=float(rounding[i])
        )
        assert (trace[n - 1 :, i] == found.residual[i]).all(), "a frozen sample repeats its last residual"
        for z in seen.iterates[n:]:
            value = map_leaves(lambda a, i=i: a[i], z)
            assert distance(value, map_leaves(lambda a, i=i: a[i], found.value)) == 0, "a frozen sample stays"


def does_not_depend_on_checks(solver: Solver, problem: Problem, atol: float) -> None:
    """Fewer host checks change when the loop ends, and nothing else."""
    results: list[Solution] = []
    for every in (1, 2, 3, 7, 0):
        calls: list[int] = []

        def T(z: Latent, *inputs: Latent, calls: list[int] = calls) -> Latent:
            calls.append(1)
            return problem.T(z, *inputs)

        tolerance = Tolerance(atol=atol, max_steps=60, check_every=every)
        results.append(solve(T, problem.z0, solver, inputs=problem.inputs, tolerance=tolerance, record=True))
        needed = int(results[0].steps.max())
        assert len(calls) == (min(60, math.ceil(needed / every) * every) if every else 60)
        same(results[0], results[-1])
        torch.testing.assert_close(results[0].trace, results[-1].trace, rtol=0, atol=0)


def same_alone(solver: Solver, problem: Problem, atol: float) -> None:
    """A sample's answer does not depend on who else is in the batch."""
    tolerance = Tolerance(atol=atol, max_steps=60)
    whole = solve(problem.T, problem.z0, solver, inputs=problem.inputs, tolerance=tolerance)
    for i in range(len(whole.steps)):
        part = problem.samples(i)
        alone = solve(part.T, part.z0, solver, inputs=part.inputs, tolerance=tolerance)
        close(alone, select_solution(whole, i), atol)


def same_compacted(solver: Solver, problem: Problem, atol: float) -> None:
    """Letting converged samples leave the batch gives the same answer, trace and iterates as freezing them."""
    for every in (1, 3):
        tolerance = Tolerance(atol=atol, max_steps=60, check_every=every)
        frozen = replay(problem, solver, tolerance)
        compacted = replay(problem, solver, tolerance, compact=True)
        close(compacted.solution, frozen.solution, atol)
        assert len(compacted.iterates) == len(frozen.iterates)
        for a, b in zip(compacted.iterates, frozen.iterates, strict=True):
            assert distance(a, b) < atol
        torch.testing.assert_close(compacted.solution.trace, frozen.solution.trace, rtol=1e-2, atol=atol / 2)


def same(a: Solution, b: Solution) -> None:
    """Equal to the last bit."""
    for name in ("value", *DEFERRED):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0, equal_nan=True, msg=name)


def close(a: Solution, b: Solution, atol: float) -> None:
    """Equal within rounding: the same status and steps, unless a residual is within rounding of the tolerance."""
    assert not len(a.steps) or distance(a.value, b.value) < atol
    edge = torch.maximum(a.residual, b.residual) > 0.98 * atol
    assert a.status == b.status
    assert ((a.steps == b.steps) | (edge & ((a.steps - b.steps).abs() <= 1))).all()


def select_solution(found: Solution, i: int) -> Solution:
    """The part of a solution that belongs to sample i."""
    numbers = {name: getattr(found, name)[i : i + 1] for name in DEFERRED}
    return Solution(value=map_leaves(lambda leaf: leaf[i : i + 1], found.value), **numbers)
