"""The paper's three maps R, small or in full size, and tolerances."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from banach.models.blocks import LatentResNet
from banach.models.cifar10 import CIFARLatent
from banach.models.mnist import mnist
from banach.models.svhn import svhn
from banach.solve import RMS, Norm, Tolerance, WorstPixel

NETWORKS = {"mnist": (32, 9, 9), "svhn": (64, 8, 8), "cifar10": (35, 10, 10)}


def network(
    name: str, *, train: bool, batch: int = 4, seed: int = 0, device: str = "cpu"
) -> tuple[nn.Module, Tensor]:
    """Return R with statistics of a few batches, and v. In eval mode weights are small, so that R contracts."""
    torch.manual_seed(seed)
    made = {"mnist": lambda: mnist().R, "svhn": lambda: svhn().R, "cifar10": CIFARLatent}
    return prepared(made[name](), NETWORKS[name], train=train, batch=batch, device=device)


def tiny(late: bool, *, train: bool, batch: int = 3, channels: int = 16) -> tuple[nn.Module, Tensor]:
    """Return two blocks for images of odd sizes: 35 channels if `late`."""
    torch.manual_seed(1)
    R: Any = CIFARLatent() if late else LatentResNet(channels, 2, 0.5)
    R.blocks = R.blocks[:2]
    return prepared(R, (35 if late else channels, 4, 3), train=train, batch=batch)


def prepared(
    R: Any, shape: tuple[int, int, int], *, train: bool, batch: int, device: str = "cpu"
) -> tuple[nn.Module, Tensor]:
    v = torch.randn(batch, *shape).to(device)
    R.to(device).train()
    with torch.no_grad():
        for block in R.blocks:
            block.conv2.weight.mul_(1.0 if train else 0.2)
        z = torch.zeros_like(v)
        for _ in range(40):
            z = R(z, v)
    return R.train(train), v


def tolerance(norm: Norm = WorstPixel(), **settings: Any) -> Tolerance:
    return Tolerance(**{"atol": 1e-3, "max_steps": 60, "norm": norm, **settings})


__all__ = ["NETWORKS", "RMS", "Tolerance", "network", "prepared", "tiny", "tolerance"]
