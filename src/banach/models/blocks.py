"""Layers that several of the networks share."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.kernels import LatentForm

Image = tuple[int, int, int]  # channels, height, width
SLOPE = 0.1  # of every leaky ReLU below zero


class Parts(NamedTuple):
    """The three parts of an implicit network, N(d) = S(u*), u* = R(u*, Q(d))."""

    Q: nn.Module
    R: nn.Module
    S: nn.Module


def conv3x3(inputs: int, outputs: int, *, stride: int = 1, padding: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding, bias=bias)


class ConvPair(nn.Sequential):
    """Twice conv, BN, max pool, LReLU: Q of the MNIST and digits nets. A pool of 1 is left out.

    The authors pool after the activation, which is monotone: the same values, here on fewer pixels.
    """

    def __init__(self, channels: int, width: int, pools: tuple[int, int]) -> None:
        super().__init__()
        for i, inputs, outputs in ((1, channels, 16), (2, 16, width)):
            self.add_module(f"conv{i}", conv3x3(inputs, outputs))
            self.add_module(f"norm{i}", nn.BatchNorm2d(outputs))
            if pools[i - 1] > 1:
                self.add_module(f"pool{i}", nn.MaxPool2d(pools[i - 1]))
            self.add_module(f"act{i}", nn.LeakyReLU(SLOPE))


class LatentBlock(nn.Module):
    """x -> BN(x + LReLU(y)) or, if `late`, BN(LReLU(x + y)),  y = conv(dropout(LReLU(conv(x))))."""

    latent_block = True  # as `LatentForm` describes it

    def __init__(
        self, channels: int, batch_norm: bool = True, *, late: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(channels, channels)
        self.conv2 = conv3x3(channels, channels)
        self.drop = nn.Dropout2d(dropout) if dropout else nn.Identity()
        self.norm = nn.BatchNorm2d(channels, affine=False) if batch_norm else nn.Identity()
        self.late = late

    @property
    def fusable(self) -> bool:
        """True if `banach.kernels` computes a Sequential of these."""
        return self.late

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.drop(F.leaky_relu(self.conv1(x), SLOPE)))
        if self.late:
            return self.norm(F.leaky_relu(x + y, SLOPE))
        # The authors' network applies LReLU twice here. Squaring the slope does the same in one pass over memory.
        return self.norm(x + F.leaky_relu(y, SLOPE**2))


class LatentResNet(nn.Module):
    """R(u, v) = gamma * (B_n o ... o B_1)(u + v) or, if `late`, (B_n o ... o B_1)(v + gamma * u).

    Each B is a `LatentBlock`. The first is R of the paper's MNIST and SVHN nets, the second that of its CIFAR-10
    net. gamma scales the latent but does not bound the Lipschitz constant: measure the contraction.
    """

    def __init__(
        self, channels: int, blocks: int, gamma: float, *, batch_norm: bool = True, late: bool = False
    ) -> None:
        super().__init__()
        self.gamma, self.late = gamma, late
        self.blocks = nn.Sequential(*(LatentBlock(channels, batch_norm, late=late) for _ in range(blocks)))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        if self.late:
            return self.blocks(torch.add(v, u, alpha=self.gamma))
        return self.gamma * self.blocks(u + v)

    @property
    def latent_form(self) -> LatentForm:
        """The formula of this map, for the kernel that iterates it."""
        if self.late:
            return LatentForm(inner=self.gamma, slope=SLOPE, slope_after=SLOPE, late=True)
        return LatentForm(outer=self.gamma, slope=SLOPE, slope_after=SLOPE**2)

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}"


class Shortcut(nn.Module):
    """The identity between different shapes, without parameters: skip pixels, append channels of zeros.

    Half of the new channels come before, half after. (He et al. 2016, option A.)
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.before = (outputs - inputs) // 2
        self.after = outputs - inputs - self.before
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.before, self.after)) if self.before or self.after else x


class ResidualBlock(nn.Module):
    """x -> act(shortcut(x) + res(x)),  res = conv, BN, act, dropout, conv, BN, dropout,  act a (leaky) ReLU."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, *, slope: float = 0.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(inputs, outputs, stride=stride, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = conv3x3(outputs, outputs, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = Shortcut(inputs, outputs, stride)
        self.drop = nn.Dropout2d(dropout) if dropout else nn.Identity()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(F.leaky_relu(self.norm1(self.conv1(x)), self.slope))
        y = self.drop(self.norm2(self.conv2(y)))
        return F.leaky_relu(y + self.shortcut(x), self.slope)
