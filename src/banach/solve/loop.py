"""solve(): the one loop that evaluates T, whatever the solver. `run.py` has its step and its host check."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from banach.latent import Latent, Space, detach, leaves, select
from banach.solve import context
from banach.solve.device import run_exported, run_on_device
from banach.solve.mixing import differ, probe
from banach.solve.picard import Picard
from banach.solve.run import SolveRun
from banach.solve.solution import NotConverged, Solution, Status
from banach.solve.solver import Map, Solver
from banach.solve.state import State, on_device, to_numpy
from banach.solve.stride import stride
from banach.solve.tolerance import RMS, Euclidean, Tolerance, WorstPixel, measure

OnStep = Callable[[int, Latent], None]
_SHARED = (
    "give what all samples share, such as a mask, a row for each sample (expand it; in a network: in Q), or leave "
    "out compact=True"
)
_RECHECKED = 8  # converged samples that are evaluated once more where some have left the batch


@context.no_derivatives
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
    on_step: OnStep | None = None,
    throw: bool = False,
) -> Solution:
    """Find z with z = T(z, *inputs), starting at z0, without recording a gradient.

    A sample stops when its residual meets `tolerance`, and keeps its value from then on. So its answer does not
    depend on the other samples of the batch. `solve` never warns: look at the `Solution`.

    Args:
        T: the map, called as T(z, *inputs) once per step. It must keep z's shape and must not write to z or to
            `inputs`. On a GPU Picard's iteration evaluates it a few times more, up to the next host check, at most
            about a quarter of the steps in long solves; these are dropped and not counted.
        z0: starting latent, a tensor or a nest of tensors that share axis 0 (the batch).
        solver: `Picard()`, `Anderson()` or `Broyden()`.
        inputs: per-sample tensors for T.
        tolerance: when to stop.
        coupled: samples share statistics, such as those of train-mode batch norm; the batch stops as one.
        compact: converged samples leave the batch instead of staying in it frozen. All that belongs to a sample
            must then be in `inputs`.
        record: keep the residuals of every step (`Solution.trace`).
        on_step: called as on_step(k, z) with every iterate.
        throw: raise unless every sample converged.
    Returns:
        Solution, with one entry per sample. With host checks on, a frozen sample that does not stay converged
        shows that T may mix samples although `coupled` is False. (Where samples have left the batch, one more
        evaluation of a few of them looks for that.) Then a few more evaluations probe T; if it does mix samples,
        none counts as converged, and `Solution.fault` says why.
    Raises:
        NotConverged: if `throw` is True and a sample did not converge.
    """
    _check(T, solver, inputs, tolerance)
    space, compiling = Space.of(z0, coupled=coupled), context.is_compiling()
    if compact:
        _check_compact(space, inputs)
    inputs = detach(tuple(inputs))
    loop = context.device_loop() if tolerance.steps_per_check and not compiling else None
    every = 0 if loop else tolerance.steps_per_check  # in a capture the device decides when to stop
    run = SolveRun(T, solver, tolerance, space, inputs, on_host=every == 1 and not compiling)
    state = run.start(detach(z0))
    check, finish = run.check, run.finish
    if compiling and every:
        check, finish = map(torch.compiler.disable, (check, finish))  # what the host decides is not traced
    trace: list[Tensor] | None = [] if record else None
    try:
        with context.without_autocast(space.device):
            if context.is_exporting():
                state = run_exported(run, state)
            elif loop and trace is None and on_step is None:
                state = run_on_device(run, state, loop)
            else:
                state = _run_on_host(run, state, check if every else None, trace, on_step, compact=compact)
            found = finish(state, trace, shown=on_step is not None)
        if run.whole is not None and found.converged.any():  # some left the batch, and were not evaluated since
            run.risen = _recheck_converged(run, found, inputs)
        if run.risen is not None and not space.coupled:
            found = _probed(run, T, found, inputs)
    except Exception as error:
        if run.whole is not None and _SHARED not in str(error):
            error.add_note(f"with compact=True converged samples had left the batch; {_SHARED}")
        raise
    if throw and not bool(found.converged.all()):
        raise NotConverged(found)
    return found


def _run_on_host(
    run: SolveRun, state: State, check: Any, trace: list[Tensor] | None, on_step: OnStep | None, *, compact: bool
) -> State:
    """Take steps until the host knows that every sample is done, or `max_steps`; without `check` always those.

    Two short forms of the loop take many steps of Picard at a time, until something unusual happens.
    """
    most, every, k = run.tolerance.max_steps, run.tolerance.steps_per_check, 0
    # These norms give new memory in the type of the rows.
    known = type(run.tolerance.norm) in (RMS, Euclidean, WorstPixel) and not context.is_transformed()
    sprints = run.on_host and known and run.damping is not None and trace is None and on_step is None
    strides = run.space.device.type != "cpu" and run.tolerance.check_every is None and not compact
    while run.busy and k < most:
        if sprints:
            k = stride(run, state, k) if strides else run.sprint(state, k, compact=compact)
        if not run.busy or k == most:
            break
        k += 1
        run.step(state, k, k)
        if trace is not None:
            trace.append(run.residual(state))
        if on_step is not None:
            on_step(k, run.space_of_all.nest(run.everyone(state).z))
        if check is not None and (k % every == 0 or k == most):
            state = check(state, k, compact=compact)
    return state


def _probed(run: SolveRun, T: Map, found: Solution, inputs: tuple[Any, ...]) -> Solution:
    """Return the solution as it is, or with what is wrong with T: then no sample has converged."""
    risen = cast(Any, run.risen)
    fault = probe(T, found.value, inputs, int(risen[0]))
    if fault is None:
        if run.whole is not None:  # inputs that all samples share are other ones, cut with the batch
            index, whole = on_device(risen, found.converged), run.space_of_all
            here = whole.rows(T(found.value, *inputs))[index]  # a copy: T may use its memory again
            cut = whole.resized(len(risen)).rows(T(select(found.value, index), *select(inputs, index)))
            if differ(here, cut, whole):
                raise ValueError(f"compact=True cuts `inputs`, and T is another map then; {_SHARED}")
        return found
    residual = _residual(run, run.space_of_all, found.value, inputs)[0]
    nobody, failures = torch.zeros_like(found.converged), found.failures | {Status.MAX_STEPS}
    return replace(found, converged=nobody, residual=residual, failures=failures, fault=fault)


def _recheck_converged(run: SolveRun, found: Solution, inputs: tuple[Any, ...]) -> np.ndarray | None:
    """Evaluate a few converged samples as a small batch; return the indices of those now above the tolerance.

    If there are some, T may mix samples. None: there are none.
    """
    here = np.flatnonzero(to_numpy(found.converged))
    here = here[:: max(1, -(-len(here) // _RECHECKED))]
    index = on_device(here, found.converged)
    space = run.space_of_all.resized(len(here))
    residual, allowed = _residual(run, space, select(found.value, index), select(inputs, index))
    risen = here[~to_numpy(residual <= allowed)]
    return risen if len(risen) else None


def _residual(run: SolveRun, space: Space, z: Latent, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return the residual at z, and what is allowed of it, per sample."""
    with context.without_autocast(space.device):
        return measure(space, run.tolerance, z, run.T(z, *inputs))


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
        raise ValueError("compact=True needs independent samples, got coupled ones; leave it out")
    if not inputs:
        raise ValueError("compact=True needs what belongs to a sample in `inputs`, since a closure cannot be cut")
    for leaf in leaves(inputs):
        if leaf.shape[:1] != (space.batch,) or leaf.layout != torch.strided:
            got = f"expected {space.batch} rows, got shape {tuple(leaf.shape)}, {leaf.layout}"
            raise ValueError(f"compact=True cuts `inputs` along the batch: {got}; {_SHARED}")
