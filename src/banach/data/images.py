"""Images: one split of a data set, as tensors on the training device. Batches: shuffled, augmented, normalised."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from banach import checks
from banach.data import counter
from banach.data.augment import Augmentation

SPLITS = ("train", "validation", "test", "train+validation")
# The raw stream of Philox is fixed by NumPy's compatibility policy; Generator.permutation's is not.
KEY = 0x62616E616368  # "banach"


@dataclass(frozen=True, eq=False)
class Images:
    """`pixels` uint8 (N, C, H, W) and `labels` int64 (N,), on one device.

    `title` names the data in results. `mean` and `std` are per channel, of pixels scaled to [0, 1]. `sha256` is
    that of the part of a data set which they were loaded from, or None: a run does not resume with another.
    """

    pixels: Tensor
    labels: Tensor
    name: str
    title: str
    split: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: str | None = None

    def __post_init__(self) -> None:
        x, y = self.pixels, self.labels
        if (x.dtype, x.dim(), y.dtype, y.shape) != (torch.uint8, 4, torch.int64, x.shape[:1]):
            got = f"{x.dtype} {tuple(x.shape)} and {y.dtype} {tuple(y.shape)}"
            raise TypeError(f"pixels must be uint8 (N, C, H, W) and labels int64 (N,), got {got}")
        if not len(self.mean) == len(self.std) == x.shape[1] or min(self.std) <= 0:  # they would be broadcast
            got = f"{self.mean} and {self.std}"
            raise ValueError(f"mean and std need a number per channel, those of std positive, got {got}")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Images({self.title!r}, {self.split!r}, {tuple(self.pixels.shape)} on {self.device})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        channels, height, width = self.pixels.shape[1:]
        return channels, height, width

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    def to(self, device: torch.device | str) -> Self:
        return replace(self, pixels=self.pixels.to(device), labels=self.labels.to(device))

    def take(self, index: Tensor | Sequence[int]) -> Self:
        """Return the images of `index`, in its order."""
        index = torch.as_tensor(index, dtype=torch.int64, device=self.device)
        return replace(self, pixels=self.pixels.index_select(0, index), labels=self.labels.index_select(0, index))

    def subset(self, count: int) -> Self:
        """Return `count` images, stratified by class; the same ones at every call."""
        return self.take(torch.from_numpy(held_out(self.labels.cpu().numpy(), count)))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return (pixels / 255 - mean) / std, in float32."""
        scale, shift = self._affine
        return torch.addcmul(shift, pixels.to(torch.float32), scale)

    @cached_property
    def _affine(self) -> Tensor:
        # Cached: making a tensor from Python numbers is a copy that the device waits for.
        mean, std = torch.tensor([self.mean, self.std], dtype=torch.float64, device="cpu")[..., None, None]
        return torch.stack([1 / (255 * std), -mean / std]).to(self.device, torch.float32)


@dataclass(frozen=True, eq=False)
class Batches:
    """(float32 images, int64 labels) on the device of `images`.

    Batch k of epoch e is the same whether the epoch began there or at 0, before or after a resume, and on every
    device (to rounding). To capture a step, copy what `drawn` yields into fixed tensors and call `make`.
    """

    images: Images
    size: int
    seed: int = 0
    augment: Augmentation | None = None
    shuffle: bool = True
    drop_last: bool = False
    part: tuple[int, int] = (0, 1)  # (rank, ranks): every batch is cut into so many parts, and this is one

    def __post_init__(self) -> None:
        checks.whole("the batch size", self.size, 1)
        if len(self) == 0:
            raise ValueError(f"{len(self.images)} images make no batch of {self.size}; choose a smaller size")

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.images) // self.size if self.drop_last else math.ceil(len(self.images) / self.size)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch, from batch `start` on."""
        for key, index in self.drawn(epoch, start):
            yield self.make(index, key)

    def drawn(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what each batch is made from: the key of its augmentation, and the index of its images."""
        order = self.order(epoch)
        for k in range(start, len(self)):
            key = counter.key(self.seed, counter.AUGMENT, epoch, k)
            yield order.new_full((), key), order[k * self.size : (k + 1) * self.size]

    def order(self, epoch: int) -> Tensor:
        """Return the index of every image once, in the order of that epoch."""
        count, device = len(self.images), self.images.device
        if not self.shuffle:
            return torch.arange(count, device=device)
        return counter.bits(counter.key(self.seed, counter.ORDER, epoch), count, device).argsort(stable=True)

    def make(self, index: Tensor, key: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch of these images. No host sync: with tensors for both arguments it can be captured."""
        own = own_part(len(index), *self.part)
        x = self.images.normalise(self.images.pixels.index_select(0, index[own]))
        if self.augment is not None and self.augment.draws:
            x = self.augment.apply(x, counter.uniform(key, len(index), self.augment.draws, x.device)[own])
        return x, self.images.labels.index_select(0, index[own])


def own_part(size: int, rank: int, ranks: int) -> slice:
    """Return the part of a batch of `size` samples that a rank gets; those of all ranks are the batch."""
    return slice(size * rank // ranks, size * (rank + 1) // ranks)


def held_out(labels: np.ndarray, count: int) -> np.ndarray:
    """Return `count` indices, ascending: the first of each class in the order of `Philox.random_raw`.

    Every class gives its share of `count`, rounded by largest remainder. The same on every machine.
    """
    if not 0 <= count <= len(labels):
        raise ValueError(f"cannot hold out {count} of {len(labels)} images; choose 0 to {len(labels)}")
    order = np.argsort(np.random.Philox(key=KEY).random_raw(len(labels)), kind="stable")
    classes, sizes = np.unique(labels, return_counts=True)
    # Integers throughout: a quotient in floating point could round differently on another machine.
    total = max(int(sizes.sum()), 1)
    quotas, remainders = sizes * count // total, sizes * count % total
    quotas[np.argsort(-remainders, kind="stable")[: count - quotas.sum()]] += 1  # ties go to the lower class
    chosen = [order[labels[order] == c][:quota] for c, quota in zip(classes, quotas, strict=True)]
    return np.sort(np.concatenate([*chosen, np.empty(0, order.dtype)]))


def parted(labels: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices that are not held out and those that are, ascending."""
    held = held_out(labels, count)
    return np.setdiff1d(np.arange(len(labels)), held), held
