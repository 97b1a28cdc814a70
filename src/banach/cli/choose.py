"""Which settings a run gets: the recipe of its model, then a TOML file, then the flags; the last word counts."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from banach import data, models
from banach.cli import words
from banach.data import DataSet
from banach.models import Recipe
from banach.network import ImplicitNetwork
from banach.train import Settings
from banach.train.schedule import nearest, schedule_from_dict

PENALTIES = ("jacobian_penalty", "finite_difference", "correction", "correction_steps")
FIXED_POINT = ("solver", "backward", "norm", "eps", "rtol", "max_steps")
_SMALL = 16 * 16  # pixels: below, a second CPU thread costs more than it brings


def choose(flags: Mapping[str, Any], file: Path | None = None) -> Settings:
    """The settings; whatever is unknown, of the wrong type or cannot go together is refused."""
    given = {**({} if file is None else read_toml(file)), **flags}
    for key in ("data", "model", "recipe"):
        if not isinstance(given.get(key), (str, type(None))):
            raise ValueError(f"{key} must be a name, got {given[key]!r}")
    name = given.get("data") or "digits"
    dataset = data.get(name)
    model = given.get("model") or _own_model(name)
    recipe = models.recipe(model, given.get("recipe"))
    defaults: dict[str, Any] = {
        "data": name,
        "model": model,
        "augment": _own_augment(name, model),
        "threads": 1 if dataset.shape[1] * dataset.shape[2] < _SMALL else torch.get_num_threads(),
    }
    found_by = _fixed_point(recipe) if _is_implicit(model, dataset) else _no_fixed_point(model, given)
    settings = Settings.of_recipe(recipe, **{**defaults, **found_by, **_ready(given)})
    _check(settings)
    return settings


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a settings file: those of `Settings`, with - or _."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the settings file {path} is not TOML: {error}") from None
    known = [field.name for field in dataclasses.fields(Settings)]
    twice = {key for key in values if "-" in key and key.replace("-", "_") in values}
    if twice:
        raise ValueError(f"{path}: {sorted(twice)[0]} is there twice, with - and with _; keep one")
    try:
        return {nearest("setting", key.replace("-", "_"), known): value for key, value in values.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _is_implicit(model: str, dataset: DataSet) -> bool:
    """Has the model a fixed point? Only the built network knows."""
    with torch.random.fork_rng([]):
        net = models.build(model, image=dataset.shape, classes=len(dataset.classes))
    return isinstance(net, ImplicitNetwork)


def _fixed_point(recipe: Recipe) -> dict[str, Any]:
    return {"solver": "picard", "backward": "jfb", "norm": words.name_of_norm(recipe.norm)}


def _no_fixed_point(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    for key in (*FIXED_POINT, *PENALTIES):
        if given.get(key) is not None:
            raise ValueError(f"{model} has no fixed point to find; leave out {key.replace('_', '-')}")
    return dict.fromkeys(FIXED_POINT)


def _ready(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, as `Settings` takes it."""
    values = {key: value for key, value in given.items() if value is not None}
    schedule = values.get("schedule")
    if isinstance(schedule, str):
        values["schedule"] = words.schedule(schedule)
    elif schedule is not None:
        values["schedule"] = schedule_from_dict(schedule)
    if isinstance(values.get("correction_steps"), str):
        values["correction_steps"] = words.whole_numbers(values["correction_steps"])
    if values.get("optimizer") not in (None, "sgd"):
        values.setdefault("momentum", 0.0)  # the recipe's, if it is of SGD, has no meaning here
    return values


def _check(settings: Settings) -> None:
    """Words are understood now, not after the data is read."""
    words.augment(settings.augment or "none")
    if settings.backward is None or settings.solver is None:
        return
    words.solver(settings.solver)
    words.backward(settings.backward)
    words.norm(settings.norm or "rms")
    if settings.max_steps == 0 and (settings.jacobian_penalty or settings.correction):
        raise ValueError("max-steps 0 is the explicit twin, without a fixed point to penalise; leave that out")
    if settings.max_steps == 0 and settings.backward != "jfb":
        raise ValueError(
            f"max-steps 0 is the explicit twin, whose gradient is exact by jfb, got backward {settings.backward}; "
            "leave that out"
        )


def _own_model(name: str) -> str:
    if name not in models.names():
        raise ValueError(f"no model is named after the data set {name}; choose one with --model")
    return name


def _own_augment(name: str, model: str) -> str:
    """What the papers did: JFB's authors and He et al. augment CIFAR-10, and nothing else is augmented."""
    if name != "cifar10":
        return "none"
    return "flip+crop:4" if model == "resnet56" else "paper"
