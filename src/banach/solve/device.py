"""Solves whose end the device decides: captured ones, whose loops are while nodes, and exported ones."""

from collections.abc import Callable

import torch
from torch import Tensor

from banach.latent import detach
from banach.solve.context import Loop
from banach.solve.run import SolveRun
from banach.solve.state import State

STEPS_PER_TEST = 2  # of a while node, for solvers without memory


def loop_eagerly(
    body: Callable[[], None], active: Tensor, steps: Tensor, *, cycle: int, max_steps: int, stop_at: int = 0
) -> None:
    """Run a loop with host syncs: what a while node does without."""
    while int(active.sum()) > stop_at and int(steps) < max_steps:
        body()
        steps.add_(cycle)


def loop_at_least_once(body: Callable[[], None], active: Tensor, steps: Tensor, **limits: int) -> None:
    """Run a loop in a warm-up, then its body once more: a capture cannot compile what has never run."""
    loop_eagerly(body, active, steps, **limits)
    body()


def steps_before_loop(max_steps: int, cycle: int, at_least: int = 1) -> int:
    """Return how many steps to take before a loop whose body takes `cycle` steps.

    The fewest, but `at_least`, that leave a multiple of `cycle`: the loop then ends at `max_steps` exactly.
    """
    least = max(at_least, 1)
    return min(least + (max_steps - least) % cycle, max_steps)


def run_on_device(run: SolveRun, state: State, loop: Loop) -> State:
    """Take steps until every sample is done, or `max_steps`, without a host sync.

    A captured body has the slots of a solver's memory as constants, so it is one whole cycle of them.
    """
    most, cycle = run.tolerance.max_steps, getattr(run.solver, "memory", STEPS_PER_TEST)
    first = steps_before_loop(most, cycle, getattr(run.solver, "steps_before_loop", 0))
    for k in range(1, first + 1):
        run.step(state, k, k)
    if most == first:
        return state
    steps = torch.full((), first, dtype=torch.int32, device=state.z.device)
    # Copies: a tensor may be an earlier iterate that `on_step` or a user's solver has kept.
    state.memory = tuple(part.clone() if part.shape == state.z.shape else part for part in state.memory)
    kept = state.z, *state.memory

    def body() -> None:
        for turn in range(first + 1, first + cycle + 1):
            run.step(state, steps + (turn - first), turn)
        # The memory first, since its parts may be the old z.
        for old, new in zip((*kept[1:], kept[0]), (*state.memory, state.z), strict=True):
            if new is not old:
                old.copy_(new)
        state.z, state.memory = kept[0], kept[1:]

    loop(body, state.active, steps, cycle=cycle, max_steps=most, stop_at=0)
    return state


def run_exported(run: SolveRun, state: State) -> State:
    """Do the same as one traced loop. Its body may not write to what it gets: tensors are carried in and out."""
    from torch._higher_order_ops import while_loop  # imports Dynamo, which takes a second

    most, cycle = run.tolerance.max_steps, getattr(run.solver, "memory", 1)
    first, outside = steps_before_loop(most, cycle), _traced(run, state.z.shape[0])
    for k in range(1, first + 1):
        outside.step(state, k, k)
    if most == first:
        return state

    def go_on(steps: Tensor, z: Tensor, best_z: Tensor, active: Tensor, *_: Tensor) -> Tensor:
        return (steps < most) & active.any()

    def body(steps: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        inner = State.carried(carried[0].clone(), *carried[1:])  # a solver may remember z, which is then an output
        here = _traced(run, inner.z.shape[0])
        for turn in range(1, cycle + 1):
            here.step(inner, steps + turn, first + turn)
        return steps + cycle, *inner.to_carry()

    start = torch.full((), first, dtype=torch.int64, device=state.z.device)
    carried = (part.clone() for part in state.to_carry())  # a loop refuses tensors that share memory
    return State.carried(*while_loop(go_on, body, (start, *carried))[1:])


def _traced(run: SolveRun, batch: int) -> SolveRun:
    """Return the run as a traced graph must see it."""
    # The batch is another symbol in a loop's body. Grad mode is the caller's, so T's value is detached.
    space = run.space if run.space.coupled else run.space.resized(batch)
    return type(run)(lambda *given: detach(run.T(*given)), run.solver, run.tolerance, space, run.inputs)
