"""compile(net): the same network for prediction, in a few launches: stages of several steps, each a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from banach import checks
from banach.backward import JFB, Implicit, Neumann
from banach.fast.body import kernel_solve, promoted, solution_of
from banach.fast.capture import CapturedCalls, bucket
from banach.fast.plan import is_as_written, plan
from banach.fast.starts import Neighbours
from banach.fast.weights import forget_packed, frozen_copy, parts_of
from banach.latent import Space
from banach.network import ImplicitNetwork, warn_unconverged, zeros
from banach.nn.layers import uses_batch_statistics
from banach.solve import Picard, Solution, Status, mixes_samples
from banach.solve.loop import stage
from banach.solve.state import DIVERGED
from banach.solve.tolerance import are_finite, measure, residual_of


class _Stage(NamedTuple):
    """What a stage leaves, per sample: v = Q(d), the output, and what a `Solution` holds."""

    v: Tensor
    y: Tensor
    value: Tensor
    residual: Tensor
    converged: Tensor
    nonfinite: Tensor
    steps: Tensor

    def unfinished(self) -> tuple[Tensor, int]:
        """Return which samples go on, and how many are not finite. One host sync."""
        converged, nonfinite = torch.stack((self.converged, self.nonfinite)).cpu()
        late = (~converged & ~nonfinite).nonzero()[:, 0]
        return late.to(self.value.device), int(nonfinite.sum())

    def solution(self, net: ImplicitNetwork) -> Solution:
        return solution_of(net, *self[2:])


# What the next stage starts from. By Picard: the last iterate, the best one, and the residual of the best one.
_Carried = tuple[Tensor, ...]


class CompiledNetwork:
    """N(d) without gradients: `fast = banach.compile(net.eval())`, then `fast(d)` in place of `net(d)`.

    The batch is padded to the next power of two. The first stage computes Q, `first` steps and S. Samples above
    the tolerance go on as a smaller batch, in stages of `then` steps, until they converge or reach `max_steps`.
    Each stage costs one host sync. A sample's steps do not depend on other samples. They are counted in whole
    stages, so its answer is at least as converged as the network's. A sample that overflows, or diverges until
    `max_steps`, gets the best of the iterates that its stages started from.

    An R that the kernels know needs one stage. Solvers other than Picard keep their memory between stages and stop
    a sample within one. In both cases the steps are those of the network. On a GPU a stage is a CUDA graph, one
    per batch size and dtype; on a CPU it runs eagerly. `plan` says what runs. Later changes of the weights in
    place are seen.

    Args:
        net: a network in eval mode whose Q, R and S treat each sample by itself: they see parts of the batch.
        first, then: steps of the first stage and of each later one.
        bf16: compute under autocast.
        compile: compile Q, R and S by torch.compile.
        neighbours: remember the fixed points of so many samples and start from that of the nearest one. An answer
            may then depend, within the tolerance, on earlier calls.
    """

    def __init__(
        self,
        net: ImplicitNetwork,
        *,
        first: int = 8,
        then: int = 4,
        bf16: bool = False,
        compile: bool = False,
        neighbours: int = 0,
    ) -> None:
        _check_network(net)
        for name, count, least in (("first", first, 1), ("then", then, 1), ("neighbours", neighbours, 0)):
            checks.whole(name, count, least)
        self.net, self.first, self.then, self.bf16 = net, first, then, bf16
        self.plan = plan(net, precision="bf16" if bf16 else None, training=False, compile=compile)
        parts = parts_of(net, self.plan)
        wrap: Any = torch.compile if compile else (lambda part: part)
        self.Q, self.R, self.S = wrap(parts["Q"]), wrap(frozen_copy(parts["R"])), wrap(parts["S"])
        self.neighbours = Neighbours(neighbours) if neighbours else None
        self._independent = bool(self.plan.kernel)  # R is known to treat each sample by itself
        self._calls = CapturedCalls()

    @torch.no_grad()
    def __call__(self, *inputs: Any, z0: Tensor | None = None, solution: bool = False) -> Any:
        """Return the output, or (output, Solution).

        Args:
            inputs: the inputs of Q, or one tuple of them; tensors with one row per sample.
            z0: starting latent, such as the `value` of the frame before.
            solution: also return the `Solution`.
        Warns:
            ConvergenceWarning: without `solution`, if samples did not converge in several stages.
        """
        self._check_mode()
        d = inputs[0] if len(inputs) == 1 and type(inputs[0]) is tuple else inputs
        batch = _batch_of(d)
        _check_start(z0, batch)
        if not batch and d[0].is_cuda:  # there is no sample to pad a batch with
            return self.net(*d, z0=z0, solution=solution)
        most = self.net.tolerance.max_steps
        if not self._independent and batch > 1 and most:
            self._check_independent(d)
        steps = range(most if self.plan.kernel else min(self.first, most))
        entry = (self._enter, *d) if z0 is None else (self._enter_from, z0, *d)
        found, carried = self._run(entry[0], steps, *entry[1:])
        if steps.stop == most and not solution and (d[0].is_cuda or not most):  # no host sync
            self._remember(found)
            return found.y.clone()  # the next call overwrites it
        everyone, late, lost = self._finish(found, carried, steps, solution=solution)
        self._remember(everyone)
        if solution:
            return everyone.y, everyone.solution(self.net)
        self._warn(everyone, stopped=late, lost=lost)
        return everyone.y

    def _finish(
        self, found: _Stage, carried: _Carried, steps: range, *, solution: bool
    ) -> tuple[_Stage, int, int]:
        """Run stages until all samples are done. Return them, and how many were stopped or not finite."""
        most = self.net.tolerance.max_steps
        everyone = _Stage(*(part.clone() for part in found))  # the next stage overwrites the tensors of a graph
        here = torch.arange(len(found.v), device=found.v.device)
        late, lost = here[:0], 0
        while steps.stop < most or not solution:
            late, nonfinite = found.unfinished()
            lost += nonfinite
            if not len(late) or steps.stop == most:
                break
            here, steps = here[late], range(steps.stop, min(steps.stop + self.then, most))
            found, carried = self._continue(found, carried, late, steps)
            for mine, other in zip(everyone, found, strict=True):
                mine[here] = other
        return everyone, len(late), lost

    def _continue(self, found: _Stage, carried: _Carried, late: Tensor, steps: range) -> tuple[_Stage, _Carried]:
        v, kept = found.v[late], tuple(part[late] for part in carried)
        if type(self.net.solver) is not Picard:  # such a solver needs the number of the step
            return self._run(self._go_on, steps, v, found.value[late], *kept)
        made, carried = self._run(self._go_on, range(len(steps)), v, *kept)
        made.steps.add_(steps.start)
        return made, carried

    def _check_independent(self, d: tuple[Tensor, ...]) -> None:
        """Refuse an R that mixes samples, once, by a few evaluations: late samples go on as a smaller batch."""
        with self._autocast(d[0]):
            v = self._injected(d)
            if mixes_samples(self.R, promoted(self.net.start(v)), (v,)):
                raise ValueError(
                    "compile takes networks whose R treats each sample by itself, and this one mixes samples; "
                    "call the network itself, with coupled=True"
                )
        self._independent = True

    def _warn(self, found: _Stage, *, stopped: int, lost: int) -> None:
        """Warn as the network does. Samples are independent here, so R is not probed."""
        if self.net.tolerance.check_every != 0:
            counts = {Status.MAX_STEPS: stopped, Status.NONFINITE: lost}
            failures = frozenset(status for status, count in counts.items() if count)
            warn_unconverged(replace(found.solution(self.net), failures=failures), self.R, (), coupled=True)

    def _remember(self, found: _Stage) -> None:
        if self.neighbours is not None:
            self.neighbours.remember(found.v, found.value, found.converged)

    def _enter(self, steps: range, *d: Tensor) -> tuple[_Stage, _Carried]:
        v = self._injected(d)
        z0 = None if self.net.start is zeros else self.net.start(v)
        if self.neighbours is not None:
            z0 = self.neighbours(v, torch.zeros_like(v) if z0 is None else z0)
        return self._from(steps, v, z0)

    def _enter_from(self, steps: range, z0: Tensor, *d: Tensor) -> tuple[_Stage, _Carried]:
        return self._from(steps, self._injected(d), z0)

    def _injected(self, d: tuple[Tensor, ...]) -> Tensor:
        return _per_sample("Q(d)", self.Q(*d), d[0])

    def _from(self, steps: range, v: Tensor, z0: Tensor | None) -> tuple[_Stage, _Carried]:
        if self.plan.kernel:
            forget_packed(self.R)
            return self._stage(v, kernel_solve(self.net, v, z0)), ()
        return self._go_on(steps, v, promoted(torch.zeros_like(v) if z0 is None else z0))

    def _go_on(self, steps: range, v: Tensor, z: Tensor, *carried: Tensor) -> tuple[_Stage, _Carried]:
        forget_packed(self.R)  # weights may have changed since they were packed
        net = self.net
        if type(net.solver) is not Picard or not steps:
            how: Any = {"inputs": (v,), "tolerance": net.tolerance, "carried": carried}
            found, onward = stage(self.R, z, net.solver, steps, **how)
            return self._stage(v, found), onward
        before, z = z, self._step(z, v)
        best, least = self._best(before, z, carried)
        for _ in steps[1:]:
            before, z = z, self._step(z, v)
        residual, allowed = measure(Space.of(z), net.tolerance, before, z, net.solver.damping)
        finite, taken = are_finite(residual, allowed), torch.full_like(residual, steps.stop, dtype=torch.int64)
        # Once per stage: at every step it would cost as much as a layer of R.
        met = residual <= allowed
        kept = finite & (met | (residual <= DIVERGED * least))
        value, residual = _choose(kept, z, best), torch.where(kept, residual, least)
        return self._stage(v, solution_of(net, value, residual, met, ~finite, taken)), (z, best, least)

    def _step(self, z: Tensor, v: Tensor) -> Tensor:
        Tz, damping = self.R(z, v), cast(Picard, self.net.solver).damping
        return torch.lerp(Tz, z, damping) if damping else Tz

    def _best(self, z: Tensor, onward: Tensor, carried: _Carried) -> tuple[Tensor, Tensor]:
        """Return the iterate of least residual that a stage started from, and that residual.

        T is finite at it, since the step from it is. The residual is infinite if there is none.
        """
        residual = residual_of(Space.of(z), self.net.tolerance, z, onward, cast(Picard, self.net.solver).damping)
        z = z.to(onward.dtype)  # under autocast a step may be in a shorter type
        best, least = carried or (z, torch.full_like(residual, torch.inf))
        better = residual < least
        return _choose(better, z, best), torch.where(better, residual, least)

    def _stage(self, v: Tensor, found: Solution) -> _Stage:
        """Evaluate the backward mode's value and S at what was found."""
        mode, z = self.net.backward, cast(Tensor, found.value)
        u = self.R(z, v) if type(mode) in (JFB, Neumann, Implicit) else mode.attach(self.R, z, (v,))
        y = _per_sample("S(u)", self.S(u), v)
        return _Stage(v, y, z, found.residual, found.converged, found.nonfinite, found.steps)

    def _run(self, program: Callable[..., Any], steps: range, *inputs: Tensor) -> tuple[_Stage, _Carried]:
        """Run a stage, on a GPU by the graph for the padded batch."""
        size = bucket(len(inputs[0]))
        key = (program.__name__, steps, self.net.tolerance, size, *((x.shape[1:], x.dtype) for x in inputs))

        def function(*padded: Tensor) -> tuple[_Stage, _Carried]:
            with self._autocast(padded[0]):
                made: tuple[_Stage, _Carried] = program(steps, *padded)
            return made

        found, carried = self._calls(key, function, inputs, size)
        rows = slice(0, len(inputs[0]))
        return _Stage(*(part[rows] for part in found)), tuple(part[rows] for part in carried)

    def _autocast(self, x: Tensor) -> AbstractContextManager[Any]:
        return torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def _check_mode(self) -> None:
        if any(module.training for module in self.net.modules()) or uses_batch_statistics(self.net.R):
            raise RuntimeError("a compiled network predicts in eval mode; call net.eval() first")


