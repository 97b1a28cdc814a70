"""Networks trained by JFB match explicit networks of the same size and outperform other implicit networks.

The paper's first table. Settings are those of the released code, on all training images; CIFAR-10 and ResNet-56 in
bf16. Clean protocol: eval mode, clean test images, last epoch, fp32. Released protocol: training mode, best
evaluated epoch on the test set, on CIFAR-10 with augmented test images. Runs of one group and length count
together, whenever they were made. Runs with our own settings ("decayed") are never a verdict on the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from banach import models
from reproduction.intervals import UNTESTED, Interval, verdict
from reproduction.jobs import Job
from reproduction.study import Options, panels, table
from reproduction.trainings import Training, trained

RECORDS = "trainings.jsonl"
Row = Training
KINDS = {"jfb": "JFB", "twin": "explicit twin"}
PAPER = {"mnist-jfb": 99.4, "mnist-jfb-printed": 99.4, "mnist-twin": 99.4, "svhn-jfb": 94.1, "svhn-twin": 93.7}
PAPER |= {"cifar10-jfb": 93.7, "resnet56": 93.0}
OURS = [f"{data}-{kind}-decayed" for data in ("mnist", "svhn") for kind in KINDS]  # our settings
GROUPS = [*PAPER, "cifar10-twin", *OURS, *(f"digits-{kind}" for kind in KINDS)]
GAINS = {data: (f"{data}-jfb", f"{data}-twin") for data in ("mnist", "svhn")}
GAINS |= {"cifar10": ("cifar10-jfb", "resnet56"), "cifar10-twin": ("cifar10-jfb", "cifar10-twin")}
GAINS |= {f"{data}-decayed": (f"{data}-jfb-decayed", f"{data}-twin-decayed") for data in ("mnist", "svhn")}


def _pair(name: str, seeds: int, ending: str = "", **fields: Any) -> list[Job]:
    """Return jobs for the JFB network and its explicit twin, for each seed."""
    fields = {"data": name, "model": name, "recipe": "released", **fields}
    return [
        Job(name=f"{name}-{kind}{ending}-seed{seed}", seed=seed, explicit=kind == "twin", **fields)
        for kind in KINDS
        for seed in range(seeds)
    ]


_MNIST: dict[str, Any] = {"data": "mnist", "model": "mnist", "recipe": "paper"}
_HE: dict[str, Any] = {"data": "cifar10", "model": "resnet56", "recipe": "he", "augment": "flip+crop:4"}
QUICK = _pair("digits", 2, recipe=None, epochs=4)
JOBS = [
    *_pair("cifar10", 3, precision="bf16", augment="paper", evaluate_every=5),
    *_pair("svhn", 3, evaluate_every=5),
    *_pair("mnist", 5),
    *(Job(name=f"mnist-jfb-printed-seed{seed}", seed=seed, **_MNIST) for seed in range(5)),
    *(Job(name=f"resnet56-seed{s}", seed=s, precision="bf16", evaluate_every=5, **_HE) for s in range(3)),
    *_pair("mnist", 3, "-decayed", recipe="decayed"),
    *_pair("svhn", 3, "-decayed", recipe="decayed", augment="crop:2"),
]


def run(options: Options) -> list[Training]:
    """Train what the records lack."""
    return trained(QUICK if options.quick else JOBS, options)


@dataclass(frozen=True)
class Group:
    """The runs of one group that have the same length."""

    name: str
    runs: Sequence[Training]

    @property
    def epochs(self) -> int:
        return int(self.runs[0].settings["epochs"])

    @property
    def recipe_epochs(self) -> int:
        settings = self.runs[0].settings
        return models.recipe(settings["model"], settings["recipe"]).epochs

    @property
    def full(self) -> bool:
        return self.epochs >= self.recipe_epochs

    @property
    def clean(self) -> Interval:
        return Interval.of(run.clean for run in self.runs)

    @property
    def released(self) -> Interval | None:
        found = [run.released for run in self.runs if run.released is not None]
        return Interval.of(found) if found else None

    def judge(self, ours: Interval | None, printed: float) -> str:
        """Return the verdict on a printed value, and for a single full-length run that it is one."""
        alone = self.full and ours is not None and ours.count == 1
        return verdict(ours, printed, full=self.full) + (" (one seed, full length)" if alone else "")


def groups(rows: Sequence[Training]) -> list[Group]:
    """Return one entry per group and length, the shorter ones of a group first."""
    found: dict[tuple[int, int], list[Training]] = {}
    for row in (row for row in rows if row.group in GROUPS):
        found.setdefault((GROUPS.index(row.group), row.settings["epochs"]), []).append(row)
    return [Group(GROUPS[key[0]], found[key]) for key in sorted(found)]


def values(rows: Sequence[Training]) -> dict[str, Any]:
    """Return by group and gain: paper, clean, n, length and verdict of the longest runs; tables; the monitor."""
    longest = {group.name: group for group in groups(rows)}
    found: dict[str, Any] = {"table": _table(groups(rows)), "runs": _runs(rows), "count": len(rows)}
    for name in GROUPS:
        group, printed = longest.get(name), PAPER.get(name, math.nan)
        found |= _shown(name, group, group.clean if group else None, printed)
        released = group.released if group else None
        found[f"{name}.released"] = released or "-"
        found[f"{name}.released_verdict"] = group.judge(released, printed) if group else UNTESTED
        found[f"{name}.depth"] = fmean(run.final.clean.depth or 0.0 for run in group.runs) if group else "-"
    for name, (jfb, other) in GAINS.items():
        a, b = longest.get(jfb), longest.get(other)
        ours = a.clean.minus(b.clean) if a and b and a.full == b.full else None  # never short against full
        printed = PAPER.get(jfb, math.nan) - PAPER.get(other, math.nan)
        shorter = min((a, b), key=lambda one: one.epochs / one.recipe_epochs) if a and b else None
        found |= _shown(f"{name}-gain", shorter, ours, round(printed, 1), "+")
    return found | _monitor(rows)


def _shown(key: str, group: Group | None, ours: Interval | None, printed: float, sign: str = "") -> dict[str, Any]:
    return {
        f"{key}.paper": "-" if math.isnan(printed) else f"{printed:{sign}.1f}",
        f"{key}.clean": f"{ours:{sign}.2f}" if ours else "-",
        f"{key}.n": ours.count if ours else 0,
        f"{key}.length": f"{group.epochs} of {group.recipe_epochs}" if group else "-",
        f"{key}.verdict": "-" if math.isnan(printed) else group.judge(ours, printed) if group else UNTESTED,
    }


def _monitor(rows: Sequence[Training]) -> dict[str, Any]:
    """Return how often the contraction monitor fires after full-length runs: images with sigma_max >= 1."""
    last = [row.contraction[-1] for group in groups(rows) if group.full for row in group.runs if row.contraction]
    fired, images = sum(one["eval"]["violations"] for one in last), sum(one["images"] for one in last)
    return {"monitor.fired": fired, "monitor.images": images}


def _table(made: Sequence[Group]) -> str:
    columns = "group|data|parameters|epochs|paper|clean %|clean % at 1e-4|released %|missed eps|largest residual"
    lines = []
    for one in made:
        finals, printed = [run.final for run in one.runs], PAPER.get(one.name)
        fine = [100 * final.fine.accuracy for final in finals if final.fine]
        met = [final.clean.converged for final in finals if final.clean.converged is not None]
        residual = max((final.clean.max_residual or 0.0 for final in finals), default=0.0)
        lines.append((
            one.name, finals[0].test, finals[0].parameters, f"{one.epochs} of {one.recipe_epochs}",
            printed, one.clean, Interval.of(fine) if fine else None, one.released,
            f"{100 - 100 * min(met):.2g}%" if met else None, residual or None,
            fmean(run.seconds for run in one.runs), one.judge(one.clean, printed) if printed else "-",
        ))  # fmt: skip
    return table(lines, [*columns.split("|"), "s per epoch", "verdict"])


def _runs(rows: Sequence[Training]) -> str:
    """Return one line per run: what the intervals are made of, and where it was trained."""
    columns = ("run", "epochs", "clean %", "released %", "device", "torch", "commit", "segments")
    lines = []
    for row in sorted(rows, key=lambda row: row.job):
        last, best = row.segments[-1], row.released
        scores = f"{row.clean:.2f}", None if best is None else f"{best:.2f}"
        place = last["device"], last["torch"], (last["commit"] or "unknown")[:7], len(row.segments)
        lines.append((row.job, row.settings["epochs"], *scores, *place))
    return table(lines, columns)


def figures(rows: Sequence[Training]) -> dict[str, Any]:
    """Draw the learning curves of the longest runs: mean over runs, band from least to largest."""
    longest = {group.name: group for group in groups(rows)}
    names = [name for name in ("mnist", "svhn", "cifar10", "digits") if f"{name}-jfb" in longest]
    figure, axes = panels(len(names), width=4.2)
    for one, name in zip(axes, names, strict=True):
        for kind, label in KINDS.items():
            if f"{name}-{kind}" in longest:
                _curve(one, longest[f"{name}-{kind}"].runs, label)
        if f"{name}-jfb" in PAPER:
            one.axhline(
                PAPER[f"{name}-jfb"], color="black", linewidth=0.8, linestyle=":", label="JFB in the paper"
            )
        one.set(title=name, xlabel="epoch", xscale="log")
        one.legend(fontsize="small", loc="lower right")
    axes[0].set_ylabel("test accuracy, % (clean protocol)")
    return {"table1": figure}


def _curve(axes: Any, runs: Sequence[Training], label: str) -> None:
    curves = [{point.epoch: 100 * point.clean.accuracy for point in run.test} for run in runs]
    epochs = sorted(set.intersection(*(set(curve) for curve in curves)))
    some = [[curve[epoch] for curve in curves] for epoch in epochs]
    (line,) = axes.plot(epochs, [fmean(one) for one in some], linewidth=1, label=f"{label} ({len(runs)} runs)")
    axes.fill_between(epochs, [min(o) for o in some], [max(o) for o in some], alpha=0.25, color=line.get_color())
    axes.set_ylim(bottom=min(fmean(one) for one in some[len(some) // 5 :]) - 2)
