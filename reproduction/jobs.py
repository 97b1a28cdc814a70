"""Training jobs: which network, on which data, with which settings and seed. The studies list theirs."""

import difflib
import importlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from banach import Implicit, ImplicitNetwork, Mode, Picard, Solver, Status, Tolerance, models
from banach.data import Augmentation
from banach.train import Settings

SNAPSHOTS = (1, 3, 10, 30, 100, 300, 1000)  # epochs whose weights are stored, besides the last one
LAST = 10  # the test set is evaluated after each of the last epochs


class Adjoints(Counter[str]):
    """A `report` for `Implicit` that counts how the samples' adjoint equations ended."""

    def __call__(self, products: int, residual: Tensor, status: tuple[Status, ...]) -> None:
        self.update(f"adjoint {end.name}" for end in status)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run.

    `solver` and `backward` replace those of the settings where words cannot describe them. The test set is
    evaluated after every `evaluate_every`-th epoch and after each of the last ten; it chooses nothing. `after`:
    start with the weights that job ended with. A job that changes gets another name: records are found by names.
    """

    name: str
    settings: Settings
    solver: Solver | None = None
    backward: Mode | None = None
    evaluate_every: int = 1
    after: "Job | None" = None

    @property
    def released_augmentation(self) -> Augmentation | None:
        """What the released code also does to the test images: on CIFAR-10 it augments them."""
        return self.settings.augmentation() if self.settings.augment == "paper" else None

    def build(self) -> nn.Module:
        """Return the network with the initial weights of the seed; the global random state is kept.

        Where steps are not captured anyway, adjoint equations are counted: a report needs the host.
        """
        net = self.settings.build()
        if isinstance(net, ImplicitNetwork):
            net.solver, net.backward = self.solver or net.solver, self.backward or net.backward
            if isinstance(net.backward, Implicit) and not self.settings.fast:
                net.backward = replace(net.backward, report=Adjoints())
        return net

    def evaluates(self, epoch: int) -> bool:
        return epoch % self.evaluate_every == 0 or epoch == 1 or epoch > self.settings.epochs - LAST

    def takes_snapshot(self, epoch: int) -> bool:
        return epoch in SNAPSHOTS or epoch == self.settings.epochs


def settings(data: str, model: str | None = None, recipe: str | None = None, **changes: Any) -> Settings:
    """Return the settings of a model's recipe, on all training images; `changes` replace some.

    The model is by default the one named after the data. `max_steps=0` is the explicit twin S(R(0, Q(d))). The
    contraction is measured by `measure.py`, at fewer epochs and on more images than the monitor of `fit`.
    """
    model = model or data
    values = {"whole": True, "monitor": False, **changes}
    return Settings.of_recipe(models.recipe(model, recipe), data=data, model=model, recipe=recipe, **values)


def neumann(order: int) -> Mode:
    """Return the gradient of `Neumann(order)`, by products with J' instead of evaluations of T under autograd."""
    return Implicit(Picard(), Tolerance(atol=0, rtol=0, max_steps=order, check_every=0))


def by_name() -> dict[str, Job]:
    """Return the jobs of all studies."""
    names = ("table1", "rivals", "table2", "neumann", "accelerate")
    studies = [importlib.import_module(f"reproduction.{name}") for name in names]
    return {job.name: job for study in studies for job in (*study.JOBS, *study.QUICK)}


def get(name: str) -> Job:
    """Return the job of that name; for an unknown one, raise a ValueError that names the closest."""
    jobs = by_name()
    if name in jobs:
        return jobs[name]
    near = difflib.get_close_matches(name, jobs, n=1, cutoff=0.0)
    raise ValueError(f"unknown job {name!r}; did you mean {near[0]!r}? `train --list` prints all jobs")
