"""The training steps of `fit`: a TrainStep, the batches and learning rates it reads, seeds and J-products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from banach.backward import Implicit, Neumann, Unroll
from banach.data import counter
from banach.fast.plan import Plan, plan
from banach.fast.step import Extras, TrainStep
from banach.train.distributed import Parallel
from banach.train.finite import Watch
from banach.train.penalties import Penalties
from banach.train.state import TrainState

_DRAWS = 2  # the stream of what the network draws; Batches has streams 0 and 1


class Steps:
    """`take()` is the next training step of the state; `plan` says how it runs."""

    def __init__(self, state: TrainState) -> None:
        self.state, self.feed = state, _EpochFeed(state)
        net, settings = state.net.train(), state.settings
        self.penalties = Penalties.of(settings)
        refused = None if self.feed.full else "there is no whole batch"
        if (ranks := state.ranks.count) > 1:
            refused = f"{ranks} ranks exchange gradients within a step"
            state.parallel = state.parallel or Parallel(net, ranks, self.feed.count, sharded=settings.sharded)
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
        self.watch = Watch(state, self.feed.place)
        more: Any = {"metrics": state.metrics, "watch": self.watch, "parallel": state.parallel}
        extras = Extras(settings.accumulate, settings.clip, self.penalties, state.average, **more)
        loss = partial(F.cross_entropy, label_smoothing=settings.label_smoothing)
        bf16 = settings.precision == "bf16"
        self.step = TrainStep(net, state.optimizer, loss, bf16=bf16, extras=extras, feed=self.feed, how=how)
        self._planned = bool(how.graph)
        if settings.fast and not how.graph and state.device.type == "cuda":
            self.step.warn()

    @property
    def plan(self) -> Plan:
        return self.step.plan

    @property
    def failed(self) -> bool:
        """A capture was planned, and failed."""
        return self._planned and not self.plan.graph

    def prepare(self) -> None:
        """Capture the step, if that is planned."""
        if self.plan.graph:
            self.feed.begin_epoch()
            if not self.step.prepared:
                self.step.prepare()
                self.watch.reset()  # the warm-up was undone

    def take(self) -> None:
        """Take the next step. The caller advances the state's counters."""
        state, settings = self.state, self.state.settings
        self.prepare()  # before the seed: a capture draws random numbers
        rank = () if state.ranks.first else (state.ranks.rank,)  # every rank draws other dropout masks
        _seed(counter.key(settings.seed, _DRAWS, state.epoch, state.step, *rank), state.device)
        self.step.run()
        own = state.batches.own(self.feed.count(), state.ranks.rank)
        added = 0 if self.penalties is None else self.penalties.products
        state.products += (own.stop - own.start) * (_products_per_sample(state.net) + added)


class _EpochFeed:
    """The batches and learning rates of an epoch.

    A captured step counts its own steps and reads order, augmentation keys and rates from the device.
    """

    def __init__(self, state: TrainState) -> None:
        self.state, device = state, state.device
        batch, steps = state.settings.batch_size, len(state.batches)
        self.full = len(state.batches.images) // batch  # batches of full size
        self.epoch = self.order_epoch = -1
        self.order = torch.zeros(len(state.batches.images), dtype=torch.int64, device=device)
        self.keys = torch.zeros(steps, dtype=torch.int64, device=device)
        self.rates = torch.zeros(steps, dtype=torch.float32, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.within = torch.arange(batch, device=device)

    @property
    def whole(self) -> bool:
        return self.state.step < self.full

    def count(self) -> int:
        """Return the number of images of the next batch, on all ranks."""
        batch = self.state.settings.batch_size
        return min(batch, len(self.state.batches.images) - self.state.step * batch)

    def begin_epoch(self) -> None:
        """Write what captured steps read, once per epoch."""
        state = self.state
        if self.epoch == state.epoch:
            return
        self.epoch, steps = state.epoch, range(len(state.batches))
        self._order()
        self.keys.copy_(torch.tensor([state.batches.key(state.epoch, k) for k in steps], dtype=torch.int64))
        self.rates.copy_(torch.tensor([state.rate(k) for k in steps], dtype=torch.float32))
        self.place.fill_(state.step)

    def eager(self) -> tuple[tuple[Tensor], Tensor]:
        state, batches = self.state, self.state.batches
        rate = state.rate(state.step)
        self.place.fill_(state.step + 1)
        for group in state.optimizer.param_groups:
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        index = batches.index(self._order(), state.step)
        images, labels = batches.make(index, batches.key(state.epoch, state.step))
        return (images,), labels

    def captured(self) -> tuple[tuple[Tensor], Tensor]:
        state = self.state
        index = self.order.index_select(0, self.place * len(self.within) + self.within)
        images, labels = state.batches.make(index, self.keys.index_select(0, self.place))
        for group in state.optimizer.param_groups:
            group["lr"].copy_(self.rates.index_select(0, self.place)[0])
        self.place += 1
        return (images,), labels

    def changing(self) -> Iterator[Tensor]:
        yield from (self.place, self.state.metrics.sums, self.state.metrics.most)
        if self.state.average is not None:
            yield from self.state.average.weights.values()

    def _order(self) -> Tensor:
        """Return the order of this epoch, which is made once."""
        if self.order_epoch != self.state.epoch:
            self.order_epoch = self.state.epoch
            self.order.copy_(self.state.batches.order(self.state.epoch))
        return self.order


def _seed(number: int, device: torch.device) -> None:
    """Seed as `torch.manual_seed` does, which takes 0.1 ms more for devices that are not used."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(number)


def _products_per_sample(net: Any) -> int:
    """Return the J-products that follow from the mode alone; `Implicit` with host checks reports its own."""
    mode = getattr(net, "backward", None)
    if isinstance(mode, Implicit):
        return mode.products or 0
    if isinstance(mode, Neumann):
        return mode.order
    return mode.steps - 1 if isinstance(mode, Unroll) else 0


@contextmanager
def counted_products(state: TrainState) -> Iterator[None]:
    """Count the J-products that `Implicit` reports, and keep calling the user's `report`.

    Not with check_every=0, where a report would sync with the host at every step.
    """
    net: Any = state.net
    mode = getattr(net, "backward", None)
    if not isinstance(mode, Implicit) or not mode.checked:
        yield
        return

    def report(products: int, residual: Tensor, status: Any) -> None:
        state.products += products
        if mode.report is not None:
            mode.report(products, residual, status)

    net.backward = replace(mode, report=report)
    try:
        yield
    finally:
        net.backward = mode
