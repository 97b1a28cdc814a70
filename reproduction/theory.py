"""T contracts, I - J is coercive, and where kappa(M'M) <= 1/gamma JFB is a descent direction, also near u*.

The paper's Assumptions, Lemma, Theorem and Corollary, measured over training: on the weight snapshots of runs by
`python -m reproduction train`, and on training images, since JFB is to lower their loss (see theory_measure.py).
A snapshot takes minutes on a CPU and is recorded at once. Slips in the proofs are in pages/theory.md, with a test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file

from banach import data
from reproduction import codec, jobs
from reproduction.intervals import NOT_REPRODUCED, REPRODUCED, Claim
from reproduction.rundir import SNAPSHOTS, snapshot
from reproduction.study import Options, draw_band, panels, store, table
from reproduction.table1 import TITLES
from reproduction.theory_measure import Cases, measure
from reproduction.train import train

RECORDS = "theory.jsonl"
RUNS = tuple(f"{name}-jfb-seed0" for name in ("mnist", "svhn", "cifar10"))
QUICK, CPU = "digits-jfb-seed0", torch.device("cpu")
_COSINE = "cosine of JFB with the exact gradient"
STATEMENTS = {  # key of the measured cases -> text and condition
    "sigma": ("sigma_max(dT/du), eval mode", "< 1"),
    "rate": ("observed rate, eval mode", "< 1"),
    "training.sigma": ("sigma_max(dT/du), training mode", "< 1"),
    "training.rate": ("observed rate, training mode", "< 1"),
    "L": ("sigma_max(dT/dd), eval mode", "finite"),
    "cosine": (f"{_COSINE}, where the solver stops", "> 0"),
    "exact.cosine": (f"{_COSINE}, at u*", "> 0"),
    "training.cosine": (f"{_COSINE}, training mode", "> 0"),
    "image.cosine": (f"{_COSINE}, single images", "> 0"),
    "lemma": ("coercivity of I - J, gamma < 1", ">= 1 - gamma"),
    "beyond": ("coercivity of I - J, gamma >= 1", "none"),
    "kappa": ("kappa(M'M), at least", "<= 1/gamma"),
    "rank": ("dependent columns of M, eval mode", "0"),
    "training.rank": ("dependent columns of M, R in training mode", "0"),
    "own": ("|u - u*| / |u*| where the solver stops", "none"),
    "radius": ("|u - u*| / |u*| with 10% of the descent left", "> 0"),
}
DRAWN = (
    ("sigma", "sigma_max(dT/du)", "C3"),
    ("rate", "observed rate", "C0"),
    ("cosine", "cosine of JFB with the gradient", "C2"),
)


@dataclass(frozen=True)
class Facts:
    """On one statement: the mean at the last epoch; the range, and how many cases hold, after epoch 0."""

    last: float
    low: float
    high: float
    held: int
    count: int

    @staticmethod
    def of(trained: Cases, last: Cases = Cases()) -> Facts:
        """Return the facts on the cases of trained snapshots, and of the last one."""
        low, high = (f(trained.values, default=math.nan) for f in (min, max))
        return Facts(fmean(last.values or [math.nan]), low, high, sum(trained.held), len(trained.held))


@dataclass(frozen=True)
class Row:
    """One snapshot of a run. `length`: epochs of a complete training. `images` were measured."""

    run: str
    model: str
    epoch: int
    length: int
    images: int
    measured: dict[str, Cases]


def run(options: Options) -> list[Row]:
    """Measure the snapshots below `options.runs` that have no record yet; quick: train and measure digits."""
    path, names = options.records / RECORDS, (QUICK,) if options.quick else RUNS
    if options.quick:
        train([jobs.get(QUICK)], options)
    known = {(row.run, row.epoch) for row in codec.read(Row, path)}
    for job in map(jobs.get, names):
        for epoch in _epochs(job, options):
            if (job.name, epoch) not in known:
                options.say(f"{job.name}: measuring epoch {epoch}")
                store(path, [_measured(job, epoch, options)], CPU, append=True)
    return codec.read(Row, path)


def _epochs(job: jobs.Job, options: Options) -> list[int]:
    """Return the epochs whose weights are known: 0 and those of the snapshots; quick: the first and the last."""
    files = sorted((options.runs / job.name / SNAPSHOTS).glob("epoch-*.safetensors"))
    epochs = [int(file.stem.removeprefix("epoch-")) for file in files]
    if not epochs:
        options.say(f"{job.name}: no snapshots in {options.runs}; run `python -m reproduction train {job.name}`")
        return []
    return [0, epochs[-1]] if options.quick else [0, *epochs]


def _measured(job: jobs.Job, epoch: int, options: Options) -> Row:
    images, dense = (8, 1) if options.quick else (32, 2)
    net = job.build()
    if epoch:
        net.load_state_dict(load_file(snapshot(options.runs / job.name, epoch)))
    few = data.load(str(job.settings.data), "train+validation", options.data_dir).take(range(images))
    d, smoothing = few.normalise(few.pixels).double(), job.settings.label_smoothing
    numbers = measure(net, d, few.labels, dense=dense, smoothing=smoothing)
    return Row(job.name, str(job.settings.model), epoch, job.settings.epochs, images, numbers)


def shown(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return for each network the rows of the run with the most epochs, by epoch; digits only if alone."""
    found: dict[str, list[Row]] = {}
    for model in [model for model in TITLES if any(row.model == model for row in rows)]:
        name = max((row for row in rows if row.model == model), key=lambda row: row.epoch).run
        found[model] = sorted((row for row in rows if row.run == name), key=lambda row: row.epoch)
    return {model: some for model, some in found.items() if model != "digits" or len(found) == 1}


