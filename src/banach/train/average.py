"""The exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """a <- d a + (1 - d) w after every step, from a = w at the start.

    Parameters are averaged; buffers (the statistics of batch norm, which are averages already) stay the network's.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in net.named_parameters()}

    @torch.no_grad()
    def update(self, net: nn.Module) -> None:
        own = dict(net.named_parameters())
        # One kernel for all weights, not one for each.
        torch._foreach_lerp_(list(self.weights.values()), [own[name] for name in self.weights], 1 - self.decay)

    @torch.no_grad()
    def put_into(self, net: nn.Module) -> None:
        """The network's weights become the averaged ones."""
        for name, p in net.named_parameters():
            p.copy_(self.weights[name])

    @contextmanager
    def inside(self, net: nn.Module) -> Iterator[None]:
        """The averaged weights for the time of the block, then the network's own again, bit by bit."""
        own = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.put_into(net)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in net.named_parameters():
                    p.copy_(own[name])
