"""solve(): the one loop that evaluates T, exactly once per step, whatever the solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from banach.latent import Latent, Space, detach, leaves
from banach.solve.derivatives import without_tangents
from banach.solve.exported import run_exported
from banach.solve.picard import Picard
from banach.solve.precision import without_autocast
from banach.solve.run import Map, Run
from banach.solve.solution import NotConverged, Solution
from banach.solve.solver import Solver
from banach.solve.tolerance import Tolerance
from banach.solve.watched import Watched

try:  # not public, so perhaps not there in every version
    from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
except ImportError:

    def is_functorch_wrapped_tensor(tensor: Tensor) -> bool:
        return False


_dynamo_callback: Callable[[], object]
try:  # not public, so perhaps not there in every version
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as _dynamo_callback
except ImportError:

    def _dynamo_callback() -> object:
        return None


@torch.no_grad()
def solve(
    T: Map,
    z0: Latent,
    solver: Solver = Picard(),
    *,
    inputs: tuple[Any, ...] = (),
    tolerance: Tolerance = Tolerance(),
    coupled: bool = False,
    compact: bool = False,
    record: bool = False,
    on_step: Callable[[int, Latent], None] | None = None,
    throw: bool = False,
) -> Solution:
    """Find z = T(z, *inputs), starting at z0, without recording a gradient.

    A converged sample is frozen, so its answer does not depend on who else is in the batch; with
    `compact=True` it leaves the batch instead (then all that belongs to a sample must be in `inputs`).
    `coupled=True`: the samples share statistics, and the batch stops as one. `record=True` keeps the
    residuals (`Solution.trace`). `on_step(k, z)` sees every iterate. `throw=True` raises `NotConverged`
    unless every sample converged. T must write neither to z nor to `inputs`: it is refused if its first
    evaluation does, but tensors made in inference mode show a write only where T gives z's own memory back.
    """
    _check(T, solver, inputs, tolerance)
    space = Space.of(z0, coupled=coupled)
    if tolerance.max_steps and not torch.compiler.is_compiling() and any(map(_is_vmapped, leaves(z0))):
        raise RuntimeError(
            "torch.func.vmap cannot map over a solve, whose length follows the data: put what is mapped over on "
            "the first (batch) axis; for per-sample gradients solve first, then vmap(grad(...)) with z0=z* and "
            "max_steps=0"
        )
    if compact:
        _check_compact(space, inputs)
    # torch 2.11 says so under torch.compile as well; there the loop is Python's.
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    parts = (T, solver, tolerance, space, detach(tuple(inputs)))
    watched = tolerance.check_every == 1 and not exporting and not torch.compiler.is_compiling()
    watched = watched and not is_called_by_dynamo()
    run: Any = Watched(*parts) if watched else Run(*parts)
    state = run.start(detach(z0))
    trace: list[Tensor] | None = [] if record else None
    if exporting:
        state, steps = run_exported(run, state), range(0)
    else:
        steps = range(1, tolerance.max_steps + 1)
    with without_autocast(space), without_tangents():
        for k in steps:
            run.step(state, k, k)
            if trace is not None:
                trace.append(run.residual(state))
            if on_step is not None:
                on_step(k, space.nest(run.everyone(state).z))
            if tolerance.check_every and k % tolerance.check_every == 0:
                state = run.check(state, k, compact=compact)
                if not run.busy:
                    break
        solution: Solution = run.finish(state, trace)
    if throw and not bool(solution.converged.all()):
        raise NotConverged(solution)
    return solution


def _is_vmapped(tensor: Tensor) -> bool:
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)  # of torch.func.grad
    return False


@torch.compiler.disable(recursive=False)
def is_called_by_dynamo() -> bool:
    """Does `torch.compile` run this, and compile what is called from here? It cannot trace a loop that asks the
    host, so it runs that as it is and compiles the pieces, in which numbers had better be tensors."""
    return _dynamo_callback() not in (None, False)


def _check(T: Map, solver: Solver, inputs: tuple[Any, ...], tolerance: Tolerance) -> None:
    if not callable(T):
        raise TypeError(f"T must be callable, got {type(T).__name__}")
    if isinstance(solver, type) or not hasattr(solver, "step"):
        raise TypeError(f"solver must be a solver object such as Picard() or Anderson(), got {solver!r}")
    if not isinstance(tolerance, Tolerance):
        raise TypeError(f"tolerance must be a Tolerance, got {tolerance!r}; write Tolerance(atol=...)")
    if not isinstance(inputs, (tuple, list)):
        raise TypeError(f"inputs must be a tuple of tensors, got {type(inputs).__name__}; write inputs=(x,)")
    leaves(inputs, "each of `inputs`")


def _check_compact(space: Space, inputs: tuple[Any, ...]) -> None:
    if space.coupled:
        raise ValueError(
            "compact=True needs independent samples, but these are coupled and stop as one; leave it out"
        )
    if not inputs:
        raise ValueError(
            "compact=True needs what belongs to a sample in `inputs`, since a closure cannot be cut: T(z, *inputs)"
        )
    for leaf in leaves(inputs):
        if leaf.shape[:1] != (space.batch,):
            raise ValueError(
                f"compact=True cuts every tensor of `inputs` along the batch: expected {space.batch} rows, "
                f"got shape {tuple(leaf.shape)}; let T close over what is not per sample"
            )