def values(rows: Sequence[Row]) -> dict[str, Any]:
    """Return `Facts` on every statement by MODEL.STATEMENT and all.STATEMENT, the claim and the table."""
    found: dict[str, Any] = {}
    everywhere: dict[str, list[Cases]] = {}
    lines = []
    for model, mine in shown(rows).items():
        found |= {f"{model}.{key}": getattr(mine[-1], key) for key in ("run", "epoch", "length", "images")}
        for key, words in STATEMENTS.items():
            per_epoch = {row.epoch: row.measured.get(key, Cases()) for row in mine}
            trained = Cases.joined(some for epoch, some in per_epoch.items() if epoch)
            everywhere.setdefault(key, []).append(trained)
            first, last = per_epoch.get(0, Cases()), per_epoch[mine[-1].epoch]
            facts = found[f"{model}.{key}"] = Facts.of(trained, last)
            held = f"{facts.held} of {facts.count}" if facts.count else None
            lines += [[model, *words, _range(first), _range(last), held]] if first.values or last.values else []
    found |= {f"all.{key}": Facts.of(Cases.joined(some)) for key, some in everywhere.items()}
    found |= {"claim": _claim(found["all.cosine"])} if everywhere else {}
    return found | {"table": table(lines, "network|statement|condition|epoch 0|last epoch|holds after training")}


def _claim(facts: Facts) -> Claim:
    """Return the claim that JFB descends on every batch: one counterexample is enough against it."""
    verdict = REPRODUCED if facts.held == facts.count else NOT_REPRODUCED
    return Claim("always", f"{facts.held} of {facts.count}", facts.count, "over training", verdict)


def _range(cases: Cases) -> str | None:
    if not cases.values:
        return None
    mean, low, high = (f"{f(cases.values):.3g}" for f in (fmean, min, max))
    return mean if low == high else f"{mean} ({low} to {high})"


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Draw contraction and cosine over training."""
    runs = shown(rows)
    figure, axes = panels(len(runs), width=4.2)
    for one, (model, mine) in zip(axes, runs.items(), strict=True):
        one.set_xscale("symlog", linthresh=1)
        for key, label, color in DRAWN:
            some = {row.epoch: row.measured.get(key, Cases()).values for row in mine}
            draw_band(one, {epoch: x for epoch, x in some.items() if x}, label, marker=".", color=color)
        one.axhline(1, color="black", linewidth=0.8)
        title = f"{TITLES[model]}, {mine[-1].epoch} of {mine[-1].length} epochs"
        one.set(title=title, xlabel="epoch", ylim=(0, 2.1))
    axes[0].set_ylabel("mean over images, band: range")
    axes[0].legend(fontsize="small")
    return {"theory": figure}
