"""Penalties on the digits network: contraction factor, test-time steps and accuracy, and what training costs.

Claim: the Jacobian penalty with weight 1 lowers the contraction factor to at most .8 and the steps on test images
to at most .85 of those without it, and costs at most .3 points of accuracy. Settings: the recipe's, 3 seeds, test
images. The weight was chosen on validation images of seed 0, among .1, 1 and 10. Result: results/penalty.json.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from banach import data, models
from banach.diagnose import measure_contraction
from banach.train import Settings as Training
from banach.train import evaluate, fit
from benchmarks.results import Benchmark, Figure, Report, Row, Target
from benchmarks.timer import interleaved, ratio

WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "jacobian 0.1": {"jacobian_penalty": 0.1},
    "jacobian 1": {"jacobian_penalty": 1.0},
    "difference 1": {"jacobian_penalty": 1.0, "finite_difference": True},
    "correction 0.5": {"correction": 0.5},
}


@dataclass(frozen=True)
class Settings:
    epochs: int | None = None  # None: the recipe's
    seeds: int = 3
    images: int = 360  # of the test split, on which the contraction is measured
    repeats: int = 15  # of an epoch of training, for its cost
    batches: int = 4  # of 64 images, in such an epoch


def run(settings: Settings) -> Report:
    found = {name: [_trained(way, seed, settings) for seed in range(settings.seeds)] for name, way in WAYS.items()}
    costs = _costs(settings)
    rows: dict[str, Row] = {}
    for name, many in found.items():
        columns = {key: Figure.of(one[key] for one in many) for key in many[0]}
        rows[name] = {"added to the loss": name, **columns, "cost of a step": costs[name]}
    plain, held = rows["none"], rows["jacobian 1"]
    sigma, steps = (held[key].mean / plain[key].mean for key in ("sigma", "steps"))
    targets = [
        Target("contraction factor, of that without a penalty", sigma, 0.8),
        Target("steps on test images, of those without a penalty", steps, 0.85),
        Target("test accuracy lost, in points", plain["accuracy"].mean - held["accuracy"].mean, 0.3),
    ]
    notes = [
        f"mean ± standard deviation over {settings.seeds} seeds; test images, the recipe's tolerance and settings",
        f"sigma: largest singular value of dT/du at u*, eval mode, mean over {settings.images} images",
        "cost: processor time of training steps by fit, relative to those without a penalty from the same weights",
    ]
    return Report(list(rows.values()), targets, notes, details=found)


def _recipe(seed: int, epochs: int | None, way: dict[str, Any]) -> Training:
    given = {"data": "digits", "seed": seed, "monitor": False, "device": "cpu", **way}
    return Training.of_recipe(models.recipe("digits"), **(given if epochs is None else given | {"epochs": epochs}))


def _network(seed: int) -> Any:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return models.build("digits")


def _trained(way: dict[str, Any], seed: int, settings: Settings) -> Row:
    net, test = _network(seed), data.load("digits", "test")
    fit(net, data.load("digits", "train"), None, _recipe(seed, settings.epochs, way))
    totals = evaluate(net, test)
    measured = measure_contraction(net, test.normalise(test.pixels[: settings.images]))
    return {
        "accuracy": 100 * (totals.accuracy or 0.0),
        "steps": totals.depth,
        "sigma": float(measured.sigma.double().mean()),
        "largest sigma": float(measured.sigma.max()),
        "rate": float(measured.rate.double().nanmean()),
    }


def _costs(settings: Settings) -> dict[str, Figure]:
    """Time a few training steps of every way from the weights of a short training."""
    net, train = _network(0), data.load("digits", "train")
    fit(net, train, None, _recipe(0, 2, {}))
    some = train.subset(64 * settings.batches)
    train_copy = lambda recipe: fit(copy.deepcopy(net), some, None, recipe)  # noqa: E731
    actions = {name: partial(train_copy, _recipe(0, 1, way)) for name, way in WAYS.items()}
    seconds = interleaved(actions, settings.repeats)
    return {name: ratio(seconds[name], seconds["none"]) for name in WAYS}


QUICK = Settings(epochs=1, seeds=2, images=64, repeats=1, batches=1)
BENCHMARKS = (Benchmark("penalty", "does a penalty on dT/du save steps?", run, Settings(), QUICK),)
