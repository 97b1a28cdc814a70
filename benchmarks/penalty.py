"""Penalties on the digits network: contraction factor, test-time steps and accuracy, and what a step costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from banach import data, models
from banach.diagnose import measure_contraction
from banach.provenance import Summary
from banach.train import Settings as Training
from banach.train import evaluate, fit
from banach.train.penalties import added, observing
from benchmarks.report import Result, Row, Target
from benchmarks.timing import interleaved, ratio

WEIGHT = 1.0  # chosen on the validation images, among 0.1, 1 and 10
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "jacobian 0.1": {"jacobian_penalty": 0.1},
    "jacobian 1": {"jacobian_penalty": WEIGHT},
    "difference 1": {"jacobian_penalty": WEIGHT, "finite_difference": True},
    "correction 0.5": {"correction": 0.5},
}


@dataclass(frozen=True)
class Settings:
    epochs: int | None = None  # None: the recipe's
    seeds: int = 3
    images: int = 360  # of the test split, on which the contraction is measured
    repeats: int = 40  # of a training step, for its cost


QUICK = Settings(epochs=2, seeds=2, images=64, repeats=5)


def run(settings: Settings = Settings()) -> Result:
    found = {name: [_trained(way, seed, settings) for seed in range(settings.seeds)] for name, way in WAYS.items()}
    costs = _costs(settings)
    rows = [_row(name, found[name], costs[name]) for name in WAYS]
    mean = {
        name: {key: Summary.of(one[key] for one in many).mean for key in many[0]} for name, many in found.items()
    }
    plain, held = mean["none"], mean["jacobian 1"]
    targets = [
        Target("contraction factor, of that without a penalty", held["sigma"] / plain["sigma"], 0.8),
        Target("steps on test images, of those without a penalty", held["steps"] / plain["steps"], 0.85),
        Target("test accuracy lost, in points", plain["accuracy"] - held["accuracy"], 0.3),
    ]
    return Result(
        "penalty", "does a penalty on dT/du save steps?", rows, targets, _notes(settings), settings, details=found
    )


def _notes(settings: Settings) -> list[str]:
    return [
        f"mean ± standard deviation over {settings.seeds} seeds; test images, the recipe's tolerance and settings",
        f"sigma: largest singular value of dT/du at u*, eval mode, mean over {settings.images} images",
        "cost: processor time of a training step, relative to one without a penalty from the same weights",
        "the test set chose nothing: the weight 1 was chosen on validation images of seed 0",
    ]


def _recipe(way: dict[str, Any], seed: int, settings: Settings) -> Training:
    given = {} if settings.epochs is None else {"epochs": settings.epochs}
    recipe = models.recipe("digits")
    return Training.of_recipe(recipe, data="digits", seed=seed, monitor=False, device="cpu", **given, **way)


def _network(seed: int) -> Any:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return models.build("digits")


def _trained(way: dict[str, Any], seed: int, settings: Settings) -> Row:
    net = _network(seed)
    fit(net, data.load("digits", "train"), None, _recipe(way, seed, settings))
    test = data.load("digits", "test")
    totals = evaluate(net, test)
    measured = measure_contraction(net, test.normalise(test.pixels[: settings.images]))
    return {
        "accuracy": 100 * totals.accuracy,
        "steps": totals.depth,
        "sigma": float(measured.sigma.double().mean()),
        "largest sigma": float(measured.sigma.max()),
        "rate": float(measured.rate.double().nanmean()),
    }


def _costs(settings: Settings) -> dict[str, Summary]:
    """A training step of every way from the weights of a short training, relative to that without a penalty."""
    net, train = _network(0), data.load("digits", "train")
    fit(net, train, None, _recipe({"epochs": 2}, 0, Settings()))
    net.train()
    x, y = train.normalise(train.pixels[:64]), train.labels[:64]
    actions = {name: _step(net, x, y, _recipe(way, 0, settings)) for name, way in WAYS.items()}
    seconds = interleaved(actions, settings.repeats)
    return {name: ratio(seconds[name], seconds["none"]) for name in WAYS}


def _step(net: Any, x: torch.Tensor, y: torch.Tensor, recipe: Training) -> Callable[[], None]:
    """Forward, what is added, backward, as `fit` has it; the optimizer is left out, so that the weights stay."""

    def loss(output: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, y, label_smoothing=recipe.label_smoothing)

    def step() -> None:
        net.zero_grad()
        with observing(net, recipe) as seen:
            total = loss(net(x))
        (total if seen is None else total + added(seen, recipe, loss)).backward()

    return step


def _row(name: str, many: list[Row], cost: Summary) -> Row:
    columns = {key: Summary.of(one[key] for one in many) for key in many[0]}
    return {"added to the loss": name, **columns, "cost of a step": cost}
