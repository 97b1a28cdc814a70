"""What several studies share: subjects, their jobs, runs whose records are kept, summaries, curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from banach import data, models
from banach.backward import JFB, Mode
from banach.data import Augmentation, Chain, Crop, Flip, Images
from banach.models import Recipe, Steps
from banach.paper.jobs import PAPER_AUGMENT, Job, augmentation_for, settings_for
from banach.paper.kept import read, reading
from banach.paper.study import Options
from banach.provenance import Summary
from banach.solve import Picard, Solver
from banach.train import Settings
from banach.train.run import ENVIRONMENT

Point = Mapping[str, float]  # of a curve: epoch, seconds, warm_up, clean, converged; released
Place = tuple[str, str | None, bool | None]  # device and torch; the commit, and whether the tree had changes


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A data set, the network for it, and how far a study goes with it.

    `whole`: nothing is held out for validation. `by` is the recipe, the model's first if it is not named.
    `shift`: images are shifted at random by up to so many pixels. `first`: the first epochs of the recipe as they
    are, where else its schedule is shortened with it.
    """

    data: str
    model: str
    epochs: int
    seeds: int = 1
    precision: str = "fp32"
    subset: int | None = None
    whole: bool = False
    by: str | None = None
    shift: int | None = None
    first: bool = False
    fast: bool = True

    def recipe(self, which: str | None = None) -> Recipe:
        return models.recipe(self.model, self._known(which))

    def job(
        self,
        name: str,
        seed: int = 0,
        *,
        backward: Mode = JFB(),
        solver: Solver = Picard(),
        recipe: str | None = None,
        explicit: bool = False,
        batch_norm: bool = True,
    ) -> Job:
        """The recipe's settings and tolerance, at the subject's length and precision."""
        settings = settings_for(
            self.model,
            self._known(recipe),
            data=self.data,
            subset=self.subset,
            whole=self.whole,
            augment=_augment(self)[0],
            batch_norm=batch_norm,
            norm=None,  # that of the model: the settings of a run hold the command line's words, or nothing
            precision=self.precision,
            fast=self.fast,
            seed=seed,
            monitor=False,
            **({"max_steps": 0} if explicit else {}),
        )
        return Job(
            name=f"{name}-seed{seed}",
            data=self.data,
            model=self.model,
            settings=replace(settings, epochs=self.epochs) if self.first else shortened(settings, self.epochs),
            backward=backward,
            solver=solver,
            tolerance=self.recipe(recipe).tolerance,
            explicit=explicit,
            batch_norm=batch_norm,
            augment=_augment(self)[1],
            subset=self.subset,
        )

    def lack(self) -> str:
        """In what this is shorter than the recipe; empty where it is not."""
        whole = self.recipe().epochs
        length = (
            f"the first {self.epochs} epochs of {whole}"
            if self.first
            else f"{self.epochs} epochs instead of {whole}"
        )
        parts = [length] if self.epochs < whole else []
        parts += [f"{self.subset:,} training images"] if self.subset is not None else []
        return ", ".join(parts)

    def _known(self, recipe: str | None) -> str | None:
        """digits has one recipe for all: there the name of another is passed by."""
        recipe = self.by if recipe is None else recipe
        return recipe if recipe in models.get(self.model).recipes else None


def shortened(settings: Settings, epochs: int) -> Settings:
    """The same run in fewer epochs: the milestones of its schedule come sooner in proportion."""
    schedule = settings.schedule
    if isinstance(schedule, Steps):
        schedule = replace(schedule, at=tuple(round(at * epochs / settings.epochs) for at in schedule.at))
    return replace(settings, epochs=epochs, schedule=schedule)


def _augment(subject: Subject) -> tuple[str | None, Augmentation | None]:
    """The authors' for CIFAR-10; for ResNet-56 that of He et al., whose settings it is trained with."""
    if subject.model == "resnet56" and subject.data == "cifar10":
        return "flip+crop:4", Chain(Flip(), Crop(4))
    if subject.shift is not None:
        return f"crop:{subject.shift}", Crop(subject.shift)
    made = augmentation_for(subject.data)
    return (PAPER_AUGMENT if made is not None else None), made


def unseen(name: str, options: Options) -> Images:
    """The test split of a data set, on the device of the options."""
    return data.load(name, "test", options.data_dir).to(options.torch_device)


def trained_on(names: Iterable[str], options: Options) -> str:
    """Where and by which commit runs were begun: that need not be where they are read."""
    return where(_place(options.runs / name / ENVIRONMENT) for name in names)


def device_of(name: str, options: Options) -> str:
    """That of a run, without versions: a cell of a table."""
    path = options.runs / name / ENVIRONMENT
    with reading(path):
        return str(read(path)["device"])


def _place(path: Path) -> Place:
    with reading(path):
        return place_of(read(path))


def place_of(made: Mapping[str, Any]) -> Place:
    """From what `provenance` says."""
    return f"{made['device']}, torch {made['versions']['torch']}", made["commit"], made["dirty"]


def where(places: Iterable[Place], done: str = "trained") -> str:
    """In a sentence: devices and commits, and how many trainings, or what else was done there, each had."""
    counted = Counter(
        f"{device}, commit {(commit or 'unknown')[:7]}{' with changes' if dirty else ''}"
        for device, commit, dirty in places
    )
    return f"{done} on " + "; ".join(f"{place} ({count})" for place, count in counted.items())


def warm(curve: Sequence[Point]) -> list[float]:
    """Seconds of its epochs; one that warms up, first or resumed, counts as the mean of the others."""
    cold = [bool(point.get("warm_up", number == 0)) for number, point in enumerate(curve)]
    rest = [point["seconds"] for point, is_cold in zip(curve, cold, strict=True) if not is_cold]
    typical = sum(rest) / len(rest) if rest else min((point["seconds"] for point in curve), default=0.0)
    return [typical if is_cold else point["seconds"] for point, is_cold in zip(curve, cold, strict=True)]


def percent(shares: Iterable[float]) -> Summary:
    return Summary.of(100 * share for share in shares)


def summary(values: Iterable[float | None]) -> Summary | None:
    """Over seeds; None where there is no such quantity."""
    known = [value for value in values if value is not None]
    return Summary.of(known) if known else None


def curves_figure(title: str, curves: Mapping[str, Sequence[Point]], untimed: Sequence[str] = ()) -> Any:
    """Clean test accuracy against epochs and against `warm` seconds; those in `untimed` against epochs alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    by_epoch, by_second = figure.subplots(1, 2, sharey=True)
    for number, (name, points) in enumerate(curves.items()):
        accuracy = [100 * point["clean"] for point in points]
        style: dict[str, Any] = {"color": f"C{number % 10}", "marker": "."}
        by_epoch.plot([point["epoch"] for point in points], accuracy, label=name, **style)
        if name not in untimed:
            by_second.plot(list(accumulate(warm(points))), accuracy, **style)
    _finish(by_epoch, by_second, longest=max((len(points) for points in curves.values()), default=0))
    figure.suptitle(title)
    return figure


def _finish(by_epoch: Any, by_second: Any, *, longest: int) -> None:
    from matplotlib.ticker import MaxNLocator

    by_epoch.set(xlabel="epoch", ylabel="test accuracy, per cent (clean)")
    by_second.set(xlabel="seconds of training")
    if longest > 20:
        by_epoch.set_xscale("log")  # short runs and long ones side by side
    else:
        by_epoch.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (by_epoch, by_second):
        axes.grid(alpha=0.3)
    by_epoch.legend(fontsize="small")
