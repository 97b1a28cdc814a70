"""The training steps of `fit`: a TrainStep for the network as it is, seeds and J-products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from banach.backward import Implicit, Neumann, Unroll
from banach.data import counter
from banach.fast import unchanged
from banach.fast.plan import Plan, plan
from banach.fast.step import Extras, TrainStep
from banach.models import ODENet, unrolled
from banach.models.ode import ODE_FAILURES
from banach.network import ImplicitNetwork
from banach.train.distributed import Parallel
from banach.train.feeds import feed_of
from banach.train.finite import Watch
from banach.train.penalties import Penalties
from banach.train.precision import autocast
from banach.train.state import TrainState

_DRAWS = 2  # the stream of what the network draws; Batches has streams 0 and 1, Loader 3
_TUNED = 30  # the step of an epoch at which modules tune themselves, and once more in its middle


class Steps:
    """`take()` is the next training step of the state; `show` gets the plan of how it runs, when that changes."""

    def __init__(self, state: TrainState, show: Callable[[Plan], None] = lambda plan: None) -> None:
        self.state, self.feed, self.show = state, feed_of(state), show
        self._shown: Plan | None = None
        self.watch = Watch(state, self.feed.place)
        self._make()

    def _make(self) -> None:
        """Plan a step for the network as it is now, and make it."""
        state = self.state
        net, settings = state.net.train(), state.settings
        self.penalties = None if self._pretrain else Penalties.of(settings)
        refused = None if self.feed.full else "there is no whole batch"
        if isinstance(net, ODENet):
            refused = "the ODE solver chooses its steps on the host"
        if (ranks := state.ranks.count) > 1:
            refused = f"{ranks} ranks exchange gradients within a step"
            state.parallel = state.parallel or Parallel(net, ranks, self.feed.count, sharded=settings.sharded)
        with self._phase():
            how = plan(
                net,
                state.device,
                settings.precision,
                compile=settings.compile,
                observed=self.penalties is not None,
                refused=refused if settings.fast else "fast is off",
            )
        if how.graph and how.channels_last:
            from banach.fast.weights import align_state, channels_last

            channels_last(net)
            align_state(state.optimizer)
        more: Any = {"metrics": state.metrics, "watch": self.watch, "parallel": state.parallel}
        extras = Extras(settings.accumulate, settings.clip, self.penalties, state.average, **more)
        loss = state.objective.loss
        if loss is F.cross_entropy:
            loss = partial(loss, label_smoothing=settings.label_smoothing)
        bf16 = settings.precision == "bf16"
        self.step = TrainStep(net, state.optimizer, loss, bf16=bf16, extras=extras, feed=self.feed, how=how)
        self._planned, self._pretrains = bool(how.graph), self._pretrain
        if settings.fast and not how.graph and state.device.type == "cuda":
            self.step.warn()

    @property
    def plan(self) -> Plan:
        return self.step.plan

    @property
    def failed(self) -> bool:
        """A capture was planned, and failed."""
        return self._planned and not self.plan.graph

    @property
    def _pretrain(self) -> bool:
        """The next step is one of those that unroll R."""
        state = self.state
        return state.epoch * len(state.batches) + state.step < state.settings.pretrain

    def _phase(self) -> AbstractContextManager[None]:
        """Unroll R in the block, if the next step is to."""
        return unrolled(cast(ImplicitNetwork, self.state.net)) if self._pretrain else nullcontext()

    def prepare(self) -> None:
        """Capture the step, if that is planned; again if the network is used in another way than before."""
        if self._pretrains != self._pretrain or self._tuned():
            self._make()
        if self.plan.graph:
            self.feed.load()
            if not self.step.prepared:
                with self._phase(), unchanged([self.watch.first]):  # the warm-up is undone
                    self.step.prepare()
        if self.plan is not self._shown:
            if self.plan != self._shown:
                self.show(self.plan)
            self._shown = self.plan

    def _tuned(self) -> bool:
        """Let modules tune themselves on the next batch, if it is time; return True if one has changed."""
        state, steps = self.state, len(self.state.batches)
        if not state.settings.tune or state.step not in (_TUNED, steps // 2) or self._pretrain:
            return False
        d, _ = self.feed.batch()
        able: list[Any] = [module for module in state.net.modules() if callable(getattr(module, "tune", None))]
        with autocast(state.settings.precision, state.device), torch.no_grad():
            changed = [module.tune(state.net, *d) for module in able]  # all of them, before any() looks
        return any(changed)

    def take(self) -> None:
        """Take the next step. The caller advances the state's counters."""
        state, settings = self.state, self.state.settings
        self.prepare()  # before the seed: a capture draws random numbers
        rank = () if state.ranks.first else (state.ranks.rank,)  # every rank draws other dropout masks
        _seed(counter.key(settings.seed, _DRAWS, state.epoch, state.step, *rank), state.device)
        with self._phase():
            products = _products_per_sample(state.net)
            try:
                self.step.run()
            except ODE_FAILURES as error:
                if not isinstance(state.net, ODENet) or state.ranks.count > 1:
                    raise
                self.watch.failed(error)
                return
        own = state.batches.own(self.feed.count(), state.ranks.rank)
        products += 0 if self.penalties is None else self.penalties.products
        products += state.metrics.add_evaluations(state.net, own.stop - own.start)
        state.products += (own.stop - own.start) * products


def _seed(number: int, device: torch.device) -> None:
    """Seed as `torch.manual_seed` does, which takes 0.1 ms more for devices that are not used."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(number)


def _products_per_sample(net: Any) -> int:
    """Return the J-products that follow from the mode alone; see `counted_products` for others."""
    mode = getattr(net, "backward", None)
    if isinstance(mode, Neumann):
        return mode.order
    return mode.steps - 1 if isinstance(mode, Unroll) else 0


@contextmanager
def counted_products(state: TrainState) -> Iterator[None]:
    """Count the J-products of `Implicit` on the device."""
    net: Any = state.net
    mode = getattr(net, "backward", None)
    if not isinstance(mode, Implicit):
        yield
        return
    net.backward = replace(mode, count=state.counted)
    try:
        yield
    finally:
        net.backward = mode
