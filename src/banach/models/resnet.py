"""ResNet-56 for CIFAR-10: the explicit network in the paper's first table, 853,018 parameters."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from banach.models.blocks import Image, ResidualBlock, conv3x3
from banach.models.registry import Recipe, Steps, register


class ResNet(nn.Module):
    """The CIFAR-10 network of He et al. (2016), 6n + 2 layers: three stages of n blocks, 16, 32 and 64 channels.

    Shortcuts have no parameters (option A), which gives n = 9 its 853,018: 848,304 in convolutions, 4,064 in
    batch norms, 650 in the last layer. Convolutions are initialised as in He et al. (2015).
    """

    def __init__(self, n: int, image: Image = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        self.conv = conv3x3(image[0], 16, bias=False)
        self.norm = nn.BatchNorm2d(16)
        blocks = [ResidualBlock(16, 16, 1) for _ in range(n)]
        for before, after in pairwise((16, 32, 64)):
            blocks += [ResidualBlock(before, after, 2), *(ResidualBlock(after, after, 1) for _ in range(n - 1))]
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, d: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(d))))
        return self.linear(x.mean((2, 3)))


def resnet56(image: Image = (3, 32, 32), classes: int = 10) -> nn.Module:
    """Return ResNet-56 (He et al. 2016), explicit: 853,018 parameters, the rival on CIFAR-10."""
    return ResNet(9, image, classes)


# 64,000 steps of 128 out of 45,000 images, a tenth of the rate after 32,000 and 48,000 steps.
HE = Recipe(
    lr=0.1,
    momentum=0.9,
    weight_decay=1e-4,
    epochs=182,
    batch_size=128,
    schedule=Steps(at=(91, 136), factor=0.1),
    max_steps=0,
    augment="flip+crop:4",
)

register("resnet56", resnet56, recipes={"he": HE}, channels_last=True)
