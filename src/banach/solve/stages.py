"""A solve in stages: some steps at a time without a host sync, and what the next steps need."""

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

Carried = tuple[Tensor, ...]  # the state of the samples that go on; axis 0 is the sample


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
    """Take the steps steps.start + 1 to steps.stop of `solve`, for independent samples.

    A converged sample stays where it is. The first stage starts at `z`; a later one at `carried`, which the stage
    before it returned, or at some samples of that. There is no host sync, so a stage can be captured.
    """
    tolerance, space = replace(tolerance, check_every=0), Space.of(z)
    run = Run(T, solver, tolerance, space, inputs)
    state = State.carried(*carried) if carried else run.start(z)
    with without_autocast(space):
        for k in steps:
            run.step(state, k + 1, k + 1)
        return finish(state, space, tolerance, solver=solver), state.to_carry()
