"""compile(net): the same network for prediction, in few launches: stages of several steps, each one a program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from banach.backward import JFB, Implicit, Neumann
from banach.fast.fixed import are_finite, measure, promoted, residual_of
from banach.fast.found import Found
from banach.fast.fuse import fused_parts, stacks_of
from banach.fast.graph import Graphs
from banach.fast.starts import Neighbours
from banach.fast.twin import traceless_twin
from banach.fast.whole import WholeSolve
from banach.latent import Space
from banach.network import ImplicitNetwork, is_as_written, warn_unconverged, zeros
from banach.nn.passes import uses_batch_statistics
from banach.solve import Picard, Status, mixes_samples
from banach.solve.stages import stage
from banach.solve.state import DIVERGED


class CompiledNetwork:
    """N(d) without gradients, for a network in eval mode whose Q, R and S treat each sample by itself.

    A batch is filled up to the next power of two. The first stage computes Q, `first` steps and S. Samples that do
    not meet the tolerance by then go on together, as a smaller batch, in stages of `then` steps, until they do or
    `max_steps` are made. The host asks once per stage. A sample's steps depend on no other sample; since they are
    counted in whole stages, its answer is at least as converged as the network's own. One that leaves the finite
    numbers, or diverges until `max_steps`, goes back to the best of the iterates that its stages began at. An R
    that the kernels know needs one stage, and by a solver other than Picard, whose memory goes on from stage to
    stage, a sample stops in the midst of one: there steps are the network's own. On a GPU a stage is a CUDA graph,
    one per size of batch and type of input; elsewhere it runs as it is.
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
        if not isinstance(net, ImplicitNetwork):
            raise TypeError(f"compile takes an ImplicitNetwork, got {_name(net)}")
        if not is_as_written(net):
            what = f"{type(net).__name__} with a forward or hooks of its own"
            raise TypeError(f"compile takes an ImplicitNetwork, whose Q, R and S it calls itself, got {what}")
        if net.coupled:
            raise ValueError("compile takes a network whose samples stop one by one, got coupled=True")
        for name, count, least in (("first", first, 1), ("then", then, 1), ("neighbours", neighbours, 0)):
            if type(count) is not int or count < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {count!r}")
        self.net, self.first, self.then, self.bf16 = net, first, then, bf16
        wrap: Any = torch.compile if compile else (lambda part: part)
        self.whole = WholeSolve.of(net)
        Q, R, S = fused_parts(net, whole=self.whole is not None) if bf16 else (net.Q, net.R, net.S)
        self.Q, self.S = wrap(Q), wrap(S)
        self.R = wrap(traceless_twin(R) if isinstance(R, nn.Module) else R)
        self.neighbours = Neighbours(neighbours) if neighbours else None
        self.probed = self.whole is not None  # was R seen to treat each sample by itself?
        self._graphs: Graphs | None = None
        self._stages: dict[tuple[Any, ...], tuple[list[Tensor], Found, Callable[[], None]]] = {}

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
        self._check()
        d = inputs[0] if len(inputs) == 1 and type(inputs[0]) is tuple else inputs
        batch = _batch_of(d)
        if z0 is not None and not isinstance(z0, Tensor):
            raise TypeError(f"z0 must be a tensor, such as the value of a Solution, got a {_name(z0)}")
        if z0 is not None and len(z0) != batch:
            raise ValueError(f"z0 must hold one latent for each of {batch} inputs, got {len(z0)}")
        if not batch and d[0].is_cuda:  # there is no sample to fill a batch up with
            return self.net(*d, z0=z0, solution=solution)
        most = self.net.tolerance.max_steps
        if not self.probed and batch > 1 and most:
            self._check_independent(d)
        steps = range(most if self.whole is not None else min(self.first, most))
        found = self._run(self._enter, steps, *d) if z0 is None else self._run(self._enter_from, steps, z0, *d)
        if steps.stop == most and not solution and (d[0].is_cuda or not most):  # without a host sync
            self._remember(found)
            return found.y.clone()  # the next call writes over it
        whole, here = found.copy(), torch.arange(batch, device=d[0].device)
        late, lost = here[:0], 0
        while steps.stop < most or not solution:
            late, nonfinite = found.ask()
            lost += nonfinite
            if not len(late) or steps.stop == most:
                break
            here, steps = here[late], range(steps.stop, min(steps.stop + self.then, most))
            found = self._continued(found.of(late), steps)
            whole.put(here, found)
        self._remember(whole)
        if solution:
            return whole.y, replace(whole.solution(), solver=self.net.solver, tolerance=self.net.tolerance)
        self._warn(whole, stopped=len(late), lost=lost)
        return whole.y

    def _check_independent(self, d: tuple[Tensor, ...]) -> None:
        """Refuse an R that mixes samples, once, by a few evaluations: late samples go on as a smaller batch."""
        with self._autocast(d[0]):
            v = self._injected(d)
            z = promoted(self.net.start(v))
            if mixes_samples(self.R, z, (v,)):
                raise ValueError(
                    "compile takes networks whose R treats each sample by itself, and this one mixes samples; "
                    "call the network itself, with coupled=True"
                )
        self.probed = True

    def _warn(self, found: Found, *, stopped: int, lost: int) -> None:
        """Warn as the network does. Samples are independent here, so R is not probed."""
        if self.net.tolerance.check_every != 0:
            counts = {Status.MAX_STEPS: stopped, Status.NONFINITE: lost}
            failures = frozenset(status for status, count in counts.items() if count)
            warn_unconverged(replace(found.solution(), failures=failures), self.R, (), coupled=True)

    def _continued(self, found: Found, steps: range) -> Found:
        if type(self.net.solver) is not Picard:  # what such a solver does depends on the number of the step
            return self._run(self._go_on, steps, found.v, found.z, *found.carried)
        made = self._run(self._go_on, range(len(steps)), found.v, *found.carried)
        made.steps.add_(steps.start)
        return made

    def _remember(self, found: Found) -> None:
        if self.neighbours is not None:
            self.neighbours.remember(found.v, found.z, found.converged)

    def _enter(self, steps: range, *d: Tensor) -> Found:
        v = self._injected(d)
        z0 = None if self.net.start is zeros else self.net.start(v)
        if self.neighbours is not None:
            z0 = self.neighbours(v, torch.zeros_like(v) if z0 is None else z0)
        return self._from(steps, v, z0)

    def _enter_from(self, steps: range, z0: Tensor, *d: Tensor) -> Found:
        return self._from(steps, self._injected(d), z0)

    def _injected(self, d: tuple[Tensor, ...]) -> Tensor:
        return _by_sample("Q(d)", _one_tensor("Q(d)", self.Q(*d)), d[0])

    def _from(self, steps: range, v: Tensor, z0: Tensor | None) -> Found:
        if self.whole is not None:
            self._forget()
            found = self.whole(v, z0)
            return self._found(v, found.value, found.residual, found.converged, found.nonfinite, found.steps)
        return self._go_on(steps, v, promoted(torch.zeros_like(v) if z0 is None else z0))

    def _go_on(self, steps: range, v: Tensor, z: Tensor, *carried: Tensor) -> Found:
        self._forget()
        if type(self.net.solver) is not Picard:
            return self._go_on_by_solver(steps, v, z, carried)
        if not steps:  # the explicit twin: there is no residual to speak of
            residual = z.new_full((len(z),), torch.inf, dtype=Space.of(z).rows_dtype)
            none = torch.zeros_like(residual, dtype=torch.bool)
            return self._found(v, z, residual, none, none, torch.zeros_like(residual, dtype=torch.int64))
        before, z = z, self._step(z, v)
        best, least = self._best(before, z, carried)
        for _ in steps[1:]:
            before, z = z, self._step(z, v)
        residual, allowed = measure(Space.of(z), self.net.tolerance, before, z, self.net.solver.damping)
        finite, taken = are_finite(residual, allowed), torch.full_like(residual, steps.stop, dtype=torch.int64)
        # Once per stage: at every step it would cost as much as a layer of R.
        met = residual <= allowed
        kept = finite & (met | (residual <= DIVERGED * least))
        made = self._found(v, _choose(kept, z, best), torch.where(kept, residual, least), met, ~finite, taken)
        return replace(made, carried=(z, best, least))

    def _step(self, z: Tensor, v: Tensor) -> Tensor:
        Tz, damping = self.R(z, v), cast(Picard, self.net.solver).damping
        return torch.lerp(Tz, z, damping) if damping else Tz

    def _best(self, z: Tensor, onward: Tensor, carried: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Of the iterates that stages began at, this one included, that of the least residual, and that residual.

        From one step to the next: T is finite where the step is. Infinite where it was nowhere.
        """
        residual = residual_of(Space.of(z), self.net.tolerance, z, onward, cast(Picard, self.net.solver).damping)
        z = z.to(onward.dtype)  # under autocast a step may be in a shorter type
        best, least = carried or (z, torch.full_like(residual, torch.inf))
        better = residual < least
        return _choose(better, z, best), torch.where(better, residual, least)

    def _go_on_by_solver(self, steps: range, v: Tensor, z: Tensor, carried: tuple[Tensor, ...]) -> Found:
        """As `solve` does it, asking nothing; samples that have converged stay where they are."""
        solver, tolerance = self.net.solver, self.net.tolerance
        found, onward = stage(self.R, z, solver, steps, inputs=(v,), tolerance=tolerance, carried=carried)
        made = self._found(v, found.value, found.residual, found.converged, found.nonfinite, found.steps)
        return replace(made, carried=onward)

    def _forget(self) -> None:
        """Weights may have changed since they were last packed."""
        for stack in stacks_of(self.R):
            stack.forget()

    def _found(
        self, v: Tensor, z: Tensor, residual: Tensor, converged: Tensor, nonfinite: Tensor, steps: Tensor
    ) -> Found:
        mode = self.net.backward
        u = self.R(z, v) if type(mode) in (JFB, Neumann, Implicit) else mode.attach(self.R, z, (v,))
        y = _by_sample("S(u)", _one_tensor("S(u)", self.S(u)), v)
        return Found(v, z, u, y, residual, converged, nonfinite, steps)

    def _run(self, program: Callable[..., Found], steps: range, *inputs: Tensor) -> Found:
        """The program on inputs filled up to a size there is a graph for."""
        batch, size = len(inputs[0]), _bucket(len(inputs[0]))
        if inputs[0].device.type != "cuda":
            with self._autocast(inputs[0]):
                return program(steps, *inputs)
        key = (program.__name__, steps, self.net.tolerance, size, *((x.shape[1:], x.dtype) for x in inputs))
        if key not in self._stages:
            self._stages[key] = self._capture(program, steps, [_filled(x, size) for x in inputs])
        buffers, found, replay = self._stages[key]
        for buffer, x in zip(buffers, inputs, strict=True):
            buffer[:batch].copy_(x)
        replay()
        return found.of(slice(0, batch))

    def _capture(
        self, program: Callable[..., Found], steps: range, buffers: list[Tensor]
    ) -> tuple[list[Tensor], Found, Callable[[], None]]:
        made: list[Found] = []

        def body() -> None:
            with self._autocast(buffers[0]):
                made.append(program(steps, *buffers))

        if self._graphs is None:
            self._graphs = Graphs(buffers[0].device)
        self._graphs.warm_up(body)
        graph = self._graphs.capture(body)
        return buffers, made[-1], graph.replay

    def _autocast(self, x: Tensor) -> AbstractContextManager[Any]:
        return torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def _check(self) -> None:
        if any(module.training for module in self.net.modules()) or uses_batch_statistics(self.net.R):
            raise RuntimeError("a compiled network predicts in eval mode; call net.eval() first")


def compile(
    net: ImplicitNetwork,
    *,
    first: int = 8,
    then: int = 4,
    bf16: bool = False,
    compile: bool = False,
    neighbours: int = 0,
) -> CompiledNetwork:
    """The network for prediction: `fast = banach.compile(net.eval())`, then `fast(d)` in place of `net(d)`.

    Q, R and S must treat each sample by itself: R and S are computed for parts of the batch. Later changes of the
    weights in place are seen. `first` and `then` are the steps of the first stage and of each
    later one, `bf16` computes under autocast, `compile` hands Q, R and S to torch.compile. `neighbours`: remember
    the fixed points of so many samples, and start from that of the nearest one; then an answer may differ, within
    the tolerance, with what was asked before. See `CompiledNetwork`.
    """
    return CompiledNetwork(net, first=first, then=then, bf16=bf16, compile=compile, neighbours=neighbours)


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


def _one_tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        got = type(value).__name__
        raise TypeError(f"compile takes networks whose {name} is one tensor, got a {got}; call the network itself")
    return value


def _by_sample(name: str, value: Tensor, batch: Tensor) -> Tensor:
    """Samples leave the batch one by one, so every part has a row for each."""
    if value.shape[:1] != batch.shape[:1]:
        got = tuple(value.shape)
        raise ValueError(
            f"compile takes networks whose {name} has a row for each of {len(batch)} samples, got a tensor of "
            f"shape {got}; call the network itself"
        )
    return value


def _name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _bucket(count: int) -> int:
    """The next power of two: a program per size would be a program per call."""
    return 1 << max(count - 1, 0).bit_length()


def _choose(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The samples of a where the mask is true, else those of b, in the memory format of a."""
    return torch.where(mask.view(-1, *[1] * (a.dim() - 1)), a, b)


def _filled(x: Tensor, size: int) -> Tensor:
    """x and, up to the size, its first sample again: of a real one every layer makes something finite."""
    buffer = torch.empty_like(x[:1].expand(size, *x.shape[1:]), memory_format=torch.preserve_format)
    buffer = buffer.contiguous() if 0 in buffer.stride() else buffer
    buffer.copy_(x[:1].expand(size, *x.shape[1:]))
    buffer[: len(x)].copy_(x)
    return buffer
