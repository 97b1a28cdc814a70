"""The loop of an exported program: `torch.while_loop` in place of Python's, so that its depth follows the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._higher_order_ops import while_loop

from banach.latent import detach
from banach.solve.state import State

if TYPE_CHECKING:
    from banach.solve.run import Run


def run_exported(run: Run, state: State) -> State:
    """Steps until every sample is done, or `max_steps`.

    A solver's slots repeat every `memory` steps, and a traced body needs them as constants: so the body is one
    whole cycle of steps. The first step stands before the loop, what does not fill a cycle after it.
    """
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
