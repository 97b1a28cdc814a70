"""evaluate(): what a network comes to on a split, in eval mode, on clean images, each image once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.data import Batches, Images
from banach.network import ImplicitNetwork
from banach.solve import Solution
from banach.train.precision import arithmetic, at_least_fp32, autocast
from banach.train.tally import Tally, Totals


def evaluate(net: nn.Module, images: Images, *, batch_size: int = 400, precision: str = "fp32") -> Totals:
    """Loss, accuracy and, where there is a fixed point, how well it was found: means over the images.

    The network keeps its mode, and is on the device of the images.
    """
    tally, training = Tally(images.device), net.training
    net.eval()
    try:
        with torch.no_grad(), arithmetic(precision, images.device):
            for x, y in Batches(images, batch_size, shuffle=False).epoch():
                output, found = scores(net, x, precision)
                tally.add(F.cross_entropy(output, y), output, y, found)
    finally:
        net.train(training)
    return tally.read()


def scores(net: Any, x: Tensor, precision: str = "fp32") -> tuple[Tensor, Solution | None]:
    """The network's output in at least fp32, and what the solve found, None for one without a fixed point."""
    found: Solution | None = None
    with autocast(precision, x.device):
        output = net(x, solution=True) if isinstance(net, ImplicitNetwork) else net(x)
    if isinstance(net, ImplicitNetwork):
        output, found = output
    return at_least_fp32(output), found
