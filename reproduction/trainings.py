"""Trainings as typed records: read by the studies, written from finished run directories by `collect`.

results/reproduction/trainings.jsonl holds one line per run; the runs of table2 and neumann are in files of those
names. Lines hold everything that a run recorded, except weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from banach import data
from banach.provenance import unsigned
from banach.train import Epoch, RunError
from reproduction import codec
from reproduction.jobs import Job
from reproduction.rundir import CONTRACTION, FINAL, SEGMENTS, TEST
from reproduction.study import Options, panels
from reproduction.train import train

FILES = ("table2", "neumann")  # studies with a file of their own


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Test images by one protocol: shares in 0..1, means over images."""

    accuracy: float
    depth: float | None = None
    max_residual: float | None = None
    converged: float | None = None


@dataclass(frozen=True, kw_only=True)
class Point:
    """The test set after one epoch, in the precision of the training."""

    epoch: int
    clean: Totals
    released: Totals | None = None


@dataclass(frozen=True, kw_only=True)
class Final:
    """After the last epoch, in fp32: the clean protocol at the settings' tolerance and at 1e-4 (`fine`)."""

    test: str
    parameters: int
    clean: Totals
    fine: Totals | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """One finished run. `segments`: one entry per process, with machine, versions, sources and warnings.

    `contraction`: sigma_max(dT/du) and rate after some epochs, as `measure.py` writes them.
    """

    job: str
    settings: dict[str, Any]
    segments: tuple[dict[str, Any], ...]
    final: Final
    test: tuple[Point, ...]
    epochs: tuple[Epoch, ...]
    contraction: tuple[dict[str, Any], ...] = ()

    @property
    def group(self) -> str:
        """The job without its seed, such as "svhn-twin"."""
        return self.job.removeprefix("table1-").rpartition("-seed")[0]

    @property
    def clean(self) -> float:
        """Test accuracy in percent by the clean protocol: eval mode, clean images, last epoch."""
        return 100 * self.final.clean.accuracy

    @property
    def released(self) -> float | None:
        """Test accuracy in percent as the released code reports it: training mode, best evaluated epoch."""
        found = [100 * point.released.accuracy for point in self.test if point.released is not None]
        return max(found, default=None)

    @property
    def images(self) -> int:
        """Training images per epoch."""
        return int(self.settings["subset"] or data.get(self.settings["data"]).counts["train"])

    @property
    def seconds(self) -> float:
        """Seconds per epoch of training alone, without epochs that warm up if there are others."""
        warm = [epoch.seconds for epoch in self.epochs if not epoch.warm_up]
        return fmean(warm) if warm else min(epoch.seconds for epoch in self.epochs)

    @property
    def elapsed(self) -> list[float]:
        """Seconds of training until the end of each epoch; one that warms up counts like the others."""
        return list(accumulate(self.seconds if epoch.warm_up else epoch.seconds for epoch in self.epochs))

    def count(self, words: str) -> int:
        """Return how often what begins with `words` was counted in training, such as "adjoint CONVERGED"."""
        counts = (pair for segment in self.segments for pair in segment.get("counts", {}).items())
        return sum(count for name, count in counts if name.startswith(words))


def accuracy_figure(curves: dict[str, Training]) -> Any:
    """Return a figure of clean test accuracy against epochs and against seconds, one curve per training."""
    figure, (by_epoch, by_second) = panels(2)
    for name, one in curves.items():
        accuracy = [100 * point.clean.accuracy for point in one.test]
        by_epoch.plot([point.epoch for point in one.test], accuracy, marker=".", label=name)
        elapsed = dict(zip((epoch.epoch for epoch in one.epochs), one.elapsed, strict=True))
        by_second.plot([elapsed[point.epoch] for point in one.test], accuracy, marker=".")
    by_epoch.set(xlabel="epoch", ylabel="test accuracy, % (clean protocol)")
    by_second.set(xlabel="seconds of training")
    by_epoch.legend(fontsize="small")
    return figure


def trained(jobs: Sequence[Job], options: Options) -> list[Training]:
    """Return the records of jobs; train those that have none, and add them to the records.

    Raises:
        RunError: if a training stopped before its end; the same command resumes it.
    """
    known = _known(jobs, options.records)
    missing = [job for job in jobs if job.name not in known]
    if missing:
        if not train(missing, options):
            raise RunError("a training stopped before its end; run the same command again to resume it")
        collect(options.runs, options.records, only={job.name for job in missing})
        known = _known(jobs, options.records)
    return [known[job.name] for job in jobs]


def _known(jobs: Sequence[Job], folder: Path) -> dict[str, Training]:
    files = {file_of(job.name) for job in jobs}
    return {one.job: one for name in sorted(files) for one in codec.read(Training, folder / name)}


def file_of(job: str) -> str:
    """Return the name of the file that holds the record of a job."""
    study = job.partition("-")[0]
    return f"{study if study in FILES else 'trainings'}.jsonl"


def collect(runs: Path, folder: Path, only: set[str] | None = None) -> list[str]:
    """Write one line per finished run under `runs` to the records in `folder`; return the names of the runs.

    Lines of other runs are kept. A finished run is never replaced by another one of the same name: a rerun is
    another sample, so give it another name.
    """
    found = [line for line in _finished(runs) if only is None or line["job"] in only]
    for name in sorted({file_of(line["job"]) for line in found}):
        out = folder / name
        kept = {line["job"]: line for line in codec.read_lines(out)}
        for line in (line for line in found if file_of(line["job"]) == name):
            job = line["job"]
            if job in kept and kept[job]["segments"] != line["segments"]:
                raise RunError(f"{out} has another run of the name {job}; rename the folder of the new one")
            kept[job] = line
        codec.write_lines(out, (kept[job] for job in sorted(kept)))
    return [line["job"] for line in found]


def _finished(runs: Path) -> Iterator[dict[str, Any]]:
    for folder in sorted(path.parent for path in runs.glob(f"*/{FINAL}")):
        yield {
            "job": folder.name,
            "settings": unsigned(json.loads((folder / "settings.json").read_text(encoding="utf-8"))),
            "segments": codec.read_lines(folder / SEGMENTS),
            "final": json.loads((folder / FINAL).read_text(encoding="utf-8")),
            "test": _rounded(codec.read_lines(folder / TEST)),
            "contraction": _rounded(codec.read_lines(folder / CONTRACTION)),
            "epochs": _rounded([unsigned(line) for line in codec.read_lines(folder / "metrics.jsonl")]),
        }


def _rounded(value: Any) -> Any:
    """Return the value with six significant digits, which is more than any of these numbers is known to."""
    return json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.6g}"))
