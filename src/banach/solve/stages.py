"""Solves that the host does not watch: in stages, in a compiled network, in an exported program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from banach.latent import Space, detach
from banach.solve.context import without_autocast
from banach.solve.run import Map, Run
from banach.solve.solution import Solution
from banach.solve.solver import Solver
from banach.solve.state import State
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
        return run.finish(state, None), state.to_carry()


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that Dynamo does not trace, for what the host decides in a compiled network.

    A decorator at the top of a file would import Dynamo, which takes a second, with banach.
    """
    return torch.compiler.disable(function)


def run_exported(run: Run, state: State) -> State:
    """Steps until every sample is done, or `max_steps`.

    A solver's slots repeat every `memory` steps, and a traced body needs them as constants: so the body is one
    whole cycle of steps. The first step stands before the loop, what does not fill a cycle after it.
    """
    from torch._higher_order_ops import while_loop  # imports Dynamo, which takes a second

    budget, cycle = run.tolerance.max_steps, getattr(run.solver, "memory", 1)
    outside = _traced(run, state.z.shape[0])
    if budget:
        outside.step(state, 1, 1)
    cycles, rest = divmod(max(budget - 1, 0), cycle)
    step = torch.ones((), dtype=torch.int64, device=state.z.device)

    def go_on(step: Tensor, z: Tensor, best_z: Tensor, active: Tensor, *_: Tensor) -> Tensor:
        return (step < 1 + cycles * cycle) & active.any()

    def body(step: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        inner = _unpack(carried)
        here = _traced(run, inner.z.shape[0])
        for slot in range(cycle):
            here.step(inner, step + slot + 1, slot + 2)
        return step + cycle, *_pack(inner)

    if cycles:
        step, *carried = while_loop(go_on, body, (step, *_pack(state)))
        state = _unpack(tuple(carried))
    for slot in range(rest):
        outside.step(state, step + slot + 1, slot + 2)
    return state


def _traced(run: Run, batch: int) -> Run:
    """The same run as a traced graph must see it: the batch is a symbol of its own in a loop's body, and grad
    mode is the caller's at run time, so T's value is cut from the graph by hand.
    """
    space = run.space if run.space.coupled else run.space.resized(batch)
    return type(run)(lambda *given: detach(run.T(*given)), run.solver, run.tolerance, space, run.inputs)


def _pack(state: State) -> tuple[Tensor, ...]:
    return state.z, state.best_z, state.active, state.stats, *state.memory


def _unpack(carried: tuple[Tensor, ...]) -> State:
    """The state these tensors hold. Copies: a body of `while_loop` may not write to what it is handed."""
    z, best_z, active, stats, *memory = (tensor.detach().clone() for tensor in carried)
    return State(z, best_z, active, stats, tuple(memory))
