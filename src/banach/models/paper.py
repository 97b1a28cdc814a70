"""The paper's three networks, one for scikit-learn's digits, and ResNet-56: their parts, builders and recipes."""

from collections import OrderedDict
from dataclasses import replace
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from banach.models.blocks import SLOPE, ConvPair, Image, LatentBlock, LatentResNet, Parts, ResidualBlock, conv3x3
from banach.models.registry import Cosine, Recipe, Steps, register
from banach.solve import WorstPixel

CHANNELS = 35  # of the CIFAR-10 network
BORDER = 4  # pixels of a constant around its images
GREY = 0.449  # that constant: a mean colour, although the images are normalised already


def digits(image: Image = (1, 8, 8), classes: int = 10, *, batch_norm: bool = True) -> Parts:
    """Return a small network for scikit-learn's digits: 17,986 parameters, latent 24x4x4.

    Q, R and S have 3,720, 10,416 and 3,850 of them. It is trained in seconds.
    """
    channels, height, width = image
    if min(height, width) < 2:
        raise ValueError(f"Q pools 2x2 pixels, got images of {height}x{width}; use larger ones")
    linear = nn.Linear(24 * (height // 2) * (width // 2), classes)
    return Parts(
        Q=ConvPair(channels, 24, pools=(1, 2)),
        R=LatentResNet(24, blocks=1, gamma=0.4, batch_norm=batch_norm),
        S=nn.Sequential(OrderedDict(drop=nn.Dropout2d(0.3), flat=nn.Flatten(), linear=linear)),
    )


def mnist(image: Image = (1, 28, 28), classes: int = 10, *, batch_norm: bool = True) -> Parts:
    """Return the paper's MNIST network: 54,352 parameters, latent 32x9x9.

    Q, R and S have 4,896, 36,992 and 12,464 of them.
    """
    channels, height, width = image
    return Parts(
        Q=ConvPair(channels, 32, pools=(3, 1)),
        R=LatentResNet(32, blocks=2, gamma=0.5, batch_norm=batch_norm),
        S=_readout((32, height // 3, width // 3), 16, classes, nn.Dropout2d(0.2)),
    )


def svhn(image: Image = (3, 32, 32), classes: int = 10, *, batch_norm: bool = True) -> Parts:
    """Return the paper's SVHN network: 163,488 parameters, latent 64x8x8.

    Q, R and S have 74,640, 73,856 and 14,992 of them. (The authors' class has two unused batch norms more.)
    Without batch norm and with PyTorch's initial weights this R expands, so the residual map starts smaller.
    Training may make it expand again, and nothing here edits weights: measure the contraction.
    """
    channels, height, width = image
    R = LatentResNet(64, blocks=1, gamma=0.9, batch_norm=batch_norm)
    if not batch_norm:
        for parameter in R.get_submodule("blocks.0.conv2").parameters():
            parameter.data.mul_(0.1)
    sizes = ((16, 16, 1), (16, 32, 2), (32, 64, 2))  # inputs, outputs, stride
    Q = OrderedDict(
        conv=conv3x3(channels, 16, bias=False),
        norm=nn.BatchNorm2d(16),
        act=nn.LeakyReLU(SLOPE),
        blocks=nn.Sequential(*(ResidualBlock(*size, slope=SLOPE, dropout=0.1) for size in sizes)),
    )
    return Parts(
        Q=nn.Sequential(Q),
        R=R,
        S=_readout((64, (height + 3) // 4, (width + 3) // 4), 16, classes, nn.Dropout2d(0.2)),
    )


def cifar10(image: Image = (3, 32, 32), classes: int = 10, *, batch_norm: bool = True) -> Parts:
    """Return the paper's CIFAR-10 network: 843,430 parameters, latent 35x10x10.

    Q, R and S have 713,020, 110,600 and 19,810 of them, as in the authors' code; the paper prints other shares.
    """
    channels, height, width = image
    latent = (CHANNELS, (height + 2 * BORDER) // 4, (width + 2 * BORDER) // 4)
    return Parts(
        Q=CIFARData(channels),
        R=LatentResNet(CHANNELS, blocks=5, gamma=0.5, batch_norm=batch_norm, late=True),
        S=_readout(latent, CHANNELS, classes, nn.Dropout(0.1), stride=2, padding=1),
    )


def resnet56(image: Image = (3, 32, 32), classes: int = 10) -> nn.Module:
    """Return ResNet-56 (He et al. 2016), explicit: 853,018 parameters, the rival on CIFAR-10."""
    return ResNet(9, image, classes)


def _readout(
    latent: Image, kept: int, classes: int, drop: nn.Module, *, stride: int = 1, padding: int = 0
) -> nn.Sequential:
    """Return S: a 3x3 convolution, LReLU, dropout, a linear map without bias."""
    channels, *sizes = latent
    height, width = ((size + 2 * padding - 3) // stride + 1 for size in sizes)
    if min(height, width) < 1:
        what = f"the latent is {sizes[0]}x{sizes[1]} pixels, and S begins with a 3x3 convolution"
        raise ValueError(f"{what}; use larger images, such as those of --data folder:PATH@28")
    return nn.Sequential(
        OrderedDict(
            conv=conv3x3(channels, kept, stride=stride, padding=padding),
            act=nn.LeakyReLU(SLOPE),
            drop=drop,
            flat=nn.Flatten(),
            linear=nn.Linear(kept * height * width, classes, bias=False),
        )
    )


class CIFARData(nn.Module):
    """Q: a border, conv 7x7, LReLU, then twice sixteen blocks and a 2x2 average pool.

    Not a Sequential of all: where fused kernels compute the stages, a loop over the layers could not be compiled.
    """

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, CHANNELS, 7)
        self.stage1 = nn.Sequential(*(LatentBlock(CHANNELS, late=True, dropout=0.15) for _ in range(16)))
        self.stage2 = nn.Sequential(*(LatentBlock(CHANNELS, late=True, dropout=0.15) for _ in range(16)))

    def forward(self, d: Tensor) -> Tensor:
        # The authors pad by a constant, then their convolution repeats the border three times: one pad does both.
        x = F.pad(d, [BORDER + 3] * 4, value=GREY)
        x = F.leaky_relu(self.conv(x), SLOPE)
        x = F.avg_pool2d(self.stage1(x), 2)
        return F.avg_pool2d(self.stage2(x), 2)


class ResNet(nn.Module):
    """The CIFAR-10 network of He et al. (2016), 6n + 2 layers: three stages of n blocks, 16, 32 and 64 channels.

    Shortcuts have no parameters (option A). Convolutions are initialised as in He et al. (2015).
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


# Chosen by four-fold cross-validation on the training and validation images, where it reaches 99.4 per cent.
DIGITS = Recipe(lr=7e-3, weight_decay=1e-4, label_smoothing=0.1, epochs=20, batch_size=64, schedule=Cosine())
# As in the authors' code. "paper": as printed there, which leaves out weight decay and epochs.
MNIST = Recipe(eps=1e-1, norm=WorstPixel(), lr=2e-4, weight_decay=1e-6, epochs=100, batch_size=100)
SVHN = replace(MNIST, eps=1e-4, max_steps=200, lr=1e-4, weight_decay=2e-4)
CIFAR10 = replace(
    MNIST, lr=1e-3, weight_decay=1e-3, epochs=1000, schedule=Steps(at=(200, 400, 600, 800), factor=0.5)
)
SVHN_DECAYED = replace(SVHN, lr=1e-3, epochs=25, schedule=Cosine())
# 64,000 steps of 128 out of 45,000 images, a tenth of the rate after 32,000 and 48,000 steps.
EXPLICIT = Recipe(lr=0.1, momentum=0.9, weight_decay=1e-4, epochs=182, batch_size=128, max_steps=0)
HE = replace(EXPLICIT, schedule=Steps(at=(91, 136), factor=0.1), augment="flip+crop:4")

MNIST_RECIPES = {
    "released": MNIST,
    "paper": replace(MNIST, eps=1e-4, lr=1e-4),
    "jacobian": MNIST,
    "decayed": replace(MNIST, lr=1e-3, epochs=30, schedule=Cosine()),
}
SVHN_RECIPES = {"released": SVHN, "paper": SVHN, "jacobian": SVHN, "decayed": SVHN_DECAYED}
CIFAR10_RECIPES = {"released": CIFAR10, "paper": CIFAR10, "jacobian": replace(CIFAR10, eps=1e-4, max_steps=500)}

register("digits", digits, recipes={"default": DIGITS}, channels_last=True)
register("mnist", mnist, recipes=MNIST_RECIPES, channels_last=True)
register("svhn", svhn, recipes=SVHN_RECIPES, channels_last=True)
register("cifar10", cifar10, recipes=CIFAR10_RECIPES, channels_last=True)
register("resnet56", resnet56, recipes={"he": HE}, channels_last=True)
