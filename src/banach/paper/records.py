"""Trainings of the studies, with what was heard on the way; and their records, which outlive the weights."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor

from banach.backward import Implicit
from banach.paper.jobs import Job, Outcome, carry_out
from banach.paper.kept import read, reading
from banach.paper.study import Options
from banach.provenance import Summary, plain, write_json
from banach.solve import Status
from banach.train import Epoch, Settings
from banach.train.checkpoint import checkpoints
from banach.train.run import CHECKPOINTS, SETTINGS, RunError

HEARD, RECORD = "heard.json", "record.json"
_CONTENT = "marks"  # the key in the files that are kept
_LATER = ("jacobian_penalty", "finite_difference", "correction", "correction_steps")  # settings


class Adjoints(Counter[str]):
    """A `report` for `Implicit`: how many samples' adjoint equations ended in which way."""

    def __call__(self, products: int, residual: Tensor, status: tuple[Status, ...]) -> None:
        self.update(f"adjoint {end.name}" for end in status)

    def __repr__(self) -> str:  # what was counted is no part of a job's identity
        return "Adjoints()"

    __str__ = __repr__


@dataclass(frozen=True, eq=False)
class Record:
    """What a training was, without its weights: its epochs, its curve on the test images, and what was heard on
    the way: warnings by kind, ends of adjoint equations."""

    job: Job
    title: str
    epochs: tuple[Epoch, ...]
    curve: list[dict[str, float]]
    heard: Counter[str]

    @property
    def accuracy(self) -> float:
        """By the clean protocol, after the last epoch."""
        return self.curve[-1]["clean"]

    @property
    def pace(self) -> Summary:
        """Seconds per epoch. One that warms up does not count where there are others, and else the quickest."""
        seconds = [epoch.seconds for epoch in self.epochs if not epoch.warm_up]
        return Summary.of(seconds or [min(epoch.seconds for epoch in self.epochs)])

    @property
    def seconds(self) -> float:
        return self.pace.mean

    @property
    def adjoints_met(self) -> float | None:
        """The share of adjoint equations that met their tolerance."""
        ends = {key: count for key, count in self.heard.items() if key.startswith("adjoint ")}
        return ends.get("adjoint CONVERGED", 0) / sum(ends.values()) if ends else None

    def warnings_of(self, words: str) -> int:
        return sum(count for key, count in self.heard.items() if words in key)


@dataclass(frozen=True, eq=False)
class Trained:
    """A job's outcome, with its network, and the record of it."""

    outcome: Outcome
    record: Record


def train(job: Job, options: Options, *, released: bool = False) -> Trained:
    """`carry_out`, keeping what was said beside the run: a run that is read or resumed still has it."""
    report = job.backward.report if isinstance(job.backward, Implicit) else None
    if isinstance(report, Adjoints):
        report.clear()
    folder = options.runs / job.name
    before = _heard_before(folder)

    def heard() -> Counter[str]:
        now = Counter(_kind(str(warning.message)) for warning in said)
        return before + now + (Counter(report) if isinstance(report, Adjoints) else Counter())

    def keep(*_: object) -> None:
        if (folder / SETTINGS).exists():
            write_json(folder / HEARD, heard())

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            outcome = carry_out(job, options, keep, released=released)  # kept before an epoch's checkpoint
        except KeyboardInterrupt:  # a checkpoint has this step; after an error the last one is an epoch's
            keep()
            raise
    keep()
    return Trained(outcome, Record(job, outcome.title, outcome.epochs, outcome.curve, heard()))


def record_of(job: Job, options: Options) -> Record:
    """Train, or go on, and keep the record beside the run; or read it, for which no weights are needed."""
    path = options.runs / job.name / RECORD
    kept = read_kept(path, job)
    if kept is not None:
        with reading(path):
            epochs = tuple(Epoch.from_dict(epoch) for epoch in kept["epochs"])
            if not len(epochs) == len(kept["curve"]) == job.settings.epochs:
                raise ValueError(f"it has not all of {job.settings.epochs} epochs")
            return Record(job, kept["title"], epochs, kept["curve"], Counter(kept["heard"]))
    made = train(job, options).record
    content = {"title": made.title, "epochs": [epoch.to_dict() for epoch in made.epochs]}
    write_kept(path, job, content | {"curve": made.curve, "heard": made.heard})
    return made


def read_kept(path: Path, job: Job) -> Any:
    """What `write_kept` wrote for this very job, None where there is nothing. What is of another job is refused:
    without weights nothing else would keep it from being written over."""
    if not path.exists():
        return None
    with reading(path):
        content = read(path)
        kept, asked = content["job"], _identity(job)
        if kept == asked:
            return content[_CONTENT]
        was, now = next((pair for pair in _pairs(kept, asked) if pair[0] != pair[1]), ("more to it", "less"))
    raise RunError(f"{path} is of a job with {was}, got {now}; choose another directory by --runs")


def write_kept(path: Path, job: Job, content: Any) -> None:
    write_json(path, {"job": _identity(job), _CONTENT: content})


def cold(records: Iterable[Record]) -> list[str]:
    """Sentences on trainings of which every epoch warms up, since they were interrupted."""
    names = [one.job.name for one in records if len(one.epochs) > 1 and all(e.warm_up for e in one.epochs)]
    said = "was interrupted, and all its epochs warm up: its seconds are of the quickest, and too long"
    return [f"{name} {said}" for name in names]


def _pairs(kept: Any, asked: Any) -> Iterator[tuple[str, str]]:
    """What names two jobs, piece by piece: settings by name, then the rest."""
    for name in {**kept["settings"], **asked["settings"]}:
        yield f"{name}={kept['settings'].get(name)}", f"{name}={asked['settings'].get(name)}"
    yield from zip_longest(kept["job"].split(", "), asked["job"].split(", "), fillvalue="nothing")


def _identity(job: Job) -> Any:
    """What names a job. Settings that came after the first records are left out at their defaults."""
    own, default = job.settings.to_dict(), Settings().to_dict()
    settings = {name: value for name, value in own.items() if name not in _LATER or value != default[name]}
    return plain({"settings": settings, "job": in_first_words(job)})


def in_first_words(made: Any) -> str:
    """Return the repr as it was when the first records were made, so that they are still found."""
    words = repr(made).replace("check_every=None", "check_every=1").replace(", order=1)", ")")
    for name in _LATER:
        words = words.replace(f"{name}={getattr(Settings(), name)!r}, ", "")
    return words


def _kind(message: str) -> str:
    """The sentence without its numbers."""
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", message)


def _heard_before(folder: Path) -> Counter[str]:
    """Of the steps that a checkpoint has; without one the training begins anew."""
    path = folder / HEARD
    if not path.exists() or not checkpoints(folder / CHECKPOINTS):
        return Counter()
    with reading(path):
        return Counter({str(key): int(count) for key, count in read(path).items()})
