"""The paper's SVHN network: 163,488 parameters, latent 64x8x8."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from banach.models.blocks import SLOPE, Image, LatentResNet, Parts, ResidualBlock, conv3x3, readout
from banach.models.registry import Cosine, Recipe, register
from banach.solve import WorstPixel


class SVHNData(nn.Module):
    """Q: conv, BN, LReLU, then three residual blocks of 16, 32 and 64 channels, the last two of stride 2."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = conv3x3(channels, 16, bias=False)
        self.norm = nn.BatchNorm2d(16)
        sizes = ((16, 16, 1), (16, 32, 2), (32, 64, 2))  # inputs, outputs, stride
        self.blocks = nn.Sequential(*(ResidualBlock(*size, slope=SLOPE, dropout=0.1) for size in sizes))

    def forward(self, d: Tensor) -> Tensor:
        return self.blocks(F.leaky_relu(self.norm(self.conv(d)), SLOPE))


def svhn(image: Image = (3, 32, 32), classes: int = 10, *, batch_norm: bool = True) -> Parts:
    """Return Q, R and S with 74,640, 73,856 and 14,992 parameters.

    The authors' class counts 256 more: two unused batch norms, which are left out here.
    Without batch norm and with PyTorch's initial weights this R expands: residuals grow by 1.04 per step. The
    authors' code rescales the weights during training. Here the residual map starts smaller instead, and a fresh
    network reaches eps within 140 steps. Training may make it expand again (at the authors' rate, by JFB, it
    reaches the limit of 200 steps after 20 batches), and nothing here edits weights: measure the contraction.
    """
    channels, height, width = image
    R = LatentResNet(64, blocks=1, gamma=0.9, batch_norm=batch_norm)
    return Parts(
        Q=SVHNData(channels),
        R=R if batch_norm else R.shrink_(0.1),
        S=readout(64, (height + 3) // 4, (width + 3) // 4, classes),
    )


RELEASED = Recipe(
    eps=1e-4, max_steps=200, norm=WorstPixel(), lr=1e-4, weight_decay=2e-4, epochs=100, batch_size=100
)
RECIPES = {
    "released": RELEASED,
    "paper": RELEASED,
    "jacobian": RELEASED,
    "decayed": replace(RELEASED, lr=1e-3, epochs=25, schedule=Cosine()),
}

register(
    "svhn",
    svhn,
    description="the paper's SVHN network: 163,488 parameters, latent 64x8x8",
    image=(3, 32, 32),
    recipes=RECIPES,
    channels_last=True,
)
