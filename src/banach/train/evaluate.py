"""evaluate(): what a network comes to on a split, in eval mode, on clean images, each image once."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from banach.data import Augmentation, Batches, Images
from banach.solve import ConvergenceWarning, Status
from banach.solve.warning import warn_user
from banach.train.precision import arithmetic
from banach.train.scorer import Scorer, scores
from banach.train.tally import Tally, Totals

__all__ = ["evaluate", "measure", "scores"]


def evaluate(
    net: nn.Module,
    images: Images,
    *,
    batch_size: int = 400,
    precision: str = "fp32",
    scorer: Scorer | None = None,
) -> Totals:
    """Loss, accuracy and, where there is a fixed point, how well it was found: means over the images.

    The network keeps its mode, and is on the device of the images. A `scorer` of this network, kept from one
    evaluation to the next, is fast on a GPU, and takes the images in batches of its own size there. A
    `ConvergenceWarning` says that fixed points were not found.
    """
    scorer = Scorer(net, precision, fast=False) if scorer is None else scorer
    if scorer.net is not net or scorer.precision != precision:
        raise ValueError(
            f"the scorer is of {'this' if scorer.net is net else 'another'} network in {scorer.precision}, "
            f"expected this one in {precision}; make a Scorer(net, {precision!r})"
        )
    training = net.training
    net.eval()
    try:
        return measure(scorer, images, batch_size)
    finally:
        net.train(training)


@torch.no_grad()
def measure(
    scorer: Scorer,
    images: Images,
    batch_size: int,
    begin: Callable[[], object] = lambda: None,
    *,
    augment: Augmentation | None = None,
    epoch: int = 0,
) -> Totals:
    """The same in the mode that the network is in; `begin` comes before the first image.

    With `augment` the images are changed, for every `epoch` anew.
    """
    begin()
    tally = _once(scorer, images, batch_size, augment, epoch)
    totals = tally.read()
    if not scorer.captures(images.device):
        return totals  # the network itself has warned of samples that did not converge
    if tally.nonfinite or not math.isfinite(totals.loss):
        # The network itself warns of samples that diverge, and a kernel that gave up is no answer at all.
        begin()
        return _once(scorer.itself(), images, batch_size, augment, epoch).read()
    if totals.converged is not None and totals.converged < 1 and scorer.net.tolerance.check_every != 0:
        text = f"the fixed point was not found for all samples: {Status.MAX_STEPS.value}"
        warn_user(f"{text}; try more max_steps or a larger tolerance", ConvergenceWarning)
    return totals


def _once(scorer: Scorer, images: Images, batch_size: int, augment: Augmentation | None, epoch: int) -> Tally:
    tally = Tally(images.device)
    size = scorer.batch_size(batch_size, images.device)
    with arithmetic(scorer.precision, images.device):
        for x, y in Batches(images, size, augment=augment, shuffle=False).epoch(epoch):
            output, found = scorer(x)
            tally.add(F.cross_entropy(output, y), output, y, found)
    return tally
