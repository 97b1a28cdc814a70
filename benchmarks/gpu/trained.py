"""A network in training, by fit itself, for benchmarks that need one whose depths are real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from banach import ImplicitNetwork
from banach.cli import assemble
from banach.cli.choose import choose
from banach.data import Batches, Images
from banach.train import Settings
from banach.train.precision import arithmetic
from banach.train.steps import Steps
from banach.train.work import Work


def work_of(settings: Settings, data_dir: str | None) -> Work:
    """Everything that `fit` works with, on the GPU."""
    device = settings.torch_device
    train, validation = (assemble.images(settings, part, data_dir).to(device) for part in ("train", "validation"))  # type: ignore[arg-type]
    batches = Batches(train, settings.batch_size, settings.seed, assemble.augmentation(settings))
    return Work(assemble.network(settings).to(device), batches, validation, settings)


@contextmanager
def steps_of(work: Work) -> Iterator[Steps]:
    """The steps that `fit` takes, in its arithmetic."""
    with arithmetic(work.settings.precision, work.device, search=True):
        yield Steps(work)


def network(
    model: str, steps: int, data_dir: str | None, device: str = "cuda"
) -> tuple[ImplicitNetwork, Tensor, Tensor]:
    """A network after some steps of bf16 training, in eval mode; validation and training images, normalised."""
    batch = 512 if device == "cuda" else 8
    work = work_of(choose({"data": model, "precision": "bf16", "batch_size": batch, "device": device}), data_dir)
    with steps_of(work) as taken:
        for index in range(steps):
            work.epoch, work.step = divmod(index, len(work.batches))
            taken.take()
    net: Any = work.net.eval()
    assert work.validation is not None
    return net, _normal(work.validation), _normal(work.batches.images)


def _normal(images: Images) -> Tensor:
    """The first of them, as a network takes them."""
    return images.normalise(images.pixels[:1024]).contiguous(memory_format=torch.channels_last)
