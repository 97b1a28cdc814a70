"""The paper's three maps R, small or as they are, with the form in which the kernel computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from banach.kernels.latent_form import LatentForm, Stop
from banach.models.blocks import LatentResNet
from banach.models.cifar10 import CIFARLatent
from banach.models.mnist import mnist
from banach.models.svhn import svhn
from banach.solve import RMS, Euclidean, Norm, WorstPixel

SHAPES = {"mnist": (32, 9, 9), "svhn": (64, 8, 8), "cifar10": (35, 10, 10)}
NORMS: dict[str, tuple[Norm, dict[str, bool]]] = {
    "worst pixel": (WorstPixel(), {"worst_pixel": True}),
    "rms": (RMS(), {"worst_pixel": False, "mean": True}),
    "euclidean": (Euclidean(), {"worst_pixel": False}),
}


def form_of(R: Any) -> LatentForm:
    if isinstance(R, CIFARLatent):
        return LatentForm(inner=R.gamma, late=True)
    return LatentForm(outer=R.gamma, slope_after=0.1**2)


def network(
    name: str, *, train: bool, batch: int = 4, seed: int = 0, device: str = "cpu"
) -> tuple[nn.Module, Tensor]:
    """R with statistics of a few batches, and v. In eval mode its weights are small, so that it contracts."""
    torch.manual_seed(seed)
    made = {"mnist": lambda: mnist().R, "svhn": lambda: svhn().R, "cifar10": CIFARLatent}
    return prepared(made[name](), SHAPES[name], train=train, batch=batch, device=device)


def tiny(late: bool, *, train: bool, batch: int = 3, channels: int = 16) -> tuple[nn.Module, Tensor]:
    """Two blocks on images of odd sizes: 35 channels, whose kernel rows are one product, or 16."""
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


def stop_of(norm: str = "worst pixel", **settings: Any) -> Stop:
    return Stop(**{"atol": 1e-3, "max_steps": 60, **settings, **NORMS[norm][1]})
