"""Training steps as CUDA graphs: from the choice of images to the averaged weights, the host is asked nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from banach.backward import Implicit
from banach.fast import (
    DepthControl,
    FixedDepth,
    Programs,
    align_state,
    first_control,
    prefers_channels_last,
    reset_optimizer,
    wrapped,
)
from banach.network import ImplicitNetwork
from banach.train.penalties import observing
from banach.train.precision import at_least_fp32, autocast
from banach.train.work import Work

Learn = Callable[[Tensor, Tensor, Callable[[Tensor], Any], Callable[[], None]], None]


def why_not(work: Work) -> str | None:
    """Why steps cannot be captured, in a sentence; None if they can."""
    net: Any = work.net
    if work.device.type != "cuda":
        return "steps are captured on a CUDA GPU alone"
    if isinstance(net, ImplicitNetwork) and isinstance(net.backward, Implicit) and net.backward.asks_the_host:
        return "implicit differentiation asks the host whether its linear solve is done, unless check_every is 0"
    if len(work.batches.images) < work.settings.batch_size:
        return "there is no whole batch"
    return None


class CapturedSteps:
    """`take()` runs the next training step of the work: one launch, whatever the network.

    Order, keys of the augmentation and learning rates of an epoch lie on the device, and the program counts its
    own steps.
    """

    def __init__(self, work: Work, learn: Learn) -> None:
        self.work, self.learn, self.device = work, learn, work.device
        steps, batch = len(work.batches), work.settings.batch_size
        self.order = torch.zeros(len(work.batches.images), dtype=torch.int64, device=self.device)
        self.keys = torch.zeros(steps, dtype=torch.int64, device=self.device)
        self.rates = torch.zeros(steps, dtype=torch.float32, device=self.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.within = torch.arange(batch, device=self.device)
        self.excess: Tensor | None = None
        self.whole = len(work.batches.images) // batch  # batches of full size
        self.epoch = -1
        self.net = self._network()
        fresh = not work.optimizer.state
        after: Callable[[], None] = (lambda: reset_optimizer(work.optimizer)) if fresh else (lambda: None)
        self.programs = Programs(self.device, self._body, self._control(), self._changing, after)

    @property
    def can(self) -> bool:
        """Is the next batch a whole one?"""
        return self.work.step < self.whole

    def prepare(self) -> None:
        """Capture the first program, so that what cannot be captured shows before anything has changed."""
        self._begin_epoch()
        self.programs.prepare()

    def take(self) -> None:
        """The next step. The work's own counters are its caller's to move on."""
        if self.epoch != self.work.epoch:
            self._begin_epoch()
        self.programs.run()

    def _network(self) -> Any:
        net, settings = self.work.net, self.work.settings
        wrap: Any = wrapped if settings.compile else _as_it_is
        if prefers_channels_last(net, settings.precision):
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            align_state(self.work.optimizer)
        if isinstance(net, ImplicitNetwork):
            with observing(net, settings):  # a pass that is observed goes through the network itself
                return FixedDepth(net, wrap, half=settings.precision == "bf16")
        return wrap(net)

    def _begin_epoch(self) -> None:
        work = self.work
        self.epoch = work.epoch
        self.order.copy_(work.batches.order(work.epoch))
        steps = range(len(work.batches))
        self.keys.copy_(torch.tensor([work.batches.key(work.epoch, k) for k in steps], dtype=torch.int64))
        self.rates.copy_(torch.tensor([work.rate(k) for k in steps], dtype=torch.float32))
        self.place.fill_(work.step)

    def _body(self, depth: int) -> Tensor | None:
        """What is captured: one whole step."""
        work = self.work
        index = self.order.index_select(0, self.place * len(self.within) + self.within)
        images, labels = work.batches.make(index, self.keys.index_select(0, self.place))
        for group in work.optimizer.param_groups:
            group["lr"].copy_(self.rates.index_select(0, self.place)[0])
        self.excess = None
        before, after = _nothing, _nothing
        if isinstance(self.net, FixedDepth):
            before, after = self.net.refresh, self.net.collect
        before()
        self.learn(images, labels, lambda x: self._forward(x, depth), after)
        self.place += 1
        return self.excess

    def _forward(self, x: Tensor, depth: int) -> tuple[Tensor, Any]:
        with autocast(self.work.settings.precision, self.device):
            if not isinstance(self.net, FixedDepth):
                return at_least_fp32(self.net(x)), None
            output, reached = self.net(x, depth)
        if self.excess is None or reached.excess is None:
            self.excess = reached.excess
        else:  # of several parts of a batch the one that is furthest off counts
            self.excess = torch.maximum(self.excess, reached.excess)
        return at_least_fp32(output), reached

    def _changing(self) -> Iterator[Tensor]:
        yield from self.work.changing()
        yield self.place

    def _control(self) -> DepthControl | None:
        work, batches = self.work, self.work.batches
        if not isinstance(self.net, FixedDepth):
            return None
        x = batches.make(batches.order(work.epoch)[: len(self.within)], 0)[0]
        return first_control(self.net, x, lambda: autocast(work.settings.precision, self.device))


def _nothing() -> None:
    """Where nothing is to be done."""


def _as_it_is(part: Any) -> Any:
    return part
