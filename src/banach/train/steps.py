"""One training step: forward, loss, backward, clipping, optimizer, averaged weights; captured where it can be."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.backward import Implicit, Neumann, Unroll
from banach.data import counter
from banach.fast.graph import why_not_captured
from banach.train.captured import CapturedSteps, why_not
from banach.train.evaluate import scores
from banach.train.penalties import added, explained, observing, products
from banach.train.work import Work

_DRAWS = 2  # the stream of what the network draws; Batches has streams 0 and 1

Forward = Callable[[Tensor], tuple[Tensor, Any]]


class Steps:
    """`take()` is the next step of the work. `reason` says why steps are not captured, None if they are."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.reason = why_not(work) if work.settings.fast else "fast is off"
        if work.settings.fast and self.reason is not None and work.device.type == "cuda":
            warnings.warn(f"steps run one by one, since they cannot be captured: {self.reason}", stacklevel=4)
        self.captured: CapturedSteps | None = None
        self._order: tuple[int, Tensor] | None = None  # of which epoch, and the order
        work.net.train()

    def take(self) -> None:
        work = self.work
        if self.reason is None and self.captured is None:
            self.captured = self._capture()
        _seed(counter.key(work.settings.seed, _DRAWS, work.epoch, work.step), work.device)
        if self.captured is not None and self.captured.can:
            self.captured.take()
        else:
            self._take_plainly()
        count = min(work.settings.batch_size, len(work.batches.images) - work.step * work.settings.batch_size)
        work.products += count * (_products_per_sample(work.net) + products(work.settings))

    def _take_plainly(self) -> None:
        work, batches = self.work, self.work.batches
        for group in work.optimizer.param_groups:
            _set_rate(group, work.rate(work.step))
        index = batches.index(self._order_now(), work.step)
        images, labels = batches.make(index, batches.key(work.epoch, work.step))
        self._learn(images, labels, lambda x: scores(work.net, x, work.settings.precision))

    def _learn(
        self, images: Tensor, labels: Tensor, forward: Forward, after: Callable[[], None] = lambda: None
    ) -> None:
        """A step on a batch, which goes through the network in parts; `after` the last backward pass."""
        work, settings = self.work, self.work.settings
        work.optimizer.zero_grad()
        for x, y in zip(images.chunk(settings.accumulate), labels.chunk(settings.accumulate), strict=True):
            with observing(work.net, settings) as seen:
                output, found = forward(x)
            cross_entropy = partial(F.cross_entropy, target=y, label_smoothing=settings.label_smoothing)
            loss = cross_entropy(output)
            work.tally.add(loss, output, y, found)
            total = loss if seen is None else loss + added(seen, settings, cross_entropy)
            with explained(settings):
                (total * (len(y) / len(labels))).backward()
        after()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(work.net.parameters(), settings.clip)
        work.optimizer.step()
        if work.average is not None:
            work.average.update(work.net)

    def _order_now(self) -> Tensor:
        """The order of this epoch, made once."""
        epoch = self.work.epoch
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.work.batches.order(epoch)
        return self._order[1]

    def _capture(self) -> CapturedSteps | None:
        try:
            made = CapturedSteps(self.work, self._learn)
            made.prepare()
        except Exception as error:  # whatever a user's network does that a capture cannot hold
            self.reason = why_not_captured(error)
            warnings.warn(f"steps run one by one, since they cannot be captured: {self.reason}", stacklevel=4)
            del error
            gc.collect()  # else the next backward pass meets what the capture recorded, on another stream
            return None
        return made


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _seed(number: int, device: torch.device) -> None:
    """As `torch.manual_seed`, which also turns to every device there is not, for a tenth of a millisecond."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(number)


def _products_per_sample(net: Any) -> int:
    """J-products that follow from the mode alone; an Implicit that asks the host reports its own."""
    mode = getattr(net, "backward", None)
    if isinstance(mode, Implicit):
        return mode.products or 0
    if isinstance(mode, Neumann):
        return mode.order
    return mode.steps - 1 if isinstance(mode, Unroll) else 0
