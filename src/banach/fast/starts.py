"""Where an iteration starts: at the fixed point of a similar input, or at a fitted guess."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.network import ImplicitNetwork

_FAR = 1e15  # of an empty key: farther than anything, and its square is finite in float32


class Neighbours:
    """(v, otherwise) -> the fixed point of the nearest remembered v, or `otherwise` where none is near.

    The look-up needs no host sync, so it can be captured; `remember` is called outside of the capture.

    Args:
        capacity: so many of the last samples are remembered, for each shape and device.
        reach: a sample is near if its distance is at most `reach` times the norm of v.
    """

    def __init__(self, capacity: int, *, reach: float = 0.5) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is at least 1 sample, got {capacity}; leave neighbours out for none")
        self.capacity, self.reach = capacity, reach
        self.seen = 0
        self._kept: dict[Any, tuple[Tensor, Tensor]] = {}  # by shape and device: keys and values

    @torch.no_grad()
    def __call__(self, v: Tensor, otherwise: Tensor) -> Tensor:
        keys, values = self._memory(v, otherwise)
        rows = v.flatten(1).float()
        distance, nearest = torch.cdist(rows, keys).min(1)
        near = distance <= self.reach * torch.linalg.vector_norm(rows, dim=1)
        start = values.index_select(0, nearest).to(otherwise.dtype)
        return torch.where(near.view(-1, *(1 for _ in otherwise.shape[1:])), start, otherwise)

    @torch.no_grad()
    def remember(self, v: Tensor, z: Tensor, good: Tensor) -> None:
        """Remember the fixed points z of a batch; samples that are not `good` are near to nothing."""
        keys, values = self._memory(v, z)
        v, z, good = (part[-self.capacity :] for part in (v, z, good))
        place = (self.seen + torch.arange(len(v), device=v.device)) % self.capacity
        rows = v.flatten(1).float()
        good = (good & rows.isfinite().all(1)).unsqueeze(1)
        keys.index_copy_(0, place, torch.where(good, rows, _FAR))
        values.index_copy_(0, place, z.to(values.dtype).contiguous())
        self.seen += len(v)

    def _memory(self, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        for name, part in (("Q(d)", v), ("latent", z)):
            if not isinstance(part, Tensor):
                got = f"{name} is one tensor, got a {type(part).__name__}"
                raise TypeError(f"neighbours takes networks whose {got}; leave it out")
        size = v.shape[1:], v.device
        if size not in self._kept:
            with torch.inference_mode(False):  # it may be written to outside of inference mode
                keys = torch.full((self.capacity, math.prod(v.shape[1:])), _FAR, device=v.device)
                values = torch.zeros((self.capacity, *z.shape[1:]), dtype=z.dtype, device=z.device)
            self._kept[size] = keys, values
        return self._kept[size]


class LinearStart(nn.Module):
    """v -> W v + b, fitted by least squares to fixed points: a 3x3 convolution for images, else a matrix.

    `net.start = LinearStart.fit(net.eval(), batches)` makes every later solve start there. As a module it moves
    with the network.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, v: Tensor) -> Tensor:
        weight, bias = self.weight.to(v.dtype), self.bias.to(v.dtype)
        if v.dim() == 4:
            return F.conv2d(v, weight, bias, padding=weight.shape[-1] // 2)
        return F.linear(v, weight, bias)

    @staticmethod
    @torch.no_grad()
    def fit(net: ImplicitNetwork, batches: Iterable[Any], *, ridge: float = 1e-6) -> LinearStart:
        """Fit to the fixed points of a network, in one pass without gradients.

        Args:
            net: a network in eval mode whose Q(d) is one tensor.
            batches: inputs of Q.
            ridge: added to the diagonal of the normal equations, relative to its mean.
        """
        if net.training:
            raise RuntimeError("a start is fitted to a network in eval mode; call net.eval() first")
        if isinstance(batches, Tensor):
            raise TypeError("fit takes batches of inputs, got one tensor; put it in a list")
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
        return LinearStart(weight.to(v).contiguous(), bias.to(v).contiguous()).eval()


def _features(v: Tensor) -> Tensor:
    """Return one row per pixel: its 3x3 window, and a one. Without pixels: v and a one."""
    rows = F.unfold(v, 3, padding=1).mT.flatten(0, 1) if v.dim() == 4 else v.flatten(0, -2)
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


def _pixels(u: Tensor) -> Tensor:
    return u.flatten(2).mT.flatten(0, 1) if u.dim() == 4 else u.flatten(0, -2)
