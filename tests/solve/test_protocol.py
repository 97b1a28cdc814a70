"""What the loop relies on: a solver keeps a bounded memory of its own and writes to nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from banach import Anderson, Broyden, Picard, Solver, Tolerance, solve
from banach.solve import Memory, Point
from problems import affine, rotation


@dataclass
class Spy:
    """A solver that passes on to another, and keeps what it was given, with copies."""

    inner: Solver
    seen: list[tuple[Tensor, ...]] = field(default_factory=list)
    copies: list[tuple[Tensor, ...]] = field(default_factory=list)
    sizes: set[int] = field(default_factory=set)

    def start(self, z: Tensor) -> Memory:
        return self.inner.start(z)

    def step(self, memory: Memory, at: Point) -> tuple[Tensor, Memory]:
        self.seen.append((at.z, at.Tz, at.r, at.residual, at.least, at.least_at))
        self.copies.append(tuple(part.clone() for part in self.seen[-1]))
        proposal, memory = self.inner.step(memory, at)
        self.sizes.add(sum(part.untyped_storage().nbytes() for part in memory))
        return proposal, memory


@pytest.mark.parametrize(
    "solver", [Picard(), Anderson(), Anderson(1, damping=0.4), Broyden(), Broyden(1)], ids=repr
)
def test_a_solver_writes_to_nothing_but_its_memory_and_may_keep_what_it_is_given(solver: Solver) -> None:
    """The numbers of an evaluation were views of memory that the next step writes to."""
    p, spy = affine(), Spy(solver)
    solve(p.T, p.z0, spy, inputs=p.inputs, tolerance=Tolerance(atol=1e-9, max_steps=20))
    assert len(spy.seen) > 3
    for now, before in zip(spy.seen, spy.copies, strict=True):
        assert all(map(torch.equal, now, before))


@pytest.mark.parametrize("solver", [Anderson(memory=3), Broyden(memory=3)], ids=repr)
def test_memory_is_bounded_whatever_max_steps(solver: Solver) -> None:
    p, spy = rotation(batch=2, n=16, gamma=0.99), Spy(solver)
    solve(p.T, p.z0, spy, inputs=p.inputs, tolerance=Tolerance(atol=1e-14, max_steps=200))
    assert len(spy.seen) > 100
    assert len(spy.sizes) == 1
    assert max(spy.sizes) <= 8 * 16 * 2 * (2 + 4 * 3) * 2
