"""Trainings as typed records: read by the studies, written from run directories by `collect`.

results/reproduction/trainings.jsonl holds one line per run; the runs of table2 and neumann are in files of those
names. Lines hold everything that a run recorded, except weights. A run in work has no `final` yet.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from banach import data, models
from banach.provenance import unsigned
from banach.train import Epoch, RunError
from reproduction.jobs import Job
from reproduction.rundir import CONTRACTION, FINAL, SEGMENTS, TEST
from reproduction.study import Options, draw_band, panels, percent, read, read_lines, table, write_lines
from reproduction.train import train

FILES = ("table2", "neumann")  # studies with a file of their own
Label = TypeVar("Label")


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Test images by one protocol: shares in 0..1, means over images."""

    accuracy: float
    depth: float | None = None
    max_residual: float | None = None
    converged: float | None = None


@dataclass(frozen=True, kw_only=True)
class Point:
    """The test set after one epoch, in the precision of the training. After the last one also in fp32, with more:

    `fine`: the clean protocol at a tolerance of 1e-4. `test`: title of the data set. `parts`: parameters of Q, R
    and S. `macs`: multiplications of one test image that torch counts.
    """

    epoch: int = 0
    clean: Totals
    released: Totals | None = None
    fine: Totals | None = None
    test: str | None = None
    parameters: int | None = None
    parts: dict[str, int] | None = None
    macs: float | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run. `segments`: one entry per process, with machine, versions, sources and warnings.

    `contraction`: sigma_max(dT/du) and rate after some epochs, as `measure.py` writes them.
    """

    job: str
    settings: dict[str, Any]
    segments: tuple[dict[str, Any], ...]
    test: tuple[Point, ...]
    epochs: tuple[Epoch, ...]
    final: Point | None = None
    contraction: tuple[dict[str, Any], ...] = ()

    @property
    def group(self) -> str:
        """The job without its seed, such as "svhn-twin"."""
        return self.job.removeprefix("table1-").rpartition("-seed")[0]

    @property
    def seed(self) -> str:
        return self.job.rpartition("-seed")[2]

    @property
    def reached(self) -> int:
        """The epochs that are done and evaluated."""
        return self.test[-1].epoch

    @property
    def scores(self) -> Totals:
        """The test set by the clean protocol: eval mode, clean images, last epoch, fp32 once it is finished."""
        return (self.final or self.test[-1]).clean

    @property
    def clean(self) -> float:
        """Test accuracy in percent by the clean protocol."""
        return 100 * self.scores.accuracy

    @property
    def fine(self) -> float | None:
        """The same at a tolerance of 1e-4, known once the run is finished."""
        return 100 * self.final.fine.accuracy if self.final and self.final.fine else None

    @property
    def released(self) -> float | None:
        """Test accuracy in percent as the released code reports it: training mode, best evaluated epoch."""
        found = [100 * point.released.accuracy for point in self.test if point.released is not None]
        return max(found, default=None)

    @property
    def protocols(self) -> float | None:
        """The released accuracy minus the clean one."""
        return None if self.released is None else self.released - self.clean

    @property
    def images(self) -> int:
        """Training images per epoch."""
        known = data.get(self.settings["data"])
        held_out = 0 if self.settings["whole"] else known.validation
        return int(self.settings["subset"] or known.counts["train"] - held_out)

    @property
    def seconds(self) -> float:
        """Seconds per epoch of training alone, without epochs that warm up if there are others."""
        warm = [epoch.seconds for epoch in self.epochs if not epoch.warm_up]
        return fmean(warm) if warm else min(epoch.seconds for epoch in self.epochs)

    @property
    def elapsed(self) -> list[float]:
        """Seconds of training until the end of each epoch; one that warms up counts like the others."""
        return list(accumulate(self.seconds if epoch.warm_up else epoch.seconds for epoch in self.epochs))

    @property
    def recipe_epochs(self) -> int:
        return models.recipe(self.settings["model"], self.settings["recipe"]).epochs

    @property
    def full(self) -> bool:
        return self.final is not None and self.reached >= self.recipe_epochs

    @property
    def progress(self) -> str:
        return f"{self.reached} of {self.recipe_epochs} epochs{'' if self.final else ', in work'}"

    @property
    def length(self) -> str:
        return f"{len(self.epochs)} epochs, {self.images:,} images"

    @property
    def solved(self) -> float | None:
        """The share of adjoint equations in training that met the tolerance, None where none was counted."""
        counts: Counter[str] = sum((Counter(segment.get("counts", {})) for segment in self.segments), Counter())
        ended = sum(count for name, count in counts.items() if name.startswith("adjoint "))
        return counts["adjoint CONVERGED"] / ended if ended else None


def of_groups(rows: Sequence[Training], names: Mapping[Label, str]) -> dict[Label, list[Training]]:
    """Return by label the runs of the named groups that have some."""
    found = {label: [row for row in rows if row.group == name] for label, name in names.items()}
    return {label: runs for label, runs in found.items() if runs}


def runs_table(rows: Iterable[Training]) -> str:
    """Return one line per run: what the intervals are made of, and where it was trained."""
    columns = "run|epochs|images|clean %|released %|s per epoch|J-products|adjoints solved|forward depth|met eps"
    lines = []
    for row in sorted(rows, key=lambda row: row.job):
        best, last, made = row.released, row.epochs[-1], row.segments[-1]
        lines.append((
            row.job, row.reached, row.images, f"{row.clean:.2f}", best and f"{best:.2f}", row.seconds,
            last.products / row.images, percent([row.solved]), last.depth, percent([last.converged]),
            made["device"], made["torch"], (made["commit"] or "unknown")[:7], len(row.segments),
        ))  # fmt: skip
    return table(lines, columns + "|device|torch|commit|processes")


def accuracies(runs: Sequence[Training]) -> dict[int, list[float]]:
    """Return the clean test accuracies in percent by epoch, for epochs that all runs evaluated."""
    curves = [{point.epoch: 100 * point.clean.accuracy for point in run.test} for run in runs]
    return {epoch: [curve[epoch] for curve in curves] for epoch in sorted(set.intersection(*map(set, curves)))}


def draw_curve(axes: Any, runs: Sequence[Training], label: str, *, time: bool = False) -> None:
    """Draw clean test accuracy against epochs, or seconds: the mean over runs, and the band of their range."""
    values: dict[float, list[float]] = {}
    for epoch, scores in accuracies(runs).items():
        values[fmean(run.elapsed[epoch - 1] for run in runs) if time else epoch] = scores
    draw_band(axes, values, label, linewidth=1.2, marker="." if len(values) < 25 else "")


def learning_curves(shown: Mapping[str, Mapping[str, Sequence[Training]]], *, time: bool = True) -> Any:
    """Return a figure with panels by title: the accuracy of labelled runs against seconds, or against epochs."""
    figure, axes = panels(len(shown), width=4.2)
    for one, (title, groups) in zip(axes, shown.items(), strict=True):
        for label, runs in groups.items():
            draw_curve(one, runs, f"{label} (n = {len(runs)})", time=time)
        one.set(title=title, xlabel="seconds of training" if time else "epoch")
        one.legend(fontsize="small", loc="lower right")
    axes[0].set_ylabel("test accuracy, % (clean protocol)")
    return figure


def trained(full: Sequence[Job], quick: Sequence[Job], options: Options) -> list[Training]:
    """Return the records of the jobs of a study; train those that have none, and add them to the records."""
    jobs = quick if options.quick else full
    path = options.records / file_of(jobs[0].name)
    known = {row.job: row for row in read(Training, path) if row.final is not None}
    if missing := [job for job in jobs if job.name not in known]:
        if not train(missing, options):
            raise RunError("a training stopped before its end; run the same command again to resume it")
        collect(options.runs, options.records, only={job.name for job in missing})
        known = {row.job: row for row in read(Training, path)}
    return [known[job.name] for job in jobs]


def file_of(job: str) -> str:
    """Return the file of a job's record; all jobs of a study have the same."""
    study = job.partition("-")[0]
    return f"{study if study in FILES else 'trainings'}.jsonl"


