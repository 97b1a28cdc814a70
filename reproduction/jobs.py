"""The named training jobs: which network, on which data, with which settings and seed."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

import torch
from torch import nn

from banach import ImplicitNetwork, data, models
from banach.data import Augmentation, Chain, Crop, Flip, paper_cifar10
from banach.train import Settings

SNAPSHOTS = (1, 3, 10, 30, 100, 300, 1000)  # epochs whose weights are stored, besides the last one
MONITOR_EVERY = 50  # epochs between two measurements of the contraction, besides the snapshots
LAST = 10  # the test set is evaluated after each of the last epochs


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run. Settings are those of the model's recipe, and all training images are used.

    `explicit` trains the twin S(R(0, Q(d))). The test set is evaluated after every `evaluate_every`-th epoch and
    after each of the last ten; it chooses nothing. `augment` names a key of `AUGMENTATIONS`.
    """

    name: str
    data: str
    model: str
    seed: int
    recipe: str | None = None
    explicit: bool = False
    precision: str = "fp32"
    augment: str | None = None
    evaluate_every: int = 1
    epochs: int | None = None

    @property
    def settings(self) -> Settings:
        """The settings that `fit` gets."""
        recipe = models.recipe(self.model, self.recipe)
        return Settings.of_recipe(
            recipe,
            data=self.data,
            model=self.model,
            recipe=self.recipe,
            whole=True,
            augment=self.augment,
            precision=self.precision,
            seed=self.seed,
            monitor=False,  # measured here, at fewer epochs and on more images
            epochs=self.epochs or recipe.epochs,
            max_steps=0 if self.explicit else recipe.max_steps,
        )

    @property
    def augmentation(self) -> Augmentation | None:
        """What is done to the training images."""
        return None if self.augment is None else AUGMENTATIONS[self.augment]

    @property
    def released_augmentation(self) -> Augmentation | None:
        """What the released code also does to the test images: on CIFAR-10 it augments them."""
        return self.augmentation if self.augment == "paper" else None

    def build(self) -> nn.Module:
        """Return the network with the initial weights of the seed; the global random state is kept."""
        dataset, tolerance = data.get(self.data), models.recipe(self.model, self.recipe).tolerance
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed)
            net = models.build(
                self.model, image=dataset.shape, classes=len(dataset.classes), explicit=self.explicit
            )
        if isinstance(net, ImplicitNetwork):
            net.tolerance = replace(tolerance, max_steps=0) if self.explicit else tolerance
        return net

    def evaluates(self, epoch: int) -> bool:
        """Return True if the test set is evaluated after this epoch, counted from 1."""
        return epoch % self.evaluate_every == 0 or epoch == 1 or epoch > self.settings.epochs - LAST

    def monitors(self, epoch: int) -> bool:
        """Return True if the contraction is measured after this epoch."""
        return epoch % MONITOR_EVERY == 0 or self.takes_snapshot(epoch)

    def takes_snapshot(self, epoch: int) -> bool:
        """Return True if the weights after this epoch are stored."""
        return epoch in SNAPSHOTS or epoch == self.settings.epochs


AUGMENTATIONS: dict[str, Augmentation] = {"paper": paper_cifar10(), "flip+crop:4": Chain(Flip(), Crop(4))}


def _pair(name: str, seeds: int, **common: object) -> list[Job]:
    """The JFB network and its explicit twin for each seed."""
    fields = {"data": name, "model": name, "recipe": "released", **common}
    return [
        Job(name=f"{name}-{kind}-seed{seed}", seed=seed, explicit=kind == "twin", **fields)  # type: ignore[arg-type]
        for kind in ("jfb", "twin")
        for seed in range(seeds)
    ]


_ALL = [
    *_pair("cifar10", 3, precision="bf16", augment="paper", evaluate_every=5),
    *_pair("svhn", 3, evaluate_every=5),
    *_pair("mnist", 5),
    *(
        Job(name=f"mnist-jfb-printed-seed{seed}", data="mnist", model="mnist", recipe="paper", seed=seed)
        for seed in range(5)
    ),
    *(
        Job(
            name=f"resnet56-seed{seed}",
            data="cifar10",
            model="resnet56",
            recipe="he",
            precision="bf16",
            augment="flip+crop:4",
            evaluate_every=5,
            seed=seed,
        )
        for seed in range(3)
    ),
    Job(name="digits-jfb-seed0", data="digits", model="digits", seed=0, epochs=4),  # a dry run of seconds
]
JOBS = {job.name: job for job in _ALL}


def get(name: str) -> Job:
    """Return the job of that name.

    Raises:
        ValueError: if there is none; the message names the closest one.
    """
    if name in JOBS:
        return JOBS[name]
    near = difflib.get_close_matches(name, JOBS, n=1, cutoff=0.0)
    raise ValueError(f"unknown job {name!r}; did you mean {near[0]!r}? `train --list` prints all jobs")
