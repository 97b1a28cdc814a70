"""The training steps of `fit`: a TrainStep for the network as it is, the batches it reads, penalties and seeds."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from banach.backward import Neumann, Unroll
from banach.backward.jacobian import explained
from banach.data import counter
from banach.data.images import own_part
from banach.data.loader import Batch, Loader
from banach.fast import align_state, channels_last
from banach.fast.capture import unchanged
from banach.fast.plan import plan
from banach.fast.step import Extras, TrainStep, at_least_fp32, autocast, kinds
from banach.latent import leaves
from banach.models import ODENet, unrolled
from banach.models.ode import ODE_FAILURES
from banach.network import ImplicitNetwork
from banach.nn import Observed, finite_difference_penalty, fixed_point_correction, jacobian_penalty, observe
from banach.train.checkpoint import Position
from banach.train.distributed import Parallel
from banach.train.finite import NonfiniteWatch
from banach.train.metrics import cross_entropy
from banach.train.settings import Settings
from banach.train.state import TrainState

_MOST = torch.finfo(torch.float32).max
_TUNED = 30  # the step of an epoch at which modules tune themselves, and once more in its middle


class Feed:
    """The `Feed` of a `TrainStep` in `fit`. A captured step makes a batch of copies of its parts.

    The parts of an image batch are a key and an index (`Batches.drawn`), those of a `Loader` the batch itself. The
    copies have the shapes of the first batch; before a captured step `load` writes them. `step_number` is that of
    the step which runs, from 1.
    """

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.step_number = torch.zeros(1, dtype=torch.int64, device=state.device)
        self.at: Position | None = None  # that of `parts`
        self.kept: Batch = ()  # what a captured step reads

    def next_parts(self) -> Batch:
        """Return what the batch at the state's position is made from, drawn once. Earlier ones are skipped."""
        position, batches = self.state.position, self.state.batches
        if self.at != position:
            if self.at is None or self.at.epoch != position.epoch:
                drawn: Any = batches.epoch if isinstance(batches, Loader) else batches.drawn
                self.drawn = enumerate(drawn(position.epoch))
            for k, parts in self.drawn:
                if k == 0:
                    self.first = parts
                if k == position.step:
                    break
            self.at, self.parts = position, parts
        return self.parts

    @property
    def fits(self) -> bool:
        return kinds(self.next_parts()) == kinds(self.kept)

    def count(self) -> int:
        """Return the number of samples of the next batch, on all ranks."""
        return len(self.next_parts()[-1])

    def load(self) -> None:
        """Write what a captured step reads."""
        given = self.next_parts()
        if not self.kept:  # of the first batch, though a resumed epoch may begin with its last one
            self.kept = tuple(one.to(self.state.device, copy=True) for one in self.first)
        self.begin_step()
        if self.fits:
            for kept, one in zip(self.kept, given, strict=True):
                kept.copy_(one)

    def begin_step(self) -> None:
        """Set the learning rate and the number of the next step."""
        rate = self.state.rate(self.state.step)
        self.step_number.fill_(self.state.step + 1)
        for group in self.state.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate if rate <= _MOST else torch.inf)  # of fp32, which refuses more
            else:
                group["lr"] = rate

    def batch(self, *, captured: bool) -> Batch:
        if not captured:
            self.begin_step()
        return self.make(self.kept if captured else self.next_parts())

    def make(self, parts: Batch) -> Batch:
        batches = self.state.batches
        return parts if isinstance(batches, Loader) else batches.make(index=parts[1], key=parts[0])

    def changing(self) -> Iterator[Tensor]:
        yield from (self.state.metrics.sums, self.state.metrics.most, self.state.counted)
        if self.state.average is not None:
            yield from self.state.average.weights.values()


