"""Settings: the one description of a training run, which chooses, checks, stores and builds what is trained."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from banach import checks, data, models
from banach.checks import nearest
from banach.data import Augmentation, Images
from banach.fast import channels_last
from banach.models import Constant, Recipe, Schedule
from banach.network import ImplicitNetwork
from banach.solve import Tolerance
from banach.train import words

OPTIMIZERS, PRECISIONS = ("adam", "adamw", "sgd"), ("fp32", "tf32", "bf16")
FIXED_POINT = ("solver", "backward", "norm", "eps", "rtol", "max_steps")
PENALTIES = ("jacobian_penalty", "finite_difference", "correction", "correction_steps")
_SMALL = 16 * 16  # pixels: on smaller images a second CPU thread costs more than it gains


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained on what, and how. Strings are those of `banach.train.words`.

    The first group describes the data and the network, which `load`, `augmentation` and `build` make; leave it
    None if you pass your own to `fit`. `whole` trains on the validation images too, so nothing is validated.

    `batch_size` images make one step of the optimizer; `accumulate` parts of a batch go through the network one
    after the other, for less memory and the same gradient (but batch norm sees the parts). `weight_decay` is
    added to the gradient by "adam" and "sgd", and subtracted from the weights by "adamw". `ema` is the decay d of
    the averaged weights, a <- d a + (1 - d) w at every step. `clip` bounds the norm of the gradient.

    `jacobian_penalty` times |dT/du|_F^2 / n at the fixed point is added to the loss, estimated by one product with
    the Jacobian or, with `finite_difference`, by a difference, for an R without second derivatives. `correction`
    times the losses at the iterates of `correction_steps` is added, see `banach.nn.fixed_point_correction`. The
    reported loss is without them.

    A run is checkpointed after every epoch, and every `checkpoint_every` steps if that is not 0. `fast` captures
    steps as CUDA graphs where possible and uses channels_last on a CPU; the mathematics are the same. `compile`
    also compiles Q, R and S on a GPU, which takes from half a minute to some minutes at the start. `threads` are
    the CPU threads of the process: another number rounds differently.
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
        if isinstance(self.correction_steps, list):  # as JSON and TOML have it
            object.__setattr__(self, "correction_steps", tuple(self.correction_steps))
        for name, check in _CHECKS.items():
            check(name, getattr(self, name))
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is a setting of sgd, got {self.momentum!r} for {self.optimizer}; use 0")
        if self.finite_difference and not self.jacobian_penalty:
            raise ValueError("finite_difference is a way to compute jacobian_penalty, which is 0; set both")
        if self.clip == 0:
            raise ValueError("clip=0 would stop all learning; use a positive norm, or None for no clipping")

    @staticmethod
    def choose(given: Mapping[str, Any], file: Path | None = None) -> Settings:
        """Return complete settings: the recipe of the model, then a TOML file, then `given`; the last one counts.

        Raises:
            ValueError: if a setting is unknown, of the wrong type, or does not go with the others.
        """
        given = {**({} if file is None else read_toml(file)), **given}
        for key in ("data", "model", "recipe"):
            _check_name(key, given.get(key))
        name = given.get("data") or "digits"
        dataset, model = data.get(name), given.get("model") or _own_model(name)
        recipe = models.recipe(model, given.get("recipe"))
        defaults: dict[str, Any] = {
            "data": name,
            "model": model,
            "augment": _own_augment(name, model),
            "threads": 1 if dataset.shape[1] * dataset.shape[2] < _SMALL else torch.get_num_threads(),
        }
        if _is_implicit(model, dataset):
            defaults |= {"solver": "picard", "backward": "jfb", "norm": words.name_of_norm(recipe.norm)}
        else:
            _refuse_fixed_point(model, given)
            defaults |= dict.fromkeys(FIXED_POINT)
        settings = Settings.of_recipe(recipe, **{**defaults, **_as_fields(given)})
        _check_words(settings)
        return settings

    @staticmethod
    def of_recipe(recipe: Recipe, /, **others: Any) -> Settings:
        """Return the settings a network was tuned with; `others` replace some of them."""
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
        """Return plain values, ready for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["correction_steps"] = list(self.correction_steps)
        return {**values, "schedule": words.schedule_to_dict(self.schedule)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Settings:
        """Return what `to_dict` wrote, or a part of it; an unknown key is refused with the nearest right name."""
        known = [field.name for field in dataclasses.fields(Settings)]
        given = {nearest("setting", key, known): value for key, value in values.items()}
        if "schedule" in given:
            given["schedule"] = words.schedule_from_dict(given["schedule"])
        return Settings(**given)

    def load(self, split: str = "train", data_dir: Path | None = None) -> Images:
        """Return a split of the data, on the CPU; `subset` and `whole` apply to "train" alone."""
        wanted = "train+validation" if split == "train" and self.whole else split
        images = data.load(str(self.data), wanted, data_dir)
        if split != "train" or self.subset is None:
            return images
        if self.subset > len(images):
            raise ValueError(f"subset must be at most the {len(images):,} training images, got {self.subset:,}")
        return images.subset(self.subset)

    def augmentation(self) -> Augmentation | None:
        """Return the augmentation of the training images."""
        return words.augment(self.augment or "none")

    def build(self) -> nn.Module:
        """Return the network with fresh weights, on the CPU; the seed decides them, the global state is kept.

        If it stays on the CPU it is in channels_last memory format, unless `fast` is off.
        """
        dataset, model = data.get(str(self.data)), models.get(str(self.model))
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed)
            net: Any = models.build(
                model.name, image=dataset.shape, classes=len(dataset.classes), batch_norm=self.batch_norm
            )
        if hasattr(net, "tolerance"):
            net.solver = words.solver(self.solver or "picard")
            net.backward = words.backward(self.backward or "jfb")
            net.tolerance = self.tolerance(net.tolerance)
        stays = self.torch_device.type == "cpu"
        return channels_last(net) if model.channels_last and self.fast and stays else net

    def tolerance(self, default: Tolerance) -> Tolerance:
        """Return the tolerance, with the parts of `default` that are not set."""
        given = {"atol": self.eps, "rtol": self.rtol, "max_steps": self.max_steps}
        changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if self.norm is not None:
            changes["norm"] = words.norm(self.norm)
        return replace(default, **changes)

    def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the parameters that are trained.

        On a GPU it is fused, and its learning rate is a tensor, so that a captured step can change it.
        """
        weights = [p for p in net.parameters() if p.requires_grad]
        options: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        on_gpu = self.torch_device.type == "cuda"
        if on_gpu:
            options |= {"lr": torch.tensor(self.lr, device=self.torch_device), "fused": True}
        if self.optimizer == "sgd":
            return torch.optim.SGD(weights, momentum=self.momentum, **options)
        made = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return made(weights, **options, capturable=on_gpu)

    @property
    def torch_device(self) -> torch.device:
        """The device: `auto` is the first GPU if there is one."""
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def usable_device(self) -> torch.device:
        """Return the device; refuse one that this machine does not have."""
        device = self.torch_device
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"there is no {device} here ({torch.cuda.device_count()} GPUs); choose --device cpu")
        if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        return device


def read_toml(path: Path) -> dict[str, Any]:
    """Return the keys of a settings file: those of `Settings`, with - or _."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the settings file {path} is not TOML: {error}") from None
    known = [field.name for field in dataclasses.fields(Settings)]
    twice = {key for key in values if "-" in key and key.replace("-", "_") in values}
    if twice:
        raise ValueError(f"{path}: {sorted(twice)[0]} occurs twice, with - and with _; keep one")
    try:
        return {nearest("setting", key.replace("-", "_"), known): value for key, value in values.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _is_implicit(model: str, dataset: data.DataSet) -> bool:
    """Return True if the model has a fixed point; only the built network tells."""
    with torch.random.fork_rng([]):
        net = models.build(model, image=dataset.shape, classes=len(dataset.classes))
    return isinstance(net, ImplicitNetwork)


def _refuse_fixed_point(model: str, given: Mapping[str, Any]) -> None:
    for key in (*FIXED_POINT, *PENALTIES):
        if given.get(key) is not None:
            raise ValueError(f"{model} has no fixed point; leave out {key.replace('_', '-')}")


def _as_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was given, as `Settings` takes it."""
    values = {key: value for key, value in given.items() if value is not None}
    schedule = values.get("schedule")
    if isinstance(schedule, str):
        values["schedule"] = words.schedule(schedule)
    elif schedule is not None:
        values["schedule"] = words.schedule_from_dict(schedule)
    if isinstance(values.get("correction_steps"), str):
        values["correction_steps"] = words.integers(values["correction_steps"])
    if values.get("optimizer") not in (None, "sgd"):
        values.setdefault("momentum", 0.0)  # a recipe's momentum is SGD's
    return values


def _check_words(settings: Settings) -> None:
    """Refuse words that are not understood, before the data is read."""
    settings.augmentation()
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
    """Return what the papers did: JFB's authors and He et al. augment CIFAR-10, and nothing else is augmented."""
    if name != "cifar10":
        return "none"
    return "flip+crop:4" if model == "resnet56" else "paper"


def _check_name(name: str, value: Any) -> None:
    if not isinstance(value, (str, type(None))):
        raise ValueError(f"{name} must be a name, or None, got {value!r}")


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def _check_schedule(name: str, value: Any) -> None:
    if not callable(getattr(value, "multiplier", None)) or isinstance(value, type):
        raise ValueError(f"schedule must be an object such as Constant() or Cosine(), got {value!r}")


def _check_steps(name: str, value: Any) -> None:
    if not isinstance(value, tuple) or not value:
        raise ValueError(f"{name} must be numbers of iterates such as (2, 5), got {value!r}")
    for step in value:
        checks.whole(f"every one of {name}", step, 1)


def _check_device(name: str, value: Any) -> None:
    try:
        torch.device("cpu" if value == "auto" else str(value) if isinstance(value, str) else "")
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {value!r}") from None


def _optional(check: Callable[[str, Any], object]) -> Callable[[str, Any], object]:
    return lambda name, value: None if value is None else check(name, value)


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(("data", "augment", "model", "recipe", "solver", "backward", "norm"), _check_name),
    **dict.fromkeys(("whole", "batch_norm", "finite_difference", "monitor", "fast", "compile"), _check_switch),
    **dict.fromkeys(("epochs", "checkpoint_every"), checks.whole),
    **dict.fromkeys(("batch_size", "accumulate"), partial(checks.whole, least=1)),
    **dict.fromkeys(("lr", "weight_decay"), partial(checks.number, most=1e30)),  # a step is computed in fp32
    **dict.fromkeys(("jacobian_penalty", "correction"), checks.number),
    **dict.fromkeys(("momentum", "label_smoothing"), partial(checks.number, below=1)),
    **dict.fromkeys(("clip", "eps", "rtol"), _optional(checks.number)),
    "seed": partial(checks.whole, most=2**63 - 1),
    "subset": _optional(partial(checks.whole, least=1)),
    "max_steps": _optional(checks.whole),
    "threads": _optional(partial(checks.whole, least=1, most=1024)),
    "ema": _optional(partial(checks.number, below=1)),
    "optimizer": partial(nearest, known=OPTIMIZERS),
    "precision": partial(nearest, known=PRECISIONS),
    "schedule": _check_schedule,
    "correction_steps": _check_steps,
    "device": _check_device,
}
