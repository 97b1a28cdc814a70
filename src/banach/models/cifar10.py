"""The paper's CIFAR-10 network: 843,430 parameters, latent 35x10x10."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.kernels import LatentForm
from banach.models.blocks import SLOPE, Image, Parts, conv3x3, latent_norm
from banach.models.registry import Recipe, Steps, register
from banach.solve import WorstPixel

CHANNELS = 35
BORDER = 4  # pixels of a constant around the image
GREY = 0.449  # that constant: a mean colour, although the images are normalised already


class Block(nn.Module):
    """x -> BN(LReLU(x + conv(dropout(LReLU(conv(x)))))), used in Q with dropout and in R without."""

    fusable = True  # `banach.kernels` computes a Sequential of these
    latent_block = True  # as `LatentForm` describes it

    def __init__(self, *, dropout: float = 0.0, batch_norm: bool = True) -> None:
        super().__init__()
        self.conv1 = conv3x3(CHANNELS, CHANNELS)
        self.conv2 = conv3x3(CHANNELS, CHANNELS)
        self.drop = nn.Dropout2d(dropout) if dropout else nn.Identity()
        self.norm = latent_norm(CHANNELS, batch_norm)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.drop(F.leaky_relu(self.conv1(x), SLOPE)))
        return self.norm(F.leaky_relu(x + y, SLOPE))


class CIFARData(nn.Module):
    """Q: a border, conv 7x7, LReLU, then twice sixteen blocks and a 2x2 average pool."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, CHANNELS, 7)
        self.stage1 = nn.Sequential(*(Block(dropout=0.15) for _ in range(16)))
        self.stage2 = nn.Sequential(*(Block(dropout=0.15) for _ in range(16)))

    def forward(self, d: Tensor) -> Tensor:
        # The authors pad by a constant, then their convolution repeats the border three times: one pad does both.
        x = F.pad(d, [BORDER + 3] * 4, value=GREY)
        x = F.leaky_relu(self.conv(x), SLOPE)
        x = F.avg_pool2d(self.stage1(x), 2)
        return F.avg_pool2d(self.stage2(x), 2)


class CIFARLatent(nn.Module):
    """R(u, v) = (B_5 o ... o B_1)(v + gamma * u): gamma is on the input."""

    def __init__(self, gamma: float = 0.5, *, batch_norm: bool = True) -> None:
        super().__init__()
        self.gamma = gamma
        self.blocks = nn.Sequential(*(Block(batch_norm=batch_norm) for _ in range(5)))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.blocks(torch.add(v, u, alpha=self.gamma))

    @property
    def latent_form(self) -> LatentForm:
        """The formula of this map, for the kernel that iterates it."""
        return LatentForm(inner=self.gamma, slope=SLOPE, slope_after=SLOPE, late=True)

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}"


def _readout(height: int, width: int, classes: int) -> nn.Sequential:
    """Return S: a convolution of stride 2, then a linear map without bias."""
    pixels = ((height + 1) // 2) * ((width + 1) // 2)
    return nn.Sequential(
        OrderedDict(
            conv=conv3x3(CHANNELS, CHANNELS, stride=2),
            act=nn.LeakyReLU(SLOPE),
            drop=nn.Dropout(0.1),
            flat=nn.Flatten(),
            linear=nn.Linear(CHANNELS * pixels, classes, bias=False),
        )
    )


def cifar10(image: Image = (3, 32, 32), classes: int = 10, *, batch_norm: bool = True) -> Parts:
    """Return Q, R and S with 713,020, 110,600 and 19,810 parameters (84.5, 13.1 and 2.3 per cent).

    The paper says about 70 per cent in Q and 30 in R; this is the network of the authors' code.
    """
    channels, height, width = image
    rows, columns = (height + 2 * BORDER) // 4, (width + 2 * BORDER) // 4
    return Parts(Q=CIFARData(channels), R=CIFARLatent(batch_norm=batch_norm), S=_readout(rows, columns, classes))


RELEASED = Recipe(
    eps=1e-1,
    max_steps=50,
    norm=WorstPixel(),
    lr=1e-3,
    weight_decay=1e-3,
    epochs=1000,
    batch_size=100,
    schedule=Steps(at=(200, 400, 600, 800), factor=0.5),
)
RECIPES = {
    "released": RELEASED,
    "paper": RELEASED,  # it prints eps and depth only, which agree
    "jacobian": replace(RELEASED, eps=1e-4, max_steps=500),
}

register(
    "cifar10",
    cifar10,
    description="the paper's CIFAR-10 network: 843,430 parameters, latent 35x10x10",
    image=(3, 32, 32),
    recipes=RECIPES,
    channels_last=True,
)
