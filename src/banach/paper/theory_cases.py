"""The networks of the theory study, trained once, their weights kept at chosen epochs to be measured."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from banach import data
from banach.data import Images
from banach.paper.jobs import PAPER_AUGMENT, Job, announce, augmentation_for, open_run, settings_for
from banach.paper.study import Options
from banach.train import Epoch, RunError, evaluate, fit

FOLDER = "weights"  # inside the run's directory


@dataclass(frozen=True)
class Case:
    """A network, the epochs at which it is measured (0: fresh weights; the last one ends the training), and how.

    `images`: training images of the batch. `dense`: how many of them are also measured by dense matrices.
    `precision` is that of the training; all is measured in float64.
    """

    data: str
    model: str
    epochs: tuple[int, ...]
    images: int
    dense: int
    dense_epochs: tuple[int, ...]
    precision: str = "fp32"

    @property
    def name(self) -> str:
        return f"theory-{self.model}-jfb-seed0"

    def dense_at(self, epoch: int) -> int:
        return self.dense if epoch in self.dense_epochs else 0

    def job(self) -> Job:
        augment = augmentation_for(self.data)
        settings = settings_for(
            self.model,
            data=self.data,
            epochs=max(self.epochs),
            seed=0,
            augment=None if augment is None else PAPER_AUGMENT,
            precision=self.precision,
            monitor=False,  # of contraction: it is measured here, on more images and more closely
        )
        return Job(name=self.name, data=self.data, model=self.model, settings=settings, augment=augment)


@dataclass(frozen=True, eq=False)
class Moment:
    """A network in the course of its training, in float64 and eval mode."""

    epoch: int
    accuracy: float  # on the validation images
    net: Any
    weights: str  # sha256 of their file


@dataclass(frozen=True, eq=False)
class Trained:
    """A case with its moments, and the batch they are measured on: images that the network is trained with.

    `pixels` is a sha256 of that batch before it is normalised: the same on every device.
    """

    case: Case
    title: str
    moments: list[Moment]
    d: Tensor
    labels: Tensor
    label_smoothing: float
    pixels: str

    def loss(self, labels: Tensor) -> Any:
        """What the training lowers, for these labels."""
        return lambda y: torch.nn.functional.cross_entropy(y, labels, label_smoothing=self.label_smoothing)


def train(case: Case, options: Options) -> Trained:
    """Train, or go on, or read what was trained."""
    job = case.job()
    settings = replace(job.settings, device=options.device)
    run = open_run(job, settings, options)
    train, validation = (data.load(case.data, split, options.data_dir) for split in ("train", "validation"))
    net: Any = job.build()
    path = run.path
    _keep(net, path, 0)

    def on_epoch(epoch: Epoch) -> None:
        if epoch.epoch in case.epochs:
            _keep(net, path, epoch.epoch)

    announce(run, options)
    history = fit(net, train, validation, settings, augment=job.augment, run=run, on_epoch=on_epoch)
    if not history.finished or history.stopped_by is not None:
        raise KeyboardInterrupt  # the run is kept and is resumed next time
    few = train.subset(case.images).to(settings.torch_device)
    return Trained(
        case,
        train.title,
        _moments(job, path, case, history.epochs, validation.to(settings.torch_device)),
        few.normalise(few.pixels).double(),
        few.labels,
        settings.label_smoothing,
        _digest(few),
    )


def _moments(job: Job, path: Path, case: Case, epochs: tuple[Epoch, ...], validation: Images) -> list[Moment]:
    """One for every file of weights; training that was killed between an epoch and its file has one less."""
    from safetensors.torch import load_file

    found = []
    for epoch in case.epochs:
        file = _file(path, epoch)
        if not file.exists():
            continue
        net = job.build()
        try:
            net.load_state_dict(load_file(file))
        except Exception as error:  # safetensors has one of its own
            said = f"{file} cannot be read ({' '.join(str(error).split())[:200]})"
            raise RunError(f"{said}; delete {path}, and run the command again") from None
        net.to(validation.device).eval()
        accuracy = epochs[epoch - 1].validated if epoch else evaluate(net, validation).accuracy
        found.append(Moment(epoch, accuracy, net.double(), hashlib.sha256(file.read_bytes()).hexdigest()))
    return found


def _digest(images: Images) -> str:
    """Of the pixels, the labels, and how they are normalised."""
    digest = hashlib.sha256(repr((images.mean, images.std, tuple(images.pixels.shape))).encode())
    for tensor in (images.pixels, images.labels):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _keep(net: Any, path: Path, epoch: int) -> None:
    """The weights and buffers of an epoch, whole or not at all."""
    from safetensors.torch import save_file

    target = _file(path, epoch)
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_suffix(".half")
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in net.state_dict().items()}, half)
    os.replace(half, target)


def _file(path: Path, epoch: int) -> Path:
    return path / FOLDER / f"epoch-{epoch:05d}.safetensors"
