"""The readings of a trained case: kept ones are taken up, others are measured and kept beside the training.

A kept one that is not of these weights, images and settings, or that cannot be read, is measured anew. Of the code
that measures only its constants are compared: where it has changed otherwise, delete the folder. Where weights are
gone a reading stands for itself.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from banach.paper import theory_dense, theory_measure, theory_perturb
from banach.paper.common import Place, place_of
from banach.paper.kept import reading
from banach.paper.rebuild import rebuild
from banach.paper.records import in_first_words, read_kept, write_kept
from banach.paper.study import Options
from banach.paper.theory_cases import Case, Moment, Trained
from banach.paper.theory_measure import Reading, measure
from banach.provenance import provenance
from banach.train import RunError
from banach.train.checkpoint import checkpoints
from banach.train.run import CHECKPOINTS

FOLDER = "readings"  # inside the run's directory


@dataclass(frozen=True)
class Source:
    """What a reading is measured from: two of the same are the same up to rounding; in training mode, up to the
    masks of dropout, which CPUs and GPUs draw otherwise."""

    weights: str  # sha256 of their file
    images: int
    pixels: str  # sha256 of the images, their labels and how they are normalised
    dense: int  # images that are looked at closely at this epoch
    settings: dict[str, str]


@dataclass(frozen=True, eq=False)
class Kept:
    """A reading, what it was measured from, where, and in how many seconds. `title` is of the data."""

    title: str
    source: Source
    place: Place
    seconds: float
    reading: Reading


def readings_of(trained: Trained, options: Options) -> list[Kept]:
    """One for every epoch of the case that has weights, or else a reading that was kept, in their order."""
    case, moments = trained.case, {moment.epoch: moment for moment in trained.moments}
    found = [
        _reading(moments[epoch], trained, options) if epoch in moments else _without_weights(case, epoch, options)
        for epoch in case.epochs
    ]
    return [one for one in found if one is not None]


def are_alone(run: Path) -> bool:
    """Are there readings in the run's directory, and no checkpoint that a training could be read from?"""
    return any((run / FOLDER).glob("epoch-*.json")) and not checkpoints(run / CHECKPOINTS)


def readings_alone(case: Case, options: Options) -> list[Kept] | None:
    """Those of a training that is gone, which need no data; None if it is there, or if one lacks or does not fit
    the case."""
    if not are_alone(options.runs / case.name):
        return None
    found = [_without_weights(case, epoch, options) for epoch in case.epochs]
    kept = [one for one in found if one is not None]
    return kept if len(kept) == len(found) else None


def _without_weights(case: Case, epoch: int, options: Options) -> Kept | None:
    """A kept one that fits the case, so far as can be told."""
    kept = _read(_file(case, epoch, options), case)
    if kept is None:
        return None
    asked = (case.images, case.dense_at(epoch), _settings(case.job().build()))
    return kept if (kept.source.images, kept.source.dense, kept.source.settings) == asked else None


def _reading(moment: Moment, trained: Trained, options: Options) -> Kept:
    case, source = trained.case, _source(moment, trained)
    path = _file(case, moment.epoch, options)
    said = f"{case.name}: epoch {moment.epoch}"
    kept = _read(path, case)
    if kept is not None and kept.source == source:
        options.say(f"{said} was measured before, in {kept.seconds:.1f} seconds")
        return kept
    made = _measure(moment, trained, source)
    write_kept(path, case.job(), asdict(made))
    options.say(f"{said} is measured, in {made.seconds:.1f} seconds")
    return made


def _measure(moment: Moment, trained: Trained, source: Source) -> Kept:
    begun = time.perf_counter()
    found = measure(moment, trained)
    seconds = time.perf_counter() - begun
    return Kept(trained.title, source, place_of(provenance(device=trained.d.device)), seconds, found)


def _file(case: Case, epoch: int, options: Options) -> Path:
    return options.runs / case.name / FOLDER / f"epoch-{epoch:05d}.json"


def _read(path: Path, case: Case) -> Kept | None:
    """None where there is nothing, or nothing that fits."""
    try:
        kept = read_kept(path, case.job())
        with reading(path):
            return None if kept is None else rebuild(Kept, kept)
    except RunError:
        return None


def _source(moment: Moment, trained: Trained) -> Source:
    case = trained.case
    dense, settings = case.dense_at(moment.epoch), _settings(moment.net)
    return Source(moment.weights, len(trained.d), trained.pixels, dense, settings)


def _settings(net: Any) -> dict[str, str]:
    """Those that the job's own do not tell."""
    return {
        "tolerance": in_first_words(net.tolerance),
        "tight": in_first_words(theory_measure.TIGHT),
        "limit": in_first_words(theory_dense.LIMIT),
        "columns": repr(theory_dense.OTHERS),
        "distances": repr(theory_perturb.DISTANCES),
        "directions": repr(theory_perturb.DIRECTIONS),
        "ascents": repr(theory_perturb.ASCENTS),
        "steps": repr(theory_perturb.STEPS),
    }