def collect(runs: Path, folder: Path, only: set[str] | None = None) -> list[str]:
    """Write one line per run under `runs` to the records in `folder`; return the names of the finished runs.

    Lines of other runs are kept. A run in work replaces its own earlier line, or that of a run whose checkpoint
    was lost, once it has come further. A finished run is never replaced by another one of the same name: a rerun
    is another sample, so give it another name.
    """
    found = [line for line in _recorded(runs) if only is None or line["job"] in only]
    for out in sorted({folder / file_of(line["job"]) for line in found}):
        kept = {line["job"]: line for line in read_lines(out)}
        for line in (line for line in found if folder / file_of(line["job"]) == out):
            before = kept.get(line["job"], line)
            earlier = len(line["epochs"]) < len(before["epochs"])
            if before["segments"] != line["segments"] if before["final"] else earlier:
                raise RunError(f"{out} has another run of the name {line['job']}; rename the folder of this one")
            kept[line["job"]] = line
        write_lines(out, (kept[job] for job in sorted(kept)))
    return [line["job"] for line in found if line["final"]]


def _recorded(runs: Path) -> Iterator[dict[str, Any]]:
    """Return the lines of runs that have been evaluated at least once."""
    for folder in sorted(path.parent for path in runs.glob(f"*/{TEST}") if path.stat().st_size):
        final, segments = folder / FINAL, read_lines(folder / SEGMENTS)
        if not segments:
            raise RunError(f"{folder} has no {SEGMENTS}, which says where it was trained; restore the run")
        yield {
            "job": folder.name,
            "settings": unsigned(json.loads((folder / "settings.json").read_text(encoding="utf-8"))),
            "segments": segments,
            "final": json.loads(final.read_text(encoding="utf-8")) if final.exists() else None,
            "test": _rounded(read_lines(folder / TEST)),
            "contraction": _rounded(read_lines(folder / CONTRACTION)),
            "epochs": _rounded([unsigned(line) for line in read_lines(folder / "metrics.jsonl")]),
        }


def _rounded(value: Any) -> Any:
    """Return the value with six significant digits, which is more than any of these numbers is known to."""
    return json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.6g}"))
