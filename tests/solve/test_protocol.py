"""What the loop relies on: a solver keeps a bounded memory of its own, writes to nothing else, and is a value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from banach import Anderson, Broyden, Picard, Solver, Tolerance, solve
from problems import affine, rotation

ACCELERATED: list[Solver] = [Anderson(), Anderson(memory=1), Anderson(damping=0.4), Broyden(), Broyden(memory=1)]


@pytest.mark.parametrize("solver", [Anderson(memory=3), Broyden(memory=3)], ids=repr)
def test_memory_is_bounded_whatever_max_steps(solver: Solver) -> None:
    p = rotation(batch=2, n=16, gamma=0.99)
    sizes: list[int] = []

    class Watch:
        def start(self, z: Tensor) -> tuple[Tensor, ...]:
            return solver.start(z)

        def step(self, memory: tuple[Tensor, ...], at: object) -> tuple[Tensor, tuple[Tensor, ...]]:
            proposal, memory = solver.step(memory, at)  # type: ignore[arg-type]
            sizes.append(sum(part.untyped_storage().nbytes() for part in memory))
            return proposal, memory

    solve(p.T, p.z0, Watch(), inputs=p.inputs, tolerance=Tolerance(atol=1e-14, max_steps=200))
    assert len(sizes) > 100
    assert max(sizes) == min(sizes) <= 8 * 16 * 2 * (2 + 4 * 3) * 2


@pytest.mark.parametrize("solver", ACCELERATED, ids=repr)
def test_a_solver_writes_to_nothing_but_its_memory(solver: Solver) -> None:
    p = affine()
    steps: list[int] = []

    class Watch:
        def start(self, z: Tensor) -> tuple[Tensor, ...]:
            return solver.start(z)

        def step(self, memory: tuple[Tensor, ...], at: object) -> tuple[Tensor, tuple[Tensor, ...]]:
            kept = [part.clone() for part in (at.z, at.Tz, at.r)]  # type: ignore[attr-defined]
            result = solver.step(memory, at)  # type: ignore[arg-type]
            for before, now in zip(kept, (at.z, at.Tz, at.r), strict=True):  # type: ignore[attr-defined]
                assert torch.equal(before, now)
            steps.append(1)
            return result

    solve(p.T, p.z0, Watch(), inputs=p.inputs, tolerance=Tolerance(atol=1e-9))
    assert len(steps) > 3


def test_a_solver_may_keep_the_numbers_of_an_evaluation() -> None:
    """They were views of memory that the next step writes to."""
    kept: list[tuple[Tensor, ...]] = []
    copies: list[tuple[Tensor, ...]] = []

    class Keeps:
        def start(self, z: Tensor) -> tuple[Tensor, ...]:
            return ()

        def step(self, memory: tuple[Tensor, ...], at: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
            kept.append((at.residual, at.least, at.least_at))
            copies.append(tuple(part.clone() for part in kept[-1]))
            return at.Tz, ()

    solve(torch.cos, torch.zeros(2, 3), Keeps(), tolerance=Tolerance(max_steps=5))
    for now, before in zip(kept, copies, strict=True):
        assert all(map(torch.equal, now, before))


@pytest.mark.parametrize("solver", [Picard(0.1), Anderson(memory=3), Broyden(memory=4)], ids=repr)
def test_solvers_are_values(solver: Solver) -> None:
    """Frozen, comparable, hashable: a setting, not a state."""
    twin = type(solver)(**vars(solver))
    assert solver == twin
    assert hash(solver) == hash(twin)
    with pytest.raises(AttributeError):
        solver.memory = 9  # type: ignore[attr-defined]
