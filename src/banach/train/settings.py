"""Settings: what a training run is told, as plain values that a file can hold."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from banach.models.recipe import Constant, Recipe, Schedule
from banach.train.schedule import nearest, schedule_from_dict, schedule_to_dict

OPTIMIZERS = ("adam", "adamw", "sgd")
MOST_THREADS, MOST_RATE = 1024, 1e30
PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How `fit` trains. The first group only records how data and network were made: `fit` is given those.
    So does `threads`, the CPU threads of the process: another number rounds differently. `whole`: the validation
    images are trained on too, so nothing is validated.

    `batch_size` images make one step of the optimizer; `accumulate` parts of a batch go through the network one
    after the other, for less memory and the same gradient (but batch norm sees the parts). `weight_decay` is
    added to the gradient by "adam" and "sgd", and taken from the weights by "adamw". `ema` is the decay d of the
    averaged weights, a <- d a + (1 - d) w at every step. `clip` bounds the norm of the gradient.

    `jacobian_penalty` times |dT/du|_F^2 / n at the fixed point is added to the loss, estimated by one product with
    the Jacobian or, with `finite_difference`, by a difference, for an R without second derivatives. `correction`
    times the losses at the iterates of `correction_steps` is added, see `banach.nn.fixed_point_correction`. The
    loss that is reported is without them.

    A run is
    checkpointed after every epoch, and every `checkpoint_every` steps if that is not 0. `fast` captures steps on a
    GPU, where that can be done: the same mathematics, at a depth that is chosen from earlier residuals; on a CPU
    the command line lays weights out as oneDNN likes them. `compile` also compiles Q, R and S on a GPU, which
    takes from half a minute to some minutes at the start.
    """

    data: str | None = None
    subset: int | None = None
    whole: bool = False
    augment: str | None = None
    model: str | None = None
    recipe: str | None = None
    batch_norm: bool = True
    solver: str | None = None
    backward: str | None = None
    norm: str | None = None
    eps: float | None = None
    rtol: float | None = None
    max_steps: int | None = None

    epochs: int = 20
    batch_size: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.0
    optimizer: str = "adam"
    momentum: float = 0.0
    schedule: Schedule = Constant()
    label_smoothing: float = 0.0
    jacobian_penalty: float = 0.0
    finite_difference: bool = False
    correction: float = 0.0
    correction_steps: tuple[int, ...] = (2, 5)
    clip: float | None = None
    ema: float | None = None
    precision: str = "fp32"
    accumulate: int = 1
    seed: int = 0
    monitor: bool = True
    fast: bool = True
    compile: bool = False
    checkpoint_every: int = 0
    threads: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("epochs", 0), ("batch_size", 1), ("accumulate", 1), ("checkpoint_every", 0)):
            _check_whole(name, getattr(self, name), least)
        _check_whole("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2^63, got {self.seed}")
        if isinstance(self.threads, int) and self.threads > MOST_THREADS:
            raise ValueError(f"threads must be at most {MOST_THREADS}, got {self.threads}")
        for name, least in (("subset", 1), ("max_steps", 0), ("threads", 1)):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), least)
        for name in ("lr", "weight_decay"):
            _check_number(name, getattr(self, name), 0, math.inf)
            if getattr(self, name) > MOST_RATE:  # the arithmetic of a step is in fp32
                raise ValueError(f"{name} must be at most {MOST_RATE:g}, got {getattr(self, name)!r}")
        for name in ("jacobian_penalty", "correction"):
            _check_number(name, getattr(self, name), 0, math.inf)
        self._check_correction_steps()
        _check_number("momentum", self.momentum, 0, 1)
        _check_number("label_smoothing", self.label_smoothing, 0, 1)
        for name, most in (("clip", math.inf), ("ema", 1.0), ("eps", math.inf), ("rtol", math.inf)):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), 0, most)
        self._check_choices()

    def _check_choices(self) -> None:
        for name in ("data", "augment", "model", "recipe", "solver", "backward", "norm"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise ValueError(f"{name} must be a name, or None, got {getattr(self, name)!r}")
        nearest("optimizer", self.optimizer, OPTIMIZERS)
        nearest("precision", self.precision, PRECISIONS)
        for name in ("whole", "monitor", "batch_norm", "fast", "compile", "finite_difference"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not callable(getattr(self.schedule, "multiplier", None)) or isinstance(self.schedule, type):
            raise ValueError(f"schedule must be an object such as Constant() or Cosine(), got {self.schedule!r}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is a setting of sgd, got {self.momentum!r} for {self.optimizer}; use 0")
        if self.finite_difference and not self.jacobian_penalty:
            raise ValueError("finite_difference is a way to compute jacobian_penalty, which is 0; give both")
        if self.clip == 0:
            raise ValueError("clip=0 would stop all learning; give a positive norm, or None for no clipping")
        if not isinstance(self.device, str) or (self.device != "auto" and not _is_device(self.device)):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")

    def _check_correction_steps(self) -> None:
        """JSON and TOML have lists: they become a tuple."""
        steps = self.correction_steps
        if not isinstance(steps, (tuple, list)) or not steps:
            raise ValueError(f"correction_steps must be numbers of iterates such as (2, 5), got {steps!r}")
        for step in steps:
            _check_whole("every one of correction_steps", step, 1)
        object.__setattr__(self, "correction_steps", tuple(steps))

    @property
    def torch_device(self) -> torch.device:
        """The device that is meant: `auto` is the first GPU where there is one."""
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @staticmethod
    def of_recipe(recipe: Recipe, /, **others: Any) -> Settings:
        """The settings a network was tuned with; `others` go before them."""
        values: dict[str, Any] = {
            "lr": recipe.lr,
            "epochs": recipe.epochs,
            "batch_size": recipe.batch_size,
            "weight_decay": recipe.weight_decay,
            "optimizer": "adam" if recipe.momentum is None else "sgd",
            "momentum": recipe.momentum or 0.0,
            "label_smoothing": recipe.label_smoothing,
            "schedule": recipe.schedule,
            "eps": recipe.eps,
            "max_steps": recipe.max_steps,
            "norm": str(recipe.norm),
        }
        return Settings(**{**values, **others})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["correction_steps"] = list(self.correction_steps)
        return {**values, "schedule": schedule_to_dict(self.schedule)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Settings:
        """What `to_dict` wrote, or a part of it; an unknown key is refused with the nearest right name."""
        known = [field.name for field in dataclasses.fields(Settings)]
        for key in values:
            nearest("setting", key, known)
        given = dict(values)
        if "schedule" in given:
            given["schedule"] = schedule_from_dict(given["schedule"])
        return Settings(**given)


def _check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {value!r}")


def _check_number(name: str, value: Any, least: float, most: float) -> None:
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not sound or not least <= value <= most or (most == 1 and value == 1):
        upto = "and below 1" if most == 1 else "and finite"
        raise ValueError(f"{name} must be a number, at least {least} {upto}, got {value!r}")


def _is_device(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True
