"""Multiscale deep equilibrium models (Bai et al. 2020): a latent of several resolutions, solved at once."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.backward import Unroll
from banach.models.blocks import Image, conv3x3
from banach.models.mon import COMMON
from banach.models.registry import Cosine, Recipe, register
from banach.network import ImplicitNetwork
from banach.nn import Dropout2d
from banach.nn.passes import once_per_pass
from banach.solve import Picard
from banach.solve.context import assigned

Branches = tuple[Tensor, ...]
GROUPS, LAST_GROUPS, WIDEN = 8, 4, 5


@dataclass(frozen=True)
class Sizes:
    """Widths of a multiscale model, finest branch first."""

    channels: tuple[int, ...]  # of the latent
    head: tuple[int, ...]  # of the bottlenecks; their outputs are four times as wide
    final: int  # of the last convolution
    dropout: float


TINY = Sizes((24, 24), (8, 16), 200, 0.25)
LARGE = Sizes((32, 64, 128, 256), (14, 28, 56, 112), 1680, 0.3)


class WeightNormConv(nn.Module):
    """A convolution without bias by the weight gain * v / |v|, one gain per output channel.

    Not `torch.nn.utils.parametrizations.weight_norm`, with which a network could not be pickled.
    """

    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__()
        self.v = nn.Parameter(nn.Conv2d(inputs, outputs, size).weight.detach())
        self.gain = nn.Parameter(torch.linalg.vector_norm(self.v.detach(), dim=(1, 2, 3), keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        weight = once_per_pass(self, self.v, self._weight)
        return F.conv2d(x, weight, padding=weight.shape[-1] // 2)

    def _weight(self) -> Tensor:
        return self.v * (self.gain / torch.linalg.vector_norm(self.v, dim=(1, 2, 3), keepdim=True))


class Residual(nn.Module):
    """z, x -> GN(ReLU(z + GN(x + drop(conv(ReLU(GN(conv(z)))))))): what a branch does on its own."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = WeightNormConv(channels, WIDEN * channels, 3)
        self.norm1 = nn.GroupNorm(GROUPS, WIDEN * channels)
        self.conv2 = WeightNormConv(WIDEN * channels, channels, 3)
        self.drop = Dropout2d(dropout)
        self.norm2 = nn.GroupNorm(GROUPS, channels)
        self.norm3 = nn.GroupNorm(GROUPS, channels)

    def forward(self, z: Tensor, x: Tensor | None) -> Tensor:
        y = self.drop(self.conv2(F.relu(self.norm1(self.conv1(z)))))
        s = self.norm2(y if x is None else y + x)
        return self.norm3(F.relu(s + z))


class Resample(nn.Module):
    """From one branch to the resolution and width of another.

    To a finer one: conv1x1, GN, nearest upsampling. To a coarser one: one conv3x3 of stride 2 for each halving, GN
    after each, ReLU between them; the width changes in the last.
    """

    def __init__(self, inputs: int, outputs: int, halvings: int) -> None:
        super().__init__()
        steps: list[nn.Module] = []
        for a, b in pairwise([inputs] * halvings + [outputs]):
            steps += [nn.ReLU()] if steps else []
            steps += [conv3x3(a, b, stride=2, bias=False), nn.GroupNorm(GROUPS, b)]
        steps = steps or [nn.Conv2d(inputs, outputs, 1, bias=False), nn.GroupNorm(GROUPS, outputs)]
        self.steps, self.halvings = nn.Sequential(*steps), halvings

    def forward(self, z: Tensor, like: Tensor) -> Tensor:
        y = self.steps(z)
        return y if self.halvings > 0 else F.interpolate(y, like.shape[2:], mode="nearest")


class MultiscaleMap(nn.Module):
    """R(z, x): a residual block in each branch, then every branch is the sum of all, each resampled to it."""

    def __init__(self, channels: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(c, dropout) for c in channels)
        self.fuse = nn.ModuleList(
            nn.ModuleList(nn.Identity() if i == j else Resample(b, a, i - j) for j, b in enumerate(channels))
            for i, a in enumerate(channels)
        )
        self.last = nn.ModuleList(
            nn.Sequential(nn.ReLU(), WeightNormConv(c, c, 1), nn.GroupNorm(LAST_GROUPS, c)) for c in channels
        )

    def forward(self, z: Branches, x: Branches) -> Branches:
        # x is zero but in the finest branch, where its other tensors only say how large the latent is.
        y = [block(z[i], None if i else x[0]) for i, block in enumerate(self.blocks)]
        return tuple(last(self._fused(i, y)) for i, last in enumerate(self.last))

    def _fused(self, i: int, y: list[Tensor]) -> Tensor:
        to_i: Any = self.fuse[i]
        return sum((to_i[j](other, y[i]) for j, other in enumerate(y) if j != i), start=y[i])


def _conv_norm(inputs: int, outputs: int, size: int, *, affine: bool = True) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs, affine=affine), nn.ReLU()]