compile = CompiledNetwork  # `banach.compile(net)` reads like `torch.compile(net)`


def _check_network(net: Any) -> None:
    if not isinstance(net, ImplicitNetwork):
        raise TypeError(f"compile takes an ImplicitNetwork, got {_name(net)}")
    if not is_as_written(net):
        raise TypeError(
            "compile takes an ImplicitNetwork whose Q, R and S it can call itself, got "
            f"{type(net).__name__} with hooks or an overridden forward"
        )
    if net.coupled:
        raise ValueError("compile takes a network whose samples stop one by one, got coupled=True")


def _batch_of(d: tuple[Any, ...]) -> int:
    """Return the number of samples that all inputs have a row for."""
    if not d:
        raise TypeError("a compiled network takes the inputs of Q, got none")
    for one in d:
        if not _one_tensor("d", one).dim():
            raise ValueError("d must be a batch of inputs, got a tensor without dimensions")
        if len(one) != len(d[0]):
            raise ValueError(f"all inputs must have one row per sample, got {len(d[0])} and {len(one)} rows")
    return len(d[0])


def _check_start(z0: Any, batch: int) -> None:
    if z0 is not None and not isinstance(z0, Tensor):
        raise TypeError(f"z0 must be a tensor, such as the value of a Solution, got a {_name(z0)}")
    if z0 is not None and len(z0) != batch:
        raise ValueError(f"z0 must hold one latent for each of {batch} inputs, got {len(z0)}")


def _one_tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        got = type(value).__name__
        raise TypeError(f"compile takes networks whose {name} is one tensor, got a {got}; call the network itself")
    return value


def _per_sample(name: str, value: Any, batch: Tensor) -> Tensor:
    """Return the value if it has a row for each sample: samples leave the batch one by one."""
    if _one_tensor(name, value).shape[:1] != batch.shape[:1]:
        got = tuple(value.shape)
        raise ValueError(
            f"compile takes networks whose {name} has a row for each of {len(batch)} samples, got a tensor of "
            f"shape {got}; call the network itself"
        )
    return cast(Tensor, value)


def _name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _choose(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the samples of a where the mask is true, else those of b, in the memory format of a."""
    return torch.where(mask.view(-1, *[1] * (a.dim() - 1)), a, b)
