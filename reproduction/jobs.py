"""Training jobs: which network, on which data, with which settings and seed. The studies list theirs."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from banach import JFB, ImplicitNetwork, Mode, Picard, Solver, models
from banach.data import Augmentation
from banach.train import Settings

SNAPSHOTS = (1, 3, 10, 30, 100, 300, 1000)  # epochs whose weights are stored, besides the last one
MONITOR_EVERY = 50  # epochs between two measurements of the contraction, besides the snapshots
LAST = 10  # the test set is evaluated after each of the last epochs


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run, with the settings of the model's recipe.

    `explicit` trains the twin S(R(0, Q(d))). `epochs` shortens the run and leaves the schedule as it is. `whole`
    trains on all training images; otherwise some are held out for validation. The test set is evaluated after
    every `evaluate_every`-th epoch and after each of the last ten; it chooses nothing. `augment` is a word of the
    command line. `backward` makes the backward mode. `after`: start with the weights that job ended with.
    A job that changes gets another name: records are found by names.
    """

    name: str
    data: str
    model: str
    seed: int = 0
    recipe: str | None = None
    explicit: bool = False
    batch_norm: bool = True
    solver: Solver = Picard()
    backward: Callable[[], Mode] = JFB
    precision: str = "fp32"
    augment: str | None = None
    evaluate_every: int = 1
    epochs: int | None = None
    subset: int | None = None
    whole: bool = True
    fast: bool = True
    after: Job | None = None

    @property
    def settings(self) -> Settings:
        """The settings that `fit` gets."""
        recipe = models.recipe(self.model, self.recipe)
        names = "data model recipe subset whole augment batch_norm precision fast seed"
        return Settings.of_recipe(
            recipe,
            **{name: getattr(self, name) for name in names.split()},
            monitor=False,  # measured here, at fewer epochs and on more images
            epochs=self.epochs or recipe.epochs,
            max_steps=0 if self.explicit else recipe.max_steps,
        )

    @property
    def released_augmentation(self) -> Augmentation | None:
        """What the released code also does to the test images: on CIFAR-10 it augments them."""
        return self.settings.augmentation() if self.augment == "paper" else None

    def build(self) -> nn.Module:
        """Return the network with the initial weights of the seed; the global random state is kept."""
        net = self.settings.build()
        if isinstance(net, ImplicitNetwork):
            net.solver, net.backward = self.solver, self.backward()
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


def by_name() -> dict[str, Job]:
    """Return the jobs of all studies."""
    from reproduction import accelerate, neumann, table1, table2

    studies = (table1, table2, neumann, accelerate)
    return {job.name: job for study in studies for job in (*study.JOBS, *study.QUICK)}


def get(name: str) -> Job:
    """Return the job of that name.

    Raises:
        ValueError: if there is none; the message names the closest one.
    """
    jobs = by_name()
    if name in jobs:
        return jobs[name]
    near = difflib.get_close_matches(name, jobs, n=1, cutoff=0.0)
    raise ValueError(f"unknown job {name!r}; did you mean {near[0]!r}? `train --list` prints all jobs")
