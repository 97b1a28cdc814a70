"""Batches: shuffled, augmented, normalised batches, a function of (seed, epoch, batch) alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from banach import checks
from banach.data import counter
from banach.data.augment import Augmentation
from banach.data.images import Images

_ORDER, _CHANGE = 0, 1  # streams of random numbers: the order of the images, and their augmentation


@dataclass(frozen=True, eq=False)
class Batches:
    """(float32 images, int64 labels) on the device of `images`.

    Batch k of epoch e is the same whether the epoch began there or at 0, before or after a resume, and on every
    device (to rounding). To capture a step, store `index` and `key` in tensors and call `make`.
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
            got = f"{len(self.images)} images make no batch of {self.size}"
            raise ValueError(f"{got}; choose a smaller batch size")

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.images) // self.size if self.drop_last else math.ceil(len(self.images) / self.size)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch, from batch `start` on."""
        order = self.order(epoch)
        for k in range(start, len(self)):
            yield self.make(self.index(order, k), self.key(epoch, k))

    def order(self, epoch: int) -> Tensor:
        """Return the index of every image once, in the order of that epoch."""
        if not self.shuffle:
            return torch.arange(len(self.images), device=self.images.device)
        return counter.permutation(counter.key(self.seed, _ORDER, epoch), len(self.images), self.images.device)

    def index(self, order: Tensor, k: int) -> Tensor:
        """Return the images of batch k, a view of the order."""
        return order[k * self.size : (k + 1) * self.size]

    def key(self, epoch: int, k: int) -> int:
        """Return the key from which the augmentation of batch k is drawn."""
        return counter.key(self.seed, _CHANGE, epoch, k)

    def make(self, index: Tensor, key: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch of these images. No host sync: with tensors for both arguments it can be captured."""
        own = self.own(len(index), self.part[0])
        x = self.images.normalise(self.images.pixels.index_select(0, index[own]))
        if self.augment is not None and self.augment.draws:
            x = self.augment.apply(x, counter.uniform(key, len(index), self.augment.draws, x.device)[own])
        return x, self.images.labels.index_select(0, index[own])

    def own(self, size: int, rank: int) -> slice:
        """Return the part of a batch of `size` images that a rank gets; the parts of all ranks are the batch."""
        return slice(size * rank // self.part[1], size * (rank + 1) // self.part[1])
