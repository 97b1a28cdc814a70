"""TrainStep: forward, loss, backward and optimizer as one step, captured as CUDA graphs where the plan allows."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from banach.fast.capture import Graphs, HeldFixed, reason_of, unchanged
from banach.fast.network import FastNetwork, compiled, promoted, run_network
from banach.fast.plan import MAY_CHANGE, Choice, Plan, plan
from banach.network import ImplicitNetwork, as_inputs, check_loss
from banach.nn.passes import keeps_buffers
from banach.solve import Solution
from banach.solve.warning import warn_user

# Their state before the first step is zero, or as good as zero.
_START_AT_ZERO = (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.SGD)
# Options of an optimizer that may change after a capture: they change no value.
_FREE = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True, eq=False)
class Extras:
    """What a step does besides loss, gradient and optimizer.

    Attributes:
        accumulate: number of parts of a batch, run one after the other; their losses are weighted by samples.
        clip: largest norm of the gradient of the optimizer's weights.
        penalty: `penalty.observing(net)` surrounds a pass; `penalty.added(seen, loss)` is added to its loss.
        average: `average.update(net)` is called after the optimizer.
        metrics: `metrics.add(loss, output, targets, solution)` is called for every part.
        watch: `watch.begin()` and `watch.end(loss)` are called before and after everything else.
        parallel: on several ranks, `parallel(*d)` calls the network and `parallel.weight(n)` weights the loss of n
            samples. Such a step is not captured.

    A captured step calls average and metrics in its warm-up too: `Feed.changing` names what to restore then.
    """

    accumulate: int = 1
    clip: float | None = None
    penalty: Any = None
    average: Any = None
    metrics: Any = None
    watch: Any = None
    parallel: Any = None


class Feed(Protocol):
    """Where a `TrainStep` gets its batches, each (*inputs, targets)."""

    @property
    def fits(self) -> bool:
        """The next batch has the shapes of the captured step."""

    def batch(self, *, captured: bool) -> tuple[Tensor, ...]:
        """Return the next batch. `captured`: for a CUDA graph, so made of tensors that stay where they are."""

    def changing(self) -> Iterable[Tensor]:
        """Return what a step changes besides the network and the optimizer: a warm-up restores it."""
        return ()


class TrainStep:
    """step(inputs, targets) -> loss: one training step, captured on a GPU as CUDA graphs.

    Every sample stops at its own depth, as in the network itself: the iteration is a while node between two
    graphs, or a kernel that knows R. On a GPU the tensors of the step belong to the graph: the next step
    overwrites them, and batches must keep their shape and dtype. If a step cannot be captured, as on a CPU, it
    runs eagerly and a warning gives the reason. A step is captured again, which takes a second or more, if you
    change the solver, tolerance, backward mode, train or eval mode, weights (freeze, move, replace), optimizer
    (load its state, add weights), or float, bool and str attributes. Make a buffer of what always changes.

    Args:
        net: the network, usually an `ImplicitNetwork`.
        optimizer: one that can be captured, such as `torch.optim.Adam(..., fused=True, capturable=True)`. The
            learning rate of Adam and AdamW may then change from step to step.
        loss: loss(output, targets), a tensor without axes.
        bf16: compute under autocast.
        compile: compile Q, R, S and the loss, if the step is captured.
        extras: clipping, penalties, averages and metrics that are part of the step.
        feed: a `Feed`, the batches of `run()`. None: they are the arguments of the call.
        how: the plan, or what makes it: how(), or how(keeps_buffers=True). None: `plan(net)`.

    Attributes:
        plan: what runs, and why not something faster; `print(step.plan)`.
        reached: the `Solution` of the last step (with `accumulate`, of its last part), without its value if it was
            captured; None for a network without fixed point.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Tensor], Tensor],
        *,
        bf16: bool = False,
        compile: bool = False,
        extras: Extras = Extras(),
        feed: Feed | None = None,
        how: Plan | Callable[..., Plan] | None = None,
    ) -> None:
        if not isinstance(net, nn.Module):
            raise TypeError(f"TrainStep takes a network, got {type(net).__name__}")
        options: Any = {"compile": compile, "observed": extras.penalty is not None}
        made = how or partial(plan, net, precision="bf16" if bf16 else None, **options)
        self._how: Callable[..., Plan] = (lambda **_: made) if isinstance(made, Plan) else made
        self._warns = how is None
        self.net, self.optimizer, self.bf16, self.extras = net, optimizer, bf16, extras
        self.feed: Feed = GivenBatches(optimizer) if feed is None else feed
        self.loss: Callable[[Any, Tensor], Tensor] = loss
        self.reached: Solution | None = None
        self._recording: Any = None
        self._make_plan()

    @property
    def reason(self) -> str | None:
        """Why the step is not captured, None if it is."""
        return None if self.plan.graph else self.plan.graph.why

    def __call__(self, inputs: Tensor | tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """Take a step on a batch and return its loss.

        Args:
            inputs: a tensor, or a tuple of tensors for a Q that takes several.
            targets: what the loss is computed from.
        """
        d = as_inputs(inputs)
        for name, value in (*(("inputs", one) for one in d), ("targets", targets)):
            if not isinstance(value, Tensor):
                raise TypeError(f"a training step takes a tensor of {name}, got a {type(value).__name__}")
        if targets.shape[:1] == (0,):
            raise ValueError("targets need a batch axis of at least one sample, got none; leave that batch out")
        given = cast(GivenBatches, self.feed)
        if self.outdated:
            self._make_plan()
            given.kept = ()  # other shapes and options may be captured now
        given.take((*d, targets), captured=bool(self.plan.graph))
        return self.run()

    def _make_plan(self) -> None:
        """Plan for the network as it is now. The step will be captured again."""
        self.plan = self._how()
        self._recording = None
        self._hold()
        if self._warns and not self.plan.graph:
            self.warn()

    def _hold(self) -> None:
        """Note what a CUDA graph of the step holds fixed, the memory of the optimizer's state too."""
        self._held = (HeldFixed(self.net), self._memory()) if self.plan.graph else None

    def _memory(self) -> list[int]:
        return [*map(id, self._weights()), *map(Tensor.data_ptr, self._state())]

    @property
    def outdated(self) -> bool:
        """Network or optimizer have changed since a captured step was planned, which replays do not see."""
        held = self._held if self.plan.graph else None
        return held is not None and (held[0].changed() or held[1] != self._memory())

    @property
    def prepared(self) -> bool:
        """The step has been captured, or will not be."""
        return self._recording is not None or not self.plan.graph

    def prepare(self) -> None:
        """Capture the step, if the plan says so. This draws random numbers and changes nothing else."""
        if self.prepared:
            return
        program = partial(self._body, captured=True)
        try:
            if self.plan.own_loop.why == MAY_CHANGE and self._keeps_buffers():
                self.plan = self._how(keeps_buffers=True)
            self._network = FastNetwork(self.net, self.plan)
            self._captured_loss = compiled(self.loss, self.plan)
            graphs = Graphs(next(self.net.parameters()).device)
            with self._restored():
                graphs.warm_up(program)
            self._recording = graphs.capture(program)
            self._hold()  # a module may have changed its numbers meanwhile
        except Exception as error:  # a user's network may do anything
            self.plan = replace(self.plan, graph=Choice(False, reason_of(error)))
            self.warn()
            del error
            gc.collect()  # otherwise the next backward pass meets tensors of the failed capture, on its stream

    def run(self) -> Tensor:
        """Take a step on the next batch of the feed and return its loss."""
        self.prepare()
        if self._recording is None or not self.feed.fits:
            loss, self.reached = self._body(captured=False)
            return loss
        loss, found = self._recording.replay()
        torch.autograd.graph.increment_version(self._weights())  # autograd does not see what replays write
        # Another object for every step: numbers of a Solution are kept once they have been read.
        self.reached = None if found is None else found.changed(value=())
        return loss

    def warn(self) -> None:
        """Warn that the step runs eagerly."""
        text = "the training step could not be captured as a CUDA graph and runs eagerly"
        warn_user(f"{text}: {self.plan.graph.why}", UserWarning)

    def _body(self, *, captured: bool) -> tuple[Tensor, Solution | None]:
        """Take a step, eagerly or as part of a CUDA graph. Return its loss, and the Solution of its last part."""
        extras = self.extras
        batch = self.feed.batch(captured=captured)
        if extras.watch is not None:
            extras.watch.begin()
        self.optimizer.zero_grad(set_to_none=True)
        if captured:
            self.net.zero_grad(set_to_none=True)  # a replay would add to gradients that may be freed by then
            self._network.bf16.refresh()
        parts: Any = [batch]
        if extras.accumulate > 1:
            parts = zip(*(one.chunk(extras.accumulate) for one in batch), strict=True)
        count = len(batch[-1])
        weight = 1.0 if extras.parallel is None else extras.parallel.weight(count)
        results = [self._part(part, weight * (len(part[-1]) / count), captured=captured) for part in parts]
        if extras.clip is not None:
            nn.utils.clip_grad_norm_(self._weights(), extras.clip)
        self.optimizer.step()
        if extras.average is not None:
            extras.average.update(self.net)
        total = sum((loss for loss, _ in results[1:]), start=results[0][0])
        if extras.watch is not None:
            extras.watch.end(total)
        return total, results[-1][1]

    def _part(self, batch: tuple[Tensor, ...], share: float, *, captured: bool) -> tuple[Tensor, Solution | None]:
        """Run a part of the batch, (*inputs, targets), forward and backward; `share` is its share of the batch."""
        penalty, metrics, targets = self.extras.penalty, self.extras.metrics, batch[-1]
        with nullcontext() if penalty is None else penalty.observing(self.net) as seen:
            d = batch[:-1]
            with autocast(self.bf16, next(self.net.parameters()).device):
                output, found = self._network(d) if captured else run_network(self.net, d, self.extras.parallel)
            if captured and found is not None:  # the graph would otherwise keep the latent
                found = found.changed(value=())
            output = at_least_fp32(output)
        if penalty is not None and found is not None:  # the observed solver holds the autograd graph of the pass
            found = replace(found, solver=cast(ImplicitNetwork, self.net).solver)
        compute = self._captured_loss if captured else self.loss
        loss = check_loss(compute(output, targets))
        if metrics is not None:
            metrics.add(loss, output, targets, found)
        total = loss if penalty is None else loss + penalty.added(seen, lambda y: compute(y, targets))
        with nullcontext() if penalty is None else penalty.explained():
            (total if share == 1 else total * share).backward()
        if captured:
            self._network.bf16.collect()
        return loss.detach() * share if share != 1 else loss.detach(), found

    @torch.no_grad()
    def _keeps_buffers(self) -> bool:
        """Return True if R writes to no buffer, by an evaluation on the next batch."""
        net = cast(ImplicitNetwork, self.net)
        with self._restored(), autocast(self.bf16, next(net.parameters()).device):
            v = net.Q(*self.feed.batch(captured=True)[:-1])
            return keeps_buffers(net.R, promoted(net.start(v)), v)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Undo the steps in the block, of a loss's weights too; new optimizer state becomes that of no step."""
        optimizer, state, had = self.optimizer, self.optimizer.state, {*self.optimizer.state}
        name, dampened = type(optimizer).__name__, any(group.get("dampening") for group in optimizer.param_groups)
        at_zero = isinstance(optimizer, _START_AT_ZERO) and not dampened
        known = {*self._weights(), *self.net.parameters(), *self.net.buffers(), *self._state()}
        parts = [(part, {**part}) for part in (*state.values(), *optimizer.param_groups)]
        try:
            with unchanged({*known, *self.feed.changing()}):
                yield
        finally:
            new = {*self._state()} - known
            counts = any(_numbers(part) != _numbers(before) for part, before in parts)
            for value in new:
                value.zero_()
            for p in () if at_zero else {*state} - had:
                del state[p]
            for part, before in () if at_zero else parts:
                part.clear()
                part.update(before)
        if new and not at_zero:
            raise RuntimeError(f"the state of {name} does not start at zero; take its first step eagerly")
        if counts:
            raise RuntimeError(f"{name} counts its steps by a number, which replays do not change; use a tensor")

    def _weights(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _state(self) -> list[Tensor]:
        return [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]


def autocast(bf16: bool, device: torch.device) -> AbstractContextManager[Any]:
    """Return autocast to bf16 if that is wanted, else a context that does nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()


def at_least_fp32(output: Any) -> Any:
    """Return an output with its tensors in half precision as fp32: sums in a loss would lose their digits."""
    short = torch.bfloat16, torch.float16
    return tree_map_only(Tensor, lambda one: one.float() if one.dtype in short else one, output)


def _numbers(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if isinstance(value, (int, float))}


class GivenBatches(Feed):
    """The `Feed` of batches given to `take`. A captured step reads copies of them, and of learning rates."""

    fits = True  # `take` refuses others

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.kept: tuple[Tensor, ...] = ()
        self.options: list[dict[str, Any]] = []  # that are part of the captured step

    def take(self, given: tuple[Tensor, ...], *, captured: bool) -> None:
        """Take inputs and targets. A captured step refuses what it was not captured for."""
        self.given = given
        if not captured:
            return
        if not self.kept:
            adam = isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW)
            for group in self.optimizer.param_groups:  # rates become tensors, which a graph reads at every replay
                rate, device = group["lr"], next((p.device for p in group["params"]), given[0].device)
                if isinstance(rate, Tensor):  # on the CPU, as from a checkpoint: a graph would keep its value
                    group["lr"] = rate.to(device)
                elif adam and group["capturable"]:
                    group["lr"] = torch.tensor(float(rate), device=device)
            names = [name for name in self.optimizer.defaults if name not in _FREE]
            self.options = [{name: group[name] for name in names} for group in self.optimizer.param_groups]
            self.kept = tuple(one.clone() for one in given)
        if (got := kinds(given)) != (wanted := kinds(self.kept)):
            raise ValueError(
                f"a captured step takes inputs and targets of the shapes and types of its first call, {wanted}, "
                f"got {got}; drop the last batch, or make a TrainStep for it"
            )
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            _follow(group, options)
        for value, kept in zip(given, self.kept, strict=True):
            kept.copy_(value)

    def batch(self, *, captured: bool) -> tuple[Tensor, ...]:
        return self.kept if captured else self.given


def _follow(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Take up a learning rate that was set since the last step. Refuse other options that were changed."""
    if isinstance(options["lr"], Tensor) and group["lr"] is not options["lr"]:
        group["lr"] = options["lr"].fill_(group["lr"])
    for name, value in options.items():
        if group[name] is not value and group[name] != value:
            other = "make a new TrainStep (OneCycleLR and CyclicLR: pass cycle_momentum=False)"
            advice = "give SGD lr=torch.tensor(...) and fused=True" if name == "lr" else other
            text = f"{name} = {value} of the optimizer is part of the captured step"
            raise ValueError(f"{text}, got {group[name]}; {advice}")


def kinds(batch: tuple[Tensor, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(one.shape), one.dtype) for one in batch]
