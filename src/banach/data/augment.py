"""Augmentation: random changes to a batch of images, as tensor operations on its device."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from banach import checks


class Augmentation(Protocol):
    """A change to normalised images, decided by `draws` random numbers per image.

    `apply` depends on its arguments alone and needs no host sync, so a step with it can be captured.
    Fills are in normalised units: 0 is the mean of the data.
    """

    @property
    def draws(self) -> int:
        """Random numbers per image."""

    def apply(self, x: Tensor, u: Tensor) -> Tensor:
        """Return x (n, C, H, W) changed by u (n, draws), uniform in [0, 1)."""


@dataclass(frozen=True, init=False)
class Chain:
    """Several augmentations, one after the other: Chain(Flip(), Crop(4))."""

    parts: tuple[Augmentation, ...]

    def __init__(self, *parts: Augmentation) -> None:
        object.__setattr__(self, "parts", parts)

    @property
    def draws(self) -> int:
        return sum(part.draws for part in self.parts)

    def apply(self, x: Tensor, u: Tensor) -> Tensor:
        for part, own in zip(self.parts, u.split([part.draws for part in self.parts], 1), strict=True):
            x = part.apply(x, own)
        return x


@dataclass(frozen=True)
class Flip:
    """Mirror left and right with probability p."""

    p: float = 0.5
    draws = 1

    def __post_init__(self) -> None:
        checks.number("p", self.p, 0, 1)

    def apply(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.where(u[:, 0, None, None, None] < self.p, x.flip(3), x)


@dataclass(frozen=True)
class Crop:
    """Pad every side by `pad` pixels of `fill`, then take a random window of the old size."""

    pad: int = 4
    fill: float = 0.0
    draws = 2

    def __post_init__(self) -> None:
        checks.whole("pad", self.pad, 0, 256)  # the padded batch is stored

    def apply(self, x: Tensor, u: Tensor) -> Tensor:
        padded = F.pad(x, [self.pad] * 4, value=self.fill)
        windows = padded.unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)  # (n, C, row, column, H, W), a view
        row, column = _below(u, 2 * self.pad + 1).unbind(1)
        return windows[torch.arange(len(x), device=x.device), :, row, column]


@dataclass(frozen=True)
class Erase:
    """Fill a random rectangle with probability p: its area is a share of the image, its ratio height / width.

    Both are drawn up to `attempts` times, until the rectangle is smaller than the image on both sides
    (Zhong et al., 2020). If none is, nothing is erased.
    """

    p: float = 0.5
    area: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    fill: float = 0.0
    attempts: int = 10

    def __post_init__(self) -> None:
        checks.number("p", self.p, 0, 1)
        _check_range("area", self.area, 0, 1)
        _check_range("ratio", self.ratio, 1e-6, 1e6)
        checks.whole("attempts", self.attempts, 1)

    @property
    def draws(self) -> int:
        return 3 + 2 * self.attempts

    def apply(self, x: Tensor, u: Tensor) -> Tensor:
        height, width = x.shape[2:]
        # In float64, so that all devices round to the same pixels.
        area, ratio = u[:, 3:].double().split(self.attempts, 1)
        area = height * width * _stretch(area, self.area)
        ratio = _stretch(ratio, (math.log(self.ratio[0]), math.log(self.ratio[1]))).exp()
        h, w = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()
        fits = (h < height) & (w < width)
        first = fits.to(torch.uint8).argmax(1, keepdim=True)
        h, w = ((side * fits).gather(1, first)[:, 0] for side in (h, w))  # 0 if none fits
        rows, columns = _span(u[:, 1], h, height), _span(u[:, 2], w, width)
        hit = rows[:, :, None] & columns[:, None, :] & (u[:, 0].double() < self.p)[:, None, None]
        return torch.where(hit[:, None], self.fill, x)


@dataclass(frozen=True)
class Affine:
    """Rotate by at most `degrees`, scale, and shift by at most a share `translate` of each side, about the centre.

    Values between pixels are bilinear; outside the image is `fill`.
    """

    degrees: float = 10.0
    translate: float = 0.1
    scale: tuple[float, float] = (0.9, 1.1)
    fill: float = 0.0
    draws = 4

    def __post_init__(self) -> None:
        checks.number("degrees", self.degrees)
        checks.number("translate", self.translate)
        _check_range("scale", self.scale, 1e-6, 1e6)

    def apply(self, x: Tensor, u: Tensor) -> Tensor:
        # The source of every pixel is written out, because affine_grid multiplies matrices, which TF32 would round
        # to a tenth of a pixel. Angles turn from the x axis towards the y axis, which points down.
        height, width = x.shape[2:]
        u = u.to(x.dtype)[:, :, None, None]
        angle, scale = (2 * u[:, 0] - 1) * math.radians(self.degrees), _stretch(u[:, 1], self.scale)
        right, down = (2 * u[:, 2] - 1) * (self.translate * width), (2 * u[:, 3] - 1) * (self.translate * height)
        column = torch.arange(width, device=x.device, dtype=x.dtype) - (width - 1) / 2 - right
        row = torch.arange(height, device=x.device, dtype=x.dtype)[:, None] - (height - 1) / 2 - down
        cos, sin = angle.cos() / scale, angle.sin() / scale
        from_column, from_row = cos * column + sin * row, cos * row - sin * column
        grid = torch.stack([from_column * (2 / width), from_row * (2 / height)], 3)  # each side from -1 to 1
        # grid_sample fills with 0, hence the shift and back.
        return F.grid_sample(x - self.fill, grid, align_corners=False) + self.fill


def paper_cifar10() -> Chain:
    """Return the JFB authors' augmentation of CIFAR-10. Their .449 fills images that are normalised already."""
    return Chain(Flip(), Crop(pad=2, fill=0.449), Erase(p=0.95, area=(0.1, 0.25), ratio=(0.2, 5.0)))


def _stretch(u: Tensor, ends: tuple[float, float]) -> Tensor:
    return ends[0] + (ends[1] - ends[0]) * u


def _below(u: Tensor, bound: int | Tensor) -> Tensor:
    """Return an integer from 0 to bound - 1. (u is a multiple of 2^-24, so the product never rounds up.)"""
    return (u * bound).long()


def _span(u: Tensor, length: Tensor, size: int) -> Tensor:
    """Return which of `size` places are among the `length` that begin at a random one."""
    start, place = _below(u, size - length + 1)[:, None], torch.arange(size, device=u.device)
    return (place >= start) & (place < start + length[:, None])


def _check_range(name: str, ends: tuple[float, float], least: float, most: float) -> None:
    if len(ends) != 2 or not least <= ends[0] <= ends[1] <= most:
        raise ValueError(f"{name} must be between {least:g} and {most:g}, lower end first, got {ends}")