class Stem(nn.Module):
    """Q: conv3x3, BN, ReLU twice, with more than two branches then conv1x1, BN, ReLU; zeros for other branches."""

    def __init__(self, inputs: int, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.channels, c = channels, channels[0]
        last = _conv_norm(c, c, 1) if len(channels) > 2 else []
        self.layers = nn.Sequential(*_conv_norm(inputs, c, 3), *_conv_norm(c, c, 3), *last)

    def forward(self, d: Tensor) -> Branches:
        x = self.layers(d)
        branches, (height, width) = [x], x.shape[2:]
        for c in self.channels[1:]:
            height, width = (height + 1) // 2, (width + 1) // 2
            branches.append(x.new_zeros(x.shape[0], c, height, width))
        return tuple(branches)


class Bottleneck(nn.Module):
    """x -> ReLU(shortcut(x) + BN(conv1x1(ReLU(BN(conv3x3(ReLU(BN(conv1x1(x)))))))); inner BNs have no weights."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm(inputs, width, 1, affine=False),
            *_conv_norm(width, width, 3, affine=False),
            *_conv_norm(width, 4 * width, 1, affine=False)[:2],
        )
        self.shortcut = nn.Sequential(*_conv_norm(inputs, 4 * width, 1)[:2])

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class MultiscaleHead(nn.Module):
    """S: a bottleneck in each branch, joined from fine to coarse; conv1x1, BN, ReLU, mean over pixels, linear."""

    def __init__(self, sizes: Sizes, classes: int) -> None:
        super().__init__()
        pairs = zip(sizes.channels, sizes.head, strict=True)
        self.bottlenecks = nn.ModuleList(Bottleneck(c, h) for c, h in pairs)
        wide = [4 * h for h in sizes.head]
        self.down = nn.ModuleList(
            nn.Sequential(conv3x3(a, b, stride=2), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairwise(wide)
        )
        last = sizes.final
        self.final = nn.Sequential(nn.Conv2d(wide[-1], last, 1), nn.BatchNorm2d(last), nn.ReLU())
        self.linear = nn.Linear(last, classes)

    def forward(self, z: Branches) -> Tensor:
        y = self.bottlenecks[0](z[0])
        for down, bottleneck, branch in zip(self.down, self.bottlenecks[1:], z[1:], strict=True):
            y = bottleneck(branch) + down(y)
        return self.linear(self.final(y).mean((2, 3)))


def multiscale(image: Image, classes: int, sizes: Sizes) -> ImplicitNetwork:
    """Return a multiscale model of these sizes, by Picard with damping 1/2.

    Fresh weights do not contract: without damping the iteration does not converge at first.
    """
    Q, R = Stem(image[0], sizes.channels), MultiscaleMap(sizes.channels, sizes.dropout)
    S = MultiscaleHead(sizes, classes)
    net = ImplicitNetwork(Q, R, S, solver=Picard(damping=0.5), tolerance=OWN.tolerance)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):  # not those with weight norm, as in the authors' code
            nn.init.normal_(module.weight, std=0.01)
        elif isinstance(module, nn.BatchNorm2d) and module.running_var is not None:
            # Of such weights the variances are about .003: an average that starts at 1 is wrong for 60 steps.
            nn.init.zeros_(module.running_var)
    return net


def mdeq_tiny(image: Image = (3, 32, 32), classes: int = 10) -> ImplicitNetwork:
    """Return TINY, a multiscale DEQ of two branches: 158,986 parameters on CIFAR-10.

    Q, R and S have 5,928, 111,792 and 41,266 of them. (The paper prints 170K.)
    """
    return multiscale(image, classes, TINY)


def mdeq(image: Image = (3, 32, 32), classes: int = 10) -> ImplicitNetwork:
    """Return LARGE, a multiscale DEQ of four branches: 11,098,398 parameters on CIFAR-10.

    Q, R and S have 11,296, 8,716,192 and 2,370,910 of them. (The paper prints 10M.)
    """
    return multiscale(image, classes, LARGE)


def unrolled(net: ImplicitNetwork, steps: int = 10) -> AbstractContextManager[None]:
    """Warm up: inside the block the network makes `steps` steps from z0 by plain backpropagation, and no solve.

    The authors' first 20,000 training steps (TINY: 3,000) are of this kind. The damping is that of the solver.
    """
    tolerance = replace(net.tolerance, max_steps=0)
    backward = Unroll(steps, damping=getattr(net.solver, "damping", 0.0))
    return assigned([(net, "tolerance", tolerance), (net, "backward", backward)])


TRAINED = Recipe(lr=1e-3, epochs=220, batch_size=128, schedule=Cosine(), augment="flip+crop:4", pretrain=20_000)
# The authors' caps on evaluations, 18 forward and 20 backward; the tolerance is in effect never met.
OWN = replace(TRAINED, eps=0.0, rtol=1e-3, max_steps=18, solver="broyden:18", backward="implicit:broyden:1e-3:20")
TINY_OWN = replace(
    OWN, epochs=50, weight_decay=2.5e-6, solver="broyden:22", max_steps=22, augment="none", pretrain=3_000
)
# Five damped steps are recorded, from the answer on. (The authors also leave out dropout.)
PHANTOM = replace(OWN, lr=0.1, momentum=0.9, weight_decay=1e-4, backward="unroll:5:0.5", pretrain=0)
COMMON_18 = replace(COMMON, max_steps=18, solver="picard:0.5")

register("mdeq-tiny", mdeq_tiny, recipes={"own": TINY_OWN, "common": COMMON_18})
register("mdeq", mdeq, recipes={"own": OWN, "phantom": PHANTOM, "common": COMMON_18})
