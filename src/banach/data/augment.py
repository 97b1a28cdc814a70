"""Augmentation: random changes to a batch, as tensor operations on its device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Augmentation(Protocol):
    """A change to normalised images, decided by `draws` numbers per image.

    `apply` is a function of its arguments alone and asks the host for nothing, so a step with it can be captured.
    Fills are in normalised units: 0 is the mean of the data.
    """

    @property
    def draws(self) -> int:
        """How many random numbers an image needs."""
        ...

    def apply(self, x: Tensor, u: Tensor) -> Tensor:
        """x (n, C, H, W) changed by u (n, draws), uniform in [0, 1)."""
        ...


@dataclass(frozen=True, init=False)
class Chain:
    """Several augmentations, one after the other: Chain(Flip(), Crop(4))."""

    parts: tuple[Augmentation, ...]

    def __init__(self, *parts: Augmentation) -> None:
        for part in parts:
            check_augmentation(part)
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
    """Left and right change places with probability p."""

    p: float = 0.5
    draws = 1

    def __post_init__(self) -> None:
        _check_range("p", (self.p, self.p), 0, 1)

    def apply(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.where(u[:, 0, None, None, None] < self.p, x.flip(3), x)


@dataclass(frozen=True)
class Crop:
    """`pad` rows and columns of `fill` on every side, then a window of the old size anywhere in it."""

    pad: int = 4
    fill: float = 0.0
    draws = 2

    def __post_init__(self) -> None:
        if isinstance(self.pad, bool) or not isinstance(self.pad, int) or self.pad < 0:
            raise ValueError(f"pad must be a whole number of pixels, at least 0, got {self.pad!r}")

    def apply(self, x: Tensor, u: Tensor) -> Tensor:
        height, width = x.shape[2:]
        padded = F.pad(x, [self.pad] * 4, value=self.fill)
        place = _below(u, 2 * self.pad + 1)
        rows = place[:, :1] + torch.arange(height, device=x.device)
        columns = place[:, 1:] + torch.arange(width, device=x.device)
        index = (rows[:, :, None] * padded.shape[3] + columns[:, None, :]).flatten(1)
        return padded.flatten(2).gather(2, index[:, None].expand(-1, x.shape[1], -1)).view(x.shape)


@dataclass(frozen=True)
class Erase:
    """A rectangle becomes `fill` with probability p: its area a share of the image, its ratio height / width.

    Both are drawn up to `attempts` times, until the rectangle is lower and narrower than the image (Zhong et al.,
    2020); where none is, nothing is erased.
    """

    p: float = 0.5
    area: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    fill: float = 0.0
    attempts: int = 10

    def __post_init__(self) -> None:
        _check_range("p", (self.p, self.p), 0, 1)
        _check_range("area", self.area, 0, 1)
        _check_range("ratio", self.ratio, 1e-6, 1e6)
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {self.attempts}")

    @property
    def draws(self) -> int:
        return 3 + 2 * self.attempts

    def apply(self, x: Tensor, u: Tensor) -> Tensor:
        height, width = x.shape[2:]
        h, w, erased = self._rectangle(u.double(), height, width)
        top, left = _below(u[:, 1], height - h + 1), _below(u[:, 2], width - w + 1)
        hit = _between(top, h, height, x.device)[:, :, None] & _between(left, w, width, x.device)[:, None, :]
        return torch.where((hit & erased[:, None, None])[:, None], self.fill, x)

    def _rectangle(self, u: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Height, width, and whether there is one. In float64, so that every device rounds to the same pixels."""
        area, ratio = u[:, 3:].split(self.attempts, 1)
        area = height * width * _stretch(area, self.area)
        ratio = _stretch(ratio, (math.log(self.ratio[0]), math.log(self.ratio[1]))).exp()
        h, w = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()
        fits = (h < height) & (w < width)
        first = fits.to(torch.uint8).argmax(1, keepdim=True)
        erased = fits.any(1) & (u[:, 0] < self.p)
        # Where nothing fits, any size that lies in the image will do: it is not used.
        return h.gather(1, first)[:, 0].clamp(max=height), w.gather(1, first)[:, 0].clamp(max=width), erased


def paper_cifar10() -> Chain:
    """The JFB authors' augmentation of CIFAR-10. Their .449 fills images that are normalised already."""
    return Chain(Flip(), Crop(pad=2, fill=0.449), Erase(p=0.95, area=(0.1, 0.25), ratio=(0.2, 5.0)))


def check_augmentation(part: Augmentation) -> None:
    if isinstance(part, type) or not hasattr(part, "apply") or not hasattr(part, "draws"):
        raise TypeError(f"an augmentation is an object such as Flip() or Chain(Flip(), Crop(4)), got {part!r}")


def _stretch(u: Tensor, ends: tuple[float, float]) -> Tensor:
    return ends[0] + (ends[1] - ends[0]) * u


def _below(u: Tensor, bound: int | Tensor) -> Tensor:
    """A whole number from 0 to bound - 1. (u is a multiple of 2^-24 below 1, so the product never rounds up.)"""
    return (u * bound).long()


def _between(start: Tensor, length: Tensor, size: int, device: torch.device) -> Tensor:
    place = torch.arange(size, device=device)
    return (place >= start[:, None]) & (place < (start + length)[:, None])


def _check_range(name: str, ends: tuple[float, float], least: float, most: float) -> None:
    if len(ends) != 2 or not least <= ends[0] <= ends[1] <= most:
        raise ValueError(f"{name} must lie between {least:g} and {most:g}, lower end first, got {ends}")
