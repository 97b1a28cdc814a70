"""The jobs of the training-step benchmark, in the order in which they are run, and what a job needs to know.

A job is one process: one contender at one point in one precision. The first process of a contender tries every
precision of the point; the others use the fastest that met the tolerance. A job that has a record is not repeated,
unless it failed at another commit.
"""

import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import CONTENDERS, Setting
from benchmarks.libraries import has_torchdeq
from benchmarks.points import OWN_POINTS, PAPER_POINTS, POINTS, RIVAL_POINTS, Point
from benchmarks.processes import Record

ENOUGH = 0.95  # the share of steps that must meet the tolerance for a precision to count
MAIN = ("banach-fast", "explicit-fast", "plain", "torchdeq", "banach-eager", "plain-tuned", "torchdeq-tuned")
ALL = (*MAIN, "plain-graphs")
EAGER_AND_CAPTURED = ("banach-eager", "banach-captured")
# Study, points, contenders, processes (of a curve: seeds).
PLAN: tuple[tuple[str, tuple[str, ...], tuple[str, ...], int], ...] = (
    *(("step", (name,), ALL, 3) for name in OWN_POINTS),
    ("step", ("transformer-8",), ("banach-fast", "explicit-fast"), 3),
    ("per-step", ("transformer",), ("banach-fast",), 3),
    ("prediction", ("transformer",), ("banach-fast", "plain", "plain-tuned", "plain-graphs"), 3),
    ("depth", OWN_POINTS, ("banach-captured",), 1),
    *(("step", (name,), ALL, 3) for name in PAPER_POINTS),
    ("step", ("svhn100-trained",), ALL, 3),
    ("gradients", (*OWN_POINTS, *PAPER_POINTS[:3]), ("plain", "torchdeq", "banach-eager", "banach-fast"), 1),
    ("curve", ("transformer", "cifar100"), EAGER_AND_CAPTURED, 3),
    ("prediction", ("cifar512",), ("banach-fast", "explicit-fast", "plain", "plain-tuned"), 3),
    ("step", PAPER_POINTS, ("authors", "banach-captured"), 3),
    ("step", RIVAL_POINTS, ("exact-eager", "exact-captured", "jfb-captured", "jfb-fast"), 3),
)
TIMED = ("step", "per-step", "prediction")  # these take turns on the device


@dataclass(frozen=True)
class Settings:
    """How the jobs are run."""

    seconds: float = 500.0  # start no wave of processes that would end after this
    only: tuple[str, ...] = ()  # beginnings of job names, such as step/mlp; empty: all
    processes: int = 3  # per contender, at most as many as PLAN says
    at_once: int = 16  # processes that prepare at the same time
    steps: int = 50  # timed ones per process, fewer if they take more than `most` seconds
    most: float = 2.5
    settle: int = 8  # steps before the first timed one
    depth_steps: int = 500
    curve_steps: int = 300
    batches: tuple[int, ...] = (1, 64, 1024)  # of predictions
    compile: bool = True
    quick: bool = False
    device: str = "cuda"
    data_dir: Path | None = None
    out: Path = Path("results/gpu")  # of the records
    work: Path = Path("build/benchmarks")  # of trained weights and of what was compiled

    @property
    def records(self) -> Path:
        return self.out / "training-step.jsonl"

    def point(self, name: str) -> Point:
        return POINTS[name].tiny() if self.quick else POINTS[name]

    def start(self, point: str) -> Path:
        """Return the file of the weights from which all contenders go on."""
        return self.work / f"start-{point}{'-quick' if self.quick else ''}.pt"


@dataclass(frozen=True)
class Job:
    """One process of a study. `number` is that of the process, or the seed of a curve."""

    study: str
    point: str
    contender: str
    precision: str
    number: int = 0

    @property
    def name(self) -> str:
        return "/".join(map(str, (self.study, self.point, self.contender, self.precision, self.number)))

    def setting(self, settings: Settings, **changes: Any) -> Setting:
        given = {"compile": settings.compile, **changes}
        return Setting(settings.point(self.point), self.precision, torch.device(settings.device), **given)

    def command(self, settings: Settings) -> list[str]:
        """Return the command of the process; its locks are added as further arguments."""
        return [sys.executable, "-m", "benchmarks.training_step", pickle.dumps((self, settings)).hex()]


def next_jobs(records: list[Record], settings: Settings, commit: str | None) -> list[Job]:
    """Return the jobs of the next wave: starts that are missing first, then timed ones or others, not both."""
    failed = {one["job"] for one in records if "error" in one and one["commit"] == commit}
    done = {one["job"] for one in records if "error" not in one} | failed
    pending = [job for job in _jobs(records, settings) if job.name not in done]
    first = {name: settings.point(name).precision or "fp32" for name in POINTS}
    starts = {job: Job("start", job.point, "banach-eager", first[job.point]) for job in pending}
    # A start is its file, which a fresh machine does not have, and not its record.
    missing = [one for one in dict.fromkeys(starts.values()) if not settings.start(one.point).exists()]
    lost = [one for one in missing if one.name in failed]
    wave = [one for one in missing if one not in lost] or [job for job in pending if starts[job] not in lost]
    return [job for job in wave if (job.study in TIMED) == (wave[0].study in TIMED)][: settings.at_once]


def unknown_name(settings: Settings) -> str | None:
    """Return an entry of `only` with which no job begins, None if there is none."""
    names = [job.name for job in _jobs([], replace(settings, only=()))]
    return next((one for one in settings.only if not any(name.startswith(one) for name in names)), None)


def _jobs(records: list[Record], settings: Settings) -> Iterator[Job]:
    """Yield all jobs that can run now."""
    for study, points, contenders, processes in PLAN:
        for point, number, name in product(points, range(min(processes, settings.processes)), contenders):
            for precision in _precisions(Job(study, point, name, "", number), records, settings):
                job = Job(study, point, name, precision, number)
                if not settings.only or job.name.startswith(settings.only):
                    yield job


def _precisions(job: Job, records: list[Record], settings: Settings) -> tuple[str, ...]:
    """Return the precisions in which a job runs.

    The first timed process tries all that the contender has. Later ones use the fastest that met the tolerance,
    else the fastest; none before all have been tried.
    """
    where, contender = settings.point(job.point), CONTENDERS[job.contender]
    if job.contender.startswith("torchdeq") and not has_torchdeq():
        return ()
    if job.study == "depth":
        return ("fp32",)  # the arithmetic of the eager solve that it is compared with
    if job.study not in TIMED:
        return (where.precision or "bf16",)
    # At a point in fp32 others cannot meet eps. Elsewhere fp32 is not tried: TF32 launches the same kernels.
    one_only = where.precision and (contender.fast or where.precision == "fp32")
    tried = (str(where.precision),) if one_only else ("tf32", "bf16")
    if job.number == 0:
        return tried
    same = {"study": job.study, "point": job.point, "contender": job.contender, "number": 0}
    first = [one for one in records if same.items() <= one.items()]
    measured = [one for one in first if "error" not in one]
    if not measured or len({one["precision"] for one in first}) < len(tried):
        return ()
    best = min(measured, key=lambda one: (one["met"] is not None and one["met"] < ENOUGH, one["ms"]))
    return (best["precision"],)
