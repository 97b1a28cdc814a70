"""The paper's MNIST network: 54,352 parameters, latent 32x9x9."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from banach.models.blocks import SLOPE, Image, LatentResNet, Parts, conv3x3, readout
from banach.models.registry import Cosine, Recipe, register
from banach.solve import WorstPixel


class MNISTData(nn.Module):
    """Q: conv, BN, LReLU, max pool 3, conv, BN, LReLU."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.conv1 = conv3x3(channels, 16)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = conv3x3(16, 32)
        self.norm2 = nn.BatchNorm2d(32)

    def forward(self, d: Tensor) -> Tensor:
        # Pool before the monotone activation: the same values, on a ninth of the pixels.
        x = F.leaky_relu(F.max_pool2d(self.norm1(self.conv1(d)), 3), SLOPE)
        return F.leaky_relu(self.norm2(self.conv2(x)), SLOPE)


def mnist(image: Image = (1, 28, 28), classes: int = 10, *, batch_norm: bool = True) -> Parts:
    """Return Q, R and S with 4,896, 36,992 and 12,464 parameters."""
    channels, height, width = image
    return Parts(
        Q=MNISTData(channels),
        R=LatentResNet(32, blocks=2, gamma=0.5, batch_norm=batch_norm),
        S=readout(32, height // 3, width // 3, classes),
    )


RELEASED = Recipe(
    eps=1e-1, max_steps=50, norm=WorstPixel(), lr=2e-4, weight_decay=1e-6, epochs=100, batch_size=100
)
RECIPES = {
    "released": RELEASED,
    "paper": replace(RELEASED, eps=1e-4, lr=1e-4),  # weight decay and epochs are not printed
    "jacobian": RELEASED,
    "decayed": replace(RELEASED, lr=1e-3, epochs=30, schedule=Cosine()),
}

register(
    "mnist",
    mnist,
    description="the paper's MNIST network: 54,352 parameters, latent 32x9x9",
    image=(1, 28, 28),
    recipes=RECIPES,
    channels_last=True,
)