@dataclass(frozen=True)
class Penalties:
    """What settings add to the loss: a penalty on dT/du, and losses on iterates; a part of a `TrainStep`."""

    settings: Settings

    @staticmethod
    def of(settings: Settings) -> "Penalties | None":
        return Penalties(settings) if settings.jacobian_penalty or settings.correction else None

    @property
    def products(self) -> int:
        """J-products that the penalty makes, per sample and step."""
        return int(self.settings.jacobian_penalty > 0 and not self.settings.finite_difference)

    def observing(self, net: Any) -> AbstractContextManager[Observed]:
        return observe(net, self.settings.correction_steps if self.settings.correction else ())

    def added(self, seen: Observed, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what is added to the loss of an observed pass, in the precision of the pass."""
        settings, first = self.settings, leaves(seen.z)[0]
        total = first.new_zeros(())
        with autocast(settings.precision == "bf16", first.device):
            if settings.jacobian_penalty:
                estimate = finite_difference_penalty if settings.finite_difference else jacobian_penalty
                found = estimate(seen.T, seen.z, seen.inputs, coupled=seen.coupled)
                total = total + settings.jacobian_penalty * found.mean()
            if settings.correction:
                found = fixed_point_correction(seen, lambda y: loss(at_least_fp32(y)))
                total = total + settings.correction * found
        return total

    def explained(self) -> AbstractContextManager[None]:
        """Say what to do where a penalty's gradient fails because R has no second derivative."""
        needs = "jacobian_penalty needs second derivatives of R, and a layer of R has none ({why})"
        causes = ("once_differentiable", "is not implemented") if self.products else ()
        return explained(dict.fromkeys(causes, f"{needs}; set finite_difference=True (--finite-difference)"))


class Stepper:
    """`take()` is the next training step of the state."""

    def __init__(self, state: TrainState) -> None:
        self.state, self.feed = state, Feed(state)
        self.watch = NonfiniteWatch(state, self.feed.step_number)
        state.set_train_mode()
        self._make()

    def _make(self) -> None:
        """Plan a step for the network as it is now, and make it."""
        state = self.state
        net, settings = state.net, state.settings
        self.penalties = None if self._pretrains else Penalties.of(settings)
        if (ranks := state.ranks.count) > 1:
            state.parallel = state.parallel or Parallel(net, ranks, self.feed.count, sharded=settings.sharded)
            state.parallel.total = self.feed.count  # of this feed, also after a rewind
        options: Any = {"compile": settings.compile, "observed": self.penalties is not None}
        how = partial(plan, net, state.device, settings.precision, refused=self._refused(), **options)
        with self._phase():
            first = how()
        if first.graph and first.channels_last:
            channels_last(net)
            align_state(state.optimizer)
        held: Any = {"metrics": state.metrics, "watch": self.watch, "parallel": state.parallel}
        extras = Extras(settings.accumulate, settings.clip, self.penalties, state.average, **held)
        loss, bf16 = state.objective.loss, settings.precision == "bf16"
        if loss is cross_entropy:
            loss = partial(loss, label_smoothing=settings.label_smoothing)
        with self._phase():
            self.step = TrainStep(net, state.optimizer, loss, bf16=bf16, extras=extras, feed=self.feed, how=how)
        self._planned_graph, self._made_for_pretrain = bool(first.graph), self._pretrains
        if settings.fast and not first.graph and state.device.type == "cuda":
            self.step.warn()

    def _refused(self) -> str | None:
        """Return why steps are not captured, whatever the network computes; None if they may be."""
        if not self.state.settings.fast:
            return "fast is off"
        if self.state.ranks.count > 1:
            return f"{self.state.ranks.count} ranks exchange gradients within a step"
        return "the ODE solver chooses its steps on the host" if isinstance(self.state.net, ODENet) else None

    @property
    def failed(self) -> bool:
        """A capture was planned, and failed."""
        return self._planned_graph and not self.step.plan.graph

    @property
    def _pretrains(self) -> bool:
        """The next step is one of those that unroll R."""
        state = self.state
        return state.epoch * len(state.batches) + state.step < state.settings.pretrain

    def _phase(self) -> AbstractContextManager[None]:
        """Let the network unroll R in the block, if the next step does."""
        return unrolled(cast(ImplicitNetwork, self.state.net)) if self._pretrains else nullcontext()

    def prepare(self) -> None:
        """Capture the step, if that is planned; again if the network is used in another way than before.

        What `on_epoch` changed is seen at the first step of an epoch.
        """
        with self._phase():
            changed = self.state.step == 0 and self.step.outdated
        if self._made_for_pretrain != self._pretrains or self._tune_modules() or changed:
            self._make()
        if self.step.plan.graph:
            self.feed.load()
            if not self.step.prepared:
                with self._phase(), unchanged([self.watch.first]):  # the warm-up is undone
                    self.step.prepare()

    def _tune_modules(self) -> bool:
        """Let modules tune themselves on the next batch, if it is time; return True if one has changed."""
        state, steps = self.state, len(self.state.batches)
        if not state.settings.tune or state.step not in (_TUNED, steps // 2) or self._pretrains:
            return False
        *d, _ = self.feed.make(self.feed.next_parts())
        able: list[Any] = [module for module in state.net.modules() if callable(getattr(module, "tune", None))]
        with autocast(state.settings.precision == "bf16", state.device), torch.no_grad():
            changed = [module.tune(state.net, *d) for module in able]  # all of them, before any() looks
        return any(changed)

    def take(self) -> None:
        """Take the next step. The caller advances the state's counters."""
        state, settings = self.state, self.state.settings
        self.prepare()  # before the seed: a capture draws random numbers
        rank = () if state.ranks.first else (state.ranks.rank,)  # every rank draws other dropout masks
        seed = counter.key(settings.seed, counter.NETWORK, state.epoch, state.step, *rank)
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes 0.1 ms more, for unused devices
        if state.device.type == "cuda":
            index = torch.cuda.current_device() if state.device.index is None else state.device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        with self._phase():
            mode: Any = getattr(state.net, "backward", None)  # `Implicit` counts its own J-products
            products = mode.order if isinstance(mode, Neumann) else 0
            products += mode.steps - 1 if isinstance(mode, Unroll) else 0
            try:
                self.step.run()
            except ODE_FAILURES as error:
                if not isinstance(state.net, ODENet) or state.ranks.count > 1:
                    raise
                where = f"in step {state.step + 1} of epoch {state.epoch + 1}"
                self.watch.failure = f"the solver failed ({error}) {where}"
                return
        own = own_part(self.feed.count(), state.ranks.rank, state.ranks.count)
        samples = own.stop - own.start
        products += 0 if self.penalties is None else self.penalties.products
        products += state.metrics.add_evaluations(state.net, samples)
        if products:  # else this would be one more kernel
            state.counted += samples * products
