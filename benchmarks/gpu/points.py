"""The working points: which network, batch, tolerance and precision, and the images they are measured on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from banach import Tolerance, WorstPixel, data, models
from banach.data import Batches, DataError, Images

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Promise:
    """What banach's fast path is to show at a point, on one H200."""

    ms: float
    against_peer: float  # times faster than the best peer
    against_twin: float  # times as long as the explicit twin


@dataclass(frozen=True)
class Point:
    """One network at one batch size, solved to `eps` in the authors' norm, the worst pixel over the channels."""

    name: str
    model: str
    batch: int
    eps: float
    max_steps: int
    precision: str  # the fastest of fp32, tf32 and bf16 that can meet eps
    promise: Promise | None = None
    relative: bool = False  # eps is relative to the latent: for banach alone, since the peers have no such test

    @property
    def tolerance(self) -> Tolerance:
        atol, rtol = (0.0, self.eps) if self.relative else (self.eps, 0.0)
        return Tolerance(atol=atol, rtol=rtol, max_steps=self.max_steps, norm=WorstPixel())

    @property
    def recipe(self) -> models.Recipe:
        return models.recipe(self.model)

    @property
    def image(self) -> models.Image:
        return models.get(self.model).image


# TF32 and bf16 cannot meet SVHN's 1e-4: their rounding leaves a residual of about 1e-3.
POINTS = {
    point.name: point
    for point in (
        Point("mnist100", "mnist", 100, 1e-1, 50, "bf16", Promise(0.5, 18, 2.0)),
        Point("svhn100", "svhn", 100, 1e-4, 200, "fp32", Promise(1.5, 11, 3.0)),
        Point("svhn100-relative", "svhn", 100, 1e-2, 200, "bf16", Promise(1.5, 0, 1.6), relative=True),
        Point("cifar100", "cifar10", 100, 1e-1, 50, "bf16", Promise(7.0, 9, 1.15)),
        Point("cifar512", "cifar10", 512, 1e-1, 50, "bf16", Promise(22.0, 8, 1.1)),
    )
}

ONE_EACH = ("mnist100", "svhn100", "cifar100")  # one for each network


@dataclass(frozen=True, eq=False)
class Feed:
    """Batches made beforehand, on the device, handed round and round: making them is in nobody's time."""

    batches: list[Batch]
    title: str

    def __iter__(self) -> Iterator[Batch]:
        return (self.batches[k % len(self.batches)] for k in count())


def feed(
    point: Point, device: torch.device, data_dir: str | os.PathLike[str] | None = None, *, many: int = 64
) -> Feed:
    """`many` batches of real images, augmented as in the paper for CIFAR-10; of random ones if there are none."""
    try:
        images = data.load(point.model, "train", data_dir, device)
    except data.error.Damaged:
        raise
    except DataError:
        images = _random_images(point, device)
    augment = data.paper_cifar10() if point.model == "cifar10" else None
    batches = Batches(images, point.batch, seed=0, augment=augment, drop_last=True)
    title = images.title if augment is None else f"{images.title}, augmented as in the paper"
    return Feed(list(_take(batches, many)), title)


def _take(batches: Batches, many: int) -> Iterator[Batch]:
    for k, batch in enumerate(batches.epoch()):
        if k == many:
            return
        yield batch


def _random_images(point: Point, device: torch.device) -> Images:
    """Noise of the right shape. The depth on noise is not the depth on images, so results say which it was."""
    dataset = data.get(point.model)
    draw = torch.Generator().manual_seed(0)
    number = 8 * point.batch
    return Images(
        pixels=torch.randint(0, 256, (number, *dataset.shape), generator=draw, dtype=torch.uint8).to(device),
        labels=torch.randint(0, len(dataset.classes), (number,), generator=draw).to(device),
        name=dataset.name,
        title=f"random images (no {dataset.title} found)",
        split="train",
        classes=dataset.classes,
        mean=dataset.mean,
        std=dataset.std,
    )
