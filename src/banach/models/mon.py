"""Monotone operator networks (Winston and Kolter 2020): fully connected, one convolution, several tiers."""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from banach.models.blocks import Image, Parts
from banach.models.registry import Constant, Cosine, OneCycle, Recipe, Steps, register
from banach.nn import MonotoneConv2d, MonotoneLinear, PeacemanRachford
from banach.nn.monotone import Splitting
from banach.nn.monotone_conv import zero_border

M = 1.0  # the strong monotonicity of every published network


class Injection(nn.Module):
    """Q: U x + b on a grid with a border of one pixel, and zeros for the coarser tiers."""

    def __init__(self, inputs: int, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.channels = channels
        self.conv = nn.Conv2d(inputs, channels[0], 3, padding=2)  # the border of the image, and of the kernel

    def forward(self, d: Tensor) -> Any:
        v = self.conv(d)
        tiers, size = [v], v.shape[-2:]
        for width in self.channels[1:]:
            size = [n // 2 + 1 for n in size]
            tiers.append(v.new_zeros(v.shape[0], width, *size))
        return tuple(tiers) if len(tiers) > 1 else v


class LastTier(nn.Module):
    """The activation of the last tier: S begins with it, since the latent of Peaceman-Rachford is before it."""

    def forward(self, u: Any) -> Tensor:
        return zero_border(torch.relu(u if isinstance(u, Tensor) else u[-1]))


def mon_fc(
    image: Image = (1, 28, 28),
    classes: int = 10,
    *,
    width: int = 87,
    splitting: type[Splitting] = PeacemanRachford,
    alpha: float = 1.0,
) -> Parts:
    """Return the fully connected monotone operator network: 84,313 parameters on MNIST."""
    channels, height, w = image
    return Parts(
        Q=nn.Sequential(OrderedDict(flat=nn.Flatten(), linear=nn.Linear(channels * height * w, width))),
        R=splitting(MonotoneLinear(width, M), alpha),
        S=nn.Sequential(OrderedDict(act=nn.ReLU(), linear=nn.Linear(width, classes))),
    )


def mon(
    image: Image = (1, 28, 28),
    classes: int = 10,
    *,
    channels: int | tuple[int, ...] | None = None,
    splitting: type[Splitting] = PeacemanRachford,
    alpha: float = 1.0,
) -> Parts:
    """Return the monotone operator network of one convolution: 84,460 parameters on MNIST.

    On SVHN and CIFAR-10 it has 172,218. Without `channels`: 56 for grey images, else 81. (The paper prints 54 and
    84K for MNIST; 84,460 needs 56.) A tuple is for several tiers, of which S reads the last. The authors stop a
    batch as one: ImplicitNetwork(*mon(), coupled=True, tolerance=Tolerance(atol=0, rtol=1e-2)).
    """
    channels = channels or (56 if image[0] == 1 else 81)
    widths = (channels,) if isinstance(channels, int) else tuple(channels)
    pool: nn.Module = nn.AvgPool2d(4) if isinstance(channels, int) else nn.Identity()
    size = [n + 2 for n in image[1:]]
    for _ in widths[1:]:
        if any(n % 2 for n in size):
            raise ValueError(f"tiers before the last need an even size, got {size} with its border; resize images")
        size = [n // 2 + 1 for n in size]
    entries = pool(torch.empty(1, widths[-1], *size)).numel()
    head = OrderedDict(act=LastTier(), pool=pool, flat=nn.Flatten(), linear=nn.Linear(entries, classes))
    Q = Injection(image[0], widths)
    return Parts(Q, splitting(MonotoneConv2d(widths, M), alpha), nn.Sequential(head))


def mon_tiers(
    image: Image = (3, 32, 32), classes: int = 10, *, channels: tuple[int, ...] | None = None, **options: Any
) -> Parts:
    """Return the monotone operator network of three tiers: 170,194 parameters on SVHN.

    On CIFAR-10 it has as many, on MNIST 81,394. Without `channels`: (16, 32, 32) for grey images, else (16, 32,
    60). Q feeds the first tier, S reads the last. So JFB by `ForwardBackward`, which moves one tier a step, gives
    Q no gradient. `PeacemanRachford` reaches all tiers in one step; with `Neumann(2)` its gradient for Q has a
    cosine of .9 or more at fresh weights.
    """
    widths = channels or ((16, 32, 32) if image[0] == 1 else (16, 32, 60))
    return mon(image, classes, channels=widths, **options)


def mon_large(image: Image = (3, 32, 32), classes: int = 10, **options: Any) -> Parts:
    """Return the large monotone operator network of three tiers: 1,014,546 parameters on CIFAR-10."""
    return mon_tiers(image, classes, channels=(64, 128, 128), **options)


# One recipe for the comparison of all models at equal epochs.
COMMON = Recipe(
    lr=1e-3, epochs=20, batch_size=128, schedule=Cosine(), eps=1e-3, rtol=0.0, max_steps=100, augment="flip+crop:4"
)
# The gradient is exact, by the same splitting. Here each sample stops by itself; the authors stop the whole batch.
TRAINED = Recipe(lr=1e-3, epochs=40, batch_size=128, schedule=Steps((10, 20, 30), 0.1), augment="none", tune=True)
OWN = replace(TRAINED, eps=0.0, rtol=1e-2, max_steps=300, backward="implicit:picard:1e-2:300")
# From 1e-3 to .05 in 30 epochs, and back in 35. (The authors go back in 30, and change Adam's first beta too.)
LARGE = replace(OWN, lr=0.05, epochs=65, schedule=OneCycle(warm=0.46, start=0.02, end=0.02), augment="flip+crop:4")
CONSTANT = replace(LARGE, lr=1e-3, epochs=200, schedule=Constant())

register("mon", mon, recipes={"own": OWN, "colour": replace(OWN, schedule=Steps((25,), 0.1)), "common": COMMON})
register("mon-fc", mon_fc, recipes={"own": OWN, "common": COMMON})
register("mon-tiers", mon_tiers, recipes={"own": OWN, "cifar10": replace(OWN, lr=1e-2), "common": COMMON})
register("mon-large", mon_large, recipes={"own": LARGE, "constant": CONSTANT, "common": COMMON})
