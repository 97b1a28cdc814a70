"""Neural ODEs, monotone operator networks (MON) and multiscale DEQs, by their own recipes and by a common one.

The other implicit networks of the first table, trained by the same command as ours. MON and multiscale DEQ are
also trained by JFB, which their authors did not do. "exact" solves the adjoint equation, for MON by the network's
splitting, for the multiscale DEQ by Broyden's method as its authors did.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from banach import models
from reproduction.jobs import Job, settings
from reproduction.study import Interval, percent, table
from reproduction.table1 import PAPER, PUBLISHED, TITLES, is_ours
from reproduction.trainings import Training, learning_curves, of_groups, runs_table, trained

EXACT = "implicit:picard:1e-2:300"  # as MON's own recipe
TF32 = {"precision": "tf32"}  # PyTorch's default for convolutions
DAMPED = {"solver": "picard:0.5", "compile": True, **TF32}
LARGE = {**DAMPED, "precision": "bf16", "epochs": 100, "pretrain": 3_000}  # planned for 25 minutes
OWN: dict[tuple[str, str, str], dict[str, Any]] = {  # data, model, gradient -> changes of the model's own recipe
    ("mnist", "mon-fc", "jfb"): {"backward": "jfb"},
    ("mnist", "mon-fc", "neumann2"): {"backward": "neumann:2"},
    ("mnist", "mon-fc", "exact"): {},
    ("mnist", "mon", "jfb"): {"backward": "jfb"},
    ("mnist", "mon", "exact"): {},
    ("svhn", "mon-tiers", "jfb"): {"backward": "jfb", **TF32},
    ("svhn", "mon-tiers", "neumann2"): {"backward": "neumann:2", **TF32},
    ("svhn", "mon-tiers", "exact"): TF32,
    ("mnist", "anode", ""): TF32,
    ("mnist", "node", ""): TF32,
    ("svhn", "anode", ""): TF32,
    ("svhn", "node", ""): TF32,
    ("cifar10", "mdeq-tiny", "jfb"): {"backward": "jfb", **DAMPED},
    ("cifar10", "mdeq-tiny", "exact"): DAMPED,
    ("cifar10", "mon-large", "jfb"): {"backward": "jfb", **TF32},
    ("cifar10", "mdeq", "jfb"): {"backward": "jfb", **LARGE},
}
PAIRED = {"mnist": "mon", "svhn": "mon-tiers", "cifar10": "mdeq-tiny"}  # JFB against the exact gradient
SEEDS = {"mon-fc": 10}  # a minute each on a CPU; three of the others
_CHANGES: dict[str, dict[str, Any]] = {"twin": {"max_steps": 0}, "exact": {"backward": EXACT}}
COMMON: dict[tuple[str, str, str], dict[str, Any]] = {  # changes of the recipe for all; our networks come first
    (data, model, gradient): _CHANGES.get(gradient, {})
    for data in ("mnist", "svhn")
    for model, gradients in {data: ("jfb", "twin"), PAIRED[data]: ("jfb", "exact"), "anode": ("",)}.items()
    for gradient in gradients
}

COLUMNS = "data|model|gradient|epochs|clean %|paper|published|MACs|evaluations|J-products|met eps|cosine of JFB"
COLUMNS += "|ms per step|peak MB"


def _name(data: str, model: str, gradient: str, recipe: str) -> str:
    return "-".join(part for part in (data, model, gradient, recipe.removeprefix("own")) if part)


def _job(key: tuple[str, str, str], recipe: str, seed: int, **changes: Any) -> Job:
    """Return a job. The paper's networks have no common recipe of their own: they take that of MON."""
    data, model, _ = key
    known = models.get(model).recipes
    augment = known[recipe].augment if data == "cifar10" else None
    made = settings(data, model if recipe in known else "mon", recipe, augment=augment, seed=seed, **changes)
    name = f"{_name(*key, recipe)}-seed{seed}"
    return Job(name=name, settings=replace(made, model=model), evaluate_every=5)  # two test sets take an epoch


QUICK = [_job(("digits", "mon", "jfb"), "common", 0, epochs=1, subset=256)]
JOBS = [_job(key, "own", seed, **changes) for key, changes in OWN.items() for seed in range(SEEDS.get(key[1], 3))]
JOBS += [_job(key, "common", seed, **TF32, **changes) for key, changes in COMMON.items() for seed in range(3)]
RECORDS, Row, run = "trainings.jsonl", Training, partial(trained, JOBS, QUICK)


def values(rows: Sequence[Training]) -> dict[str, Any]:
    """Return tables of the models' own recipes, of the common one and of both, and the figure if there is one."""
    own = [line for key in OWN for line in _lines(rows, *key, "own")]
    common = [line for key in [*COMMON, ("digits", "mon", "jfb")] for line in _lines(rows, *key, "common")]
    shown = "![JFB against the exact gradient](rivals.svg)" if _pairs(rows) else "No pair is trained yet."
    tables = {"table": [*own, *common], "own": own, "common": common}
    gains = []
    for title, pair in _pairs(rows).items():
        *cheap, (_, exact) = [(label, Interval.of(run.clean for run in runs)) for label, runs in pair.items()]
        gains += [(title, label, one, exact, f"{one.minus(exact):+.2f}") for label, one in cheap]
    return {name: table(lines, COLUMNS) for name, lines in tables.items()} | {
        "figure": shown,
        "runs": runs_table(row for row in rows if not is_ours(row)),
        "gains": table(gains, "network|gradient|clean %|exact gradient, clean %|difference"),
    }


def _lines(rows: Sequence[Training], data: str, model: str, gradient: str, recipe: str) -> list[tuple[Any, ...]]:
    """Return the line of one group, an empty list without runs."""
    name = _name(data, model, gradient, recipe)
    runs = [run for run in rows if run.group == name and run.final]
    if not runs:
        return []
    one, last = runs[0], runs[0].epochs[-1]
    steps = math.ceil(one.images / one.settings["batch_size"])
    return [(
        TITLES[data], model, gradient or "adjoint", one.reached, Interval.of(run.clean for run in runs),
        PAPER.get(name), PUBLISHED.get(name), one.final and one.final.macs, last.depth, last.products / one.images,
        percent(run.scores.converged for run in runs),
        one.contraction[-1].get("cosine") if one.contraction else None, 1e3 * one.seconds / steps,
        last.memory and last.memory / 1e6,
    )]  # fmt: skip


def _pairs(rows: Sequence[Training]) -> dict[str, dict[str, list[Training]]]:
    """Return by title the finished runs by cheap gradients and, last, the exact one, where there are both."""
    kinds = {"JFB": "jfb", "Neumann(2)": "neumann2", "exact gradient": "exact"}
    full = [row for row in rows if row.final]
    found = {
        f"{TITLES[data]}, {model}": of_groups(full, {label: f"{data}-{model}-{k}" for label, k in kinds.items()})
        for data, model in (("mnist", "mon-fc"), *PAIRED.items())
    }
    return {title: runs for title, runs in found.items() if len(runs) > 1 and "exact gradient" in runs}


def figures(rows: Sequence[Training]) -> dict[str, Any]:
    """Draw accuracy against epochs for JFB and the exact gradient, where both are trained: the GPU was shared."""
    return {"rivals": learning_curves(shown, time=False)} if (shown := _pairs(rows)) else {}
