"""Where an iteration starts: from the fixed point of an input that was alike, or from a guess that was fitted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from banach.network import ImplicitNetwork


class Neighbours:
    """v -> the fixed point of the nearest v that is remembered, or zeros where none is near.

    Near: within `reach` of the size of v itself. The last `capacity` samples are remembered, on the device of the
    first; nothing is asked of the host, so this can be captured.
    """

    def __init__(self, capacity: int, *, reach: float = 0.5) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is at least 1 sample, got {capacity}; leave neighbours out for none")
        self.capacity, self.reach = capacity, reach
        self.seen = 0
        self._keys: Tensor | None = None  # of what was not seen yet: infinitely far
        self._values: Tensor | None = None

    @torch.no_grad()
    def __call__(self, v: Tensor) -> Tensor:
        keys, values = self._memory(v)
        rows = v.flatten(1).float()
        distance, nearest = torch.cdist(rows, keys).min(1)
        near = distance <= self.reach * torch.linalg.vector_norm(rows, dim=1)
        start = values.index_select(0, nearest) * near.to(values.dtype).view(-1, *(1 for _ in v.shape[1:]))
        return start.contiguous(memory_format=_format(v))

    @torch.no_grad()
    def remember(self, v: Tensor, z: Tensor) -> None:
        """The fixed points of a batch. What is not finite is remembered as zeros."""
        keys, values = self._memory(v)
        v, z = v[-self.capacity :], z[-self.capacity :]
        place = (self.seen + torch.arange(len(v), device=v.device)) % self.capacity
        keys.index_copy_(0, place, v.flatten(1).float())
        values.index_copy_(0, place, torch.nan_to_num(z, 0.0, 0.0, 0.0).to(values.dtype).contiguous())
        self.seen += len(v)

    def _memory(self, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._keys is None or self._values is None:
            dtype = torch.promote_types(v.dtype, torch.float32)
            self._keys = torch.full((self.capacity, v[0].numel()), 1e15, device=v.device)
            self._values = torch.zeros((self.capacity, *v.shape[1:]), dtype=dtype, device=v.device)
        return self._keys, self._values


class LinearStart:
    """v -> W v + b, fitted by least squares to fixed points: a convolution of 3x3 for images, else a matrix.

    `net.start = LinearStart.fit(net.eval(), batches)` makes every later solve start there. The fit takes one pass
    over batches of inputs, and no gradient.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, v: Tensor) -> Tensor:
        weight, bias = self.weight.to(v), self.bias.to(v)
        if v.dim() == 4:
            return F.conv2d(v, weight, bias, padding=weight.shape[-1] // 2)
        return F.linear(v, weight, bias)

    @staticmethod
    @torch.no_grad()
    def fit(net: ImplicitNetwork, batches: Iterable[Any], *, ridge: float = 1e-6) -> LinearStart:
        """`ridge` lifts the diagonal of the normal equations, relative to its mean."""
        gram: Any = 0.0
        moment: Any = 0.0
        for d in batches:
            v = net.Q(d)
            if not isinstance(v, Tensor):
                raise TypeError(f"a linear start needs one tensor from Q, got {type(v).__name__}; write your own")
            features, target = _features(v).double(), _pixels(net.latent(d)[1].value).double()
            gram, moment = gram + features.mT @ features, moment + features.mT @ target
        if not isinstance(gram, Tensor):
            raise ValueError("fit needs at least one batch of inputs, got none")
        lift = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        solution = torch.linalg.solve(gram + lift, moment).mT
        weight, bias = solution[:, :-1], solution[:, -1]
        if v.dim() == 4:
            weight = weight.reshape(len(weight), v.shape[1], 3, 3)
        return LinearStart(weight.to(v).contiguous(), bias.to(v).contiguous())


def _features(v: Tensor) -> Tensor:
    """One row per pixel: what a 3x3 window sees there, and a one. Without pixels: v and a one."""
    rows = F.unfold(v, 3, padding=1).mT.flatten(0, 1) if v.dim() == 4 else v.flatten(0, -2)
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


def _pixels(u: Tensor) -> Tensor:
    return u.flatten(2).mT.flatten(0, 1) if u.dim() == 4 else u.flatten(0, -2)


def _format(v: Tensor) -> torch.memory_format:
    lies = v.dim() == 4 and v.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if lies else torch.contiguous_format
