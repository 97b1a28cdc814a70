"""A solve in stages: some steps at a time, of which nothing is asked, and what the next ones need to go on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from banach.latent import Space
from banach.solve.precision import without_autocast
from banach.solve.run import Map, Run
from banach.solve.solution import Solution
from banach.solve.solver import Solver
from banach.solve.state import State, finish
from banach.solve.tolerance import Tolerance

Carried = tuple[Tensor, ...]  # of the samples that go on: each has the sample as its first axis


@torch.no_grad()
def stage(
    T: Map,
    z: Tensor,
    solver: Solver,
    steps: range,
    *,
    inputs: tuple[Tensor, ...],
    tolerance: Tolerance,
    carried: Carried = (),
) -> tuple[Solution, Carried]:
    """The steps that `solve` would take as its steps.start + 1 to steps.stop, of independent samples.

    A sample that has converged stays where it is. `z` and `carried` are what the stage before gave, or some
    samples of it; without them this is the first one. The host is asked nothing, so it can be captured.
    """
    tolerance, space = replace(tolerance, check_every=0), Space.of(z)
    run = Run(T, solver, tolerance, space, inputs)
    state = State.carried(space.rows(z).contiguous(), *carried) if carried else run.start(z)
    with without_autocast(space):
        for k in steps:
            run.step(state, k + 1, k + 1)
        return finish(state, space, tolerance, None, 0), state.to_carry()
