"""Settings: the one description of a training run, which chooses, checks, stores and builds what is trained."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from banach.provenance import plain
from banach.solve import Tolerance
from banach.train import words

FREE = ("device", "on_nonfinite", "keep", "sharded")  # these may change when a run is resumed
FIXED_POINT = ("solver", "backward", "norm", "eps", "rtol", "max_steps")  # need one, as IMPLICIT do
IMPLICIT = ("jacobian_penalty", "finite_difference", "correction", "correction_steps", "pretrain", "tune")
_TOML_BYTES = 2**20
_COUNT = 10**9  # the largest number of epochs, steps or images
_RATE = 1e30  # the largest rate: a step is computed in fp32
_SMALL = 16 * 16  # pixels: on smaller images a second CPU thread costs more than it gains
GROUPS = {"data": "Data", "model": "Network", "epochs": "Training"}  # groups of --help: {first setting: title}
GROUPS |= {"jacobian_penalty": "Penalties", "device": "Run"}


def setting(default: Any, help: str, metavar: str | None = None, **limits: Any) -> Any:
    """Return a field of `Settings`: its default, what --help says, and the limits of its value.

    `choices` are all values that a word may have; others are those of `checks.whole` and `checks.number`.
    """
    return dataclasses.field(default=default, metadata={"help": help, "metavar": metavar, "limits": limits})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained on what, and how. Every setting is a flag of `banach train`, whose --help explains it.

    The first two groups describe the data and the network, which `load`, `augmentation` and `build` make; leave
    them None if you pass your own to `fit`. Strings are those of `banach.train.words`.

    The parts of `accumulate` give the gradient of the whole batch if the loss is a plain mean over samples; batch
    norm sees the parts. `ema` is the decay d of averaged weights, a <- d a + (1 - d) w at every step.

    `jacobian_penalty` times |dT/du|_F^2 / n at the fixed point is added to the loss, estimated by one product with
    the Jacobian or by a difference; `correction` times the losses at some iterates, see
    `banach.nn.fixed_point_correction`. The reported loss is without them.

    With `tune`, modules that have a method `tune(net, *d)` are called with a batch at step 30 and in the middle of
    every epoch; it returns True if it changed something, such as a step size.

    A step that is not finite ends the training (`on_nonfinite` "stop"), is undone ("skip"), or returns to the last
    checkpoint with a tenth of the rate ("rewind", at most five times).
    """

    data: str | None = setting(None, "digits | mnist | svhn | cifar10 | folder:PATH | FILE.npz  [digits]", "NAME")
    subset: int | None = setting(None, "Train on N images, stratified by class.", least=1)
    whole: bool = setting(False, "Train on the validation images too; nothing is validated.")
    augment: str | None = setting(None, f"{words.AUGMENTS}.  [none; cifar10: the recipe's]")
    normalise: bool = setting(True, "Scale pixels to mean 0 and deviation 1, else to [0, 1].  [on]")

    model: str | None = setting(None, "A network; see: banach models.  [the one named like the data]", "NAME")
    recipe: str | None = setting(None, "A set of settings; see: banach models NAME.  [the first one]", "NAME")
    batch_norm: bool = setting(True, "Batch norm in R; --no-batch-norm for --backward implicit:...  [on]")
    solver: str | None = setting(None, f"{words.SOLVERS}.  [picard]")
    backward: str | None = setting(None, f"{words.BACKWARDS}.  [jfb]")
    eps: float | None = setting(None, "Tolerance: stop a solve at a residual of X.")
    rtol: float | None = setting(None, "Relative tolerance: eps plus X times the norm of T(u).  [0]")
    norm: str | None = setting(None, f"Norm of the residual: {words.NORMS}.")
    max_steps: int | None = setting(None, "Stop a solve after N steps; 0: the explicit twin S(R(0, Q(d))).")

    epochs: int = setting(20, "Passes over the data.")
    batch_size: int = setting(64, "Images per step.", least=1)
    accumulate: int = setting(1, "Gradient accumulation: N parts of a batch, for less memory.  [1]", least=1)
    optimizer: str = setting("adam", "adam | adamw | sgd.", choices=("adam", "adamw", "sgd"))
    lr: float = setting(1e-3, "Learning rate.", most=_RATE)
    momentum: float = setting(0.0, "Momentum of sgd.", below=1)
    weight_decay: float = setting(0.0, "Weight decay: L2, by adamw decoupled.", most=_RATE)
    schedule: Schedule = setting(Constant(), f"Learning rate over time: {words.SCHEDULES}.")
    label_smoothing: float = setting(0.0, "Label smoothing, as in nn.CrossEntropyLoss.", below=1)
    clip: float | None = setting(None, "Clip the norm of the gradient at X.")
    ema: float | None = setting(None, "Average the weights with decay X (EMA) and evaluate these.", below=1)
    precision: str = setting("fp32", "fp32 | tf32 | bf16.  [fp32]", choices=("fp32", "tf32", "bf16"))
    pretrain: int = setting(0, "The first N steps unroll R ten times instead of solving.  [0]")
    tune: bool = setting(False, "Let modules choose their step size during training.")
    seed: int = setting(0, "Seed of weights, order and dropout.  [0]", most=2**63 - 1)

    jacobian_penalty: float = setting(0.0, "Add X times the mean squared singular value of dT/du to the loss.")
    finite_difference: bool = setting(False, "Compute that penalty without double backward.")
    correction: float = setting(0.0, "Add X times the losses at iterates before convergence.")
    correction_steps: tuple[int, ...] = setting((2, 5), "The steps of these iterates.  [2,5]", "N,N")

    device: str = setting("auto", "auto | cpu | cuda | cuda:N.  [auto]")
    threads: int | None = setting(None, "CPU threads. The number changes rounding errors.", least=1, most=1024)
    fast: bool = setting(True, "CUDA graphs on a GPU, channels_last on a CPU.  [on]")
    compile: bool = setting(False, "torch.compile Q, R and S on a GPU.  [off]")
    sharded: bool = setting(False, "With torchrun: shard the weights over the GPUs (FSDP2).  [off]")
    monitor: bool = setting(True, "Measure sigma, the contraction factor, after every epoch.  [on]")
    checkpoint_every: int = setting(0, "Also checkpoint every N steps.  [0: after epochs only]")
    keep: int = setting(2, "Checkpoints to keep besides the best one.  [2]", least=1)
    on_nonfinite: str = setting(
        "stop", "At NaN or infinity: stop | skip | rewind.  [stop]", choices=("stop", "skip", "rewind")
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name), str(field.type), **field.metadata["limits"])
        for step in self.correction_steps:
            checks.whole("every one of correction_steps", step, 1, _COUNT)
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is a setting of sgd, got {self.momentum!r} for {self.optimizer}; use 0")
        if self.finite_difference and not self.jacobian_penalty:
            raise ValueError("finite_difference is a way to compute jacobian_penalty, which is 0; set both")
        if self.clip == 0:
            raise ValueError("clip=0 would stop all learning; use a positive norm, or leave it out")

    @staticmethod
    def choose(given: Mapping[str, Any], file: Path | None = None) -> Settings:
        """Return complete settings: the recipe of the model, then a TOML file, then `given`; the last one counts.

        Raises:
            ValueError: if a setting is unknown, of the wrong type, or does not go with the others.
        """
        flags = {key: value for key, value in given.items() if value is not None}
        given = flags if file is None else read_toml(file) | flags
        for key in ("data", "model", "recipe"):
            _check(key, given.get(key), "str | None")
        name = given.get("data", "digits")
        dataset, model = data.get(name), given.get("model") or name
        if model not in models.names() and "model" not in given:
            raise ValueError(f"no model is named like the data {name}; choose one with --model (banach models)")
        recipe = models.recipe(model, given.get("recipe"))
        defaults: dict[str, Any] = {
            "data": name,
            "model": model,
            "augment": recipe.augment if name == "cifar10" else "none",
            "threads": 1 if dataset.shape[1] * dataset.shape[2] < _SMALL else torch.get_num_threads(),
        }
        with torch.random.fork_rng([]):
            net = _fresh(model, dataset)  # only the network tells whether it has a fixed point
        if isinstance(net, ImplicitNetwork):
            defaults |= {"solver": recipe.solver or "picard", "backward": recipe.backward or "jfb"}
            if given.get("max_steps") == 0:  # the explicit twin
                defaults |= {"backward": "jfb", "pretrain": 0, "tune": False}
        elif wrong := [key for key in (*FIXED_POINT, *IMPLICIT) if key in given]:
            raise ValueError(f"{model} has no fixed point; leave out {wrong[0].replace('_', '-')}")
        else:
            defaults |= dict.fromkeys(FIXED_POINT)
        settings = Settings.of_recipe(recipe, **defaults).changed(given)
        settings.augmentation()  # refuses words that are not understood, before the data is read
        if isinstance(net, ImplicitNetwork):
            settings.configure(net)  # refuses them, too
            settings._check_network(net)
        return settings

    def changed(self, given: Mapping[str, Any]) -> Settings:
        """Return these settings with those given as flags or keys of a file; None is not given."""
        readers = {"schedule": words.schedule, "correction_steps": words.integers}
        values = {key: readers[key](v) if key in readers else v for key, v in given.items() if v is not None}
        if values.get("optimizer") not in (None, "sgd"):
            values.setdefault("momentum", 0.0)  # a recipe's momentum is SGD's
        if "eps" in values and self.rtol:
            values.setdefault("rtol", 0.0)  # the old one could stop a solve earlier than eps
        return replace(self, **values)

    @staticmethod
    def of_recipe(recipe: Recipe, /, **others: Any) -> Settings:
        """Return the settings a network was tuned with; `others` replace some of them."""
        values = dict(vars(recipe))
        del values["augment"]  # it depends on the data
        values |= {"optimizer": "adam" if recipe.momentum is None else "sgd", "momentum": recipe.momentum or 0.0}
        return Settings(**{**values, "norm": words.name_of_norm(recipe.norm), **others})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        steps, schedule = list(self.correction_steps), words.schedule_to_dict(self.schedule)
        return {**vars(self), "correction_steps": steps, "schedule": schedule}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Settings:
        """Return what `to_dict` wrote, or a part of it; an unknown key is refused with the nearest right name."""
        return Settings().changed({nearest("setting", key, _NAMES): value for key, value in values.items()})

    def load(self, split: str = "train", data_dir: Path | None = None) -> Images:
        """Return a split of the data, on the CPU; `subset` and `whole` apply to "train" alone."""
        wanted = "train+validation" if split == "train" and self.whole else split
        images = self.scaled(data.load(str(self.data), wanted, data_dir))
        if split != "train" or self.subset is None:
            return images
        if self.subset > len(images):
            raise ValueError(f"subset must be at most the {len(images):,} training images, got {self.subset:,}")
        return images.subset(self.subset)

    def scaled(self, images: Images) -> Images:
        """Return the images, to be normalised as these settings say."""
        if self.normalise:
            return images
        return replace(images, mean=(0.0,) * len(images.mean), std=(1.0,) * len(images.std))

    def augmentation(self) -> Augmentation | None:
        """Return the augmentation of the training images."""
        return words.augment(self.augment or "none")

    def build(self) -> nn.Module:
        """Return the network with fresh weights, on the CPU; the seed decides them, the global state is kept.

        If it stays on the CPU it is in channels_last memory format, unless `fast` is off.
        """
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed)
            net = _fresh(str(self.model), data.get(str(self.data)), batch_norm=self.batch_norm)
        if isinstance(net, ImplicitNetwork):
            self.configure(net)
        stays = self.fast and self.torch_device.type == "cpu"
        return channels_last(net) if stays and models.get(str(self.model)).channels_last else net

    def configure(self, net: ImplicitNetwork) -> None:
        """Set solver, tolerance and backward mode of a network."""
        net.solver = words.solver(self.solver or "picard")
        net.backward = words.backward(self.backward or "jfb")
        net.tolerance = self.tolerance(net.tolerance)

    def tolerance(self, default: Tolerance) -> Tolerance:
        """Return the tolerance, with the parts of `default` that are not set; `eps` alone is without `rtol`."""
        norm = None if self.norm is None else words.norm(self.norm)
        rtol = 0.0 if self.rtol is None and self.eps is not None else self.rtol
        given: dict[str, Any] = {"atol": self.eps, "rtol": rtol, "max_steps": self.max_steps, "norm": norm}
        return replace(default, **{key: value for key, value in given.items() if value is not None})

    def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the parameters that are trained; on a GPU it can be captured and is fused."""
        weights = [p for p in net.parameters() if p.requires_grad]
        on_gpu = self.torch_device.type == "cuda"
        lr = torch.tensor(self.lr, device=self.torch_device) if on_gpu else self.lr
        options: dict[str, Any] = {"lr": lr, "weight_decay": self.weight_decay, "fused": on_gpu or None}
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
        return device

    def _check_network(self, net: ImplicitNetwork) -> None:
        """Refuse what the explicit twin cannot have, and what would change nothing."""
        wrong = [name for name in ("jacobian_penalty", "correction", "pretrain", "tune") if getattr(self, name)]
        wrong += ["backward"] if self.backward != "jfb" else []
        if self.max_steps == 0 and wrong:
            text = "max-steps 0 is the explicit twin, which does not solve and whose gradient is exact by jfb"
            raise ValueError(f"{text}; leave out {', '.join(wrong).replace('_', '-')}")
        if self.tune and not any(callable(getattr(module, "tune", None)) for module in net.modules()):
            raise ValueError(f"tune needs a module with a method tune, {self.model} has none; use --no-tune")
        if self.correction and (last := max(self.correction_steps)) >= (most := net.tolerance.max_steps):
            raise ValueError(f"correction-steps must be below max-steps {most}, got {last}; take earlier ones")


_NAMES = [field.name for field in dataclasses.fields(Settings)]


def read_toml(path: Path) -> dict[str, Any]:
    """Return the keys of a settings file: those of `Settings`, with - or _."""
    try:
        if path.stat().st_size > _TOML_BYTES:
            raise ValueError(f"it holds {path.stat().st_size:,} bytes, expected at most {_TOML_BYTES:,}")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        plain(values)  # a RecursionError, if tables are nested so deeply that no message could show them
    except OSError as error:
        raise ValueError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError, a number of 5,000 digits
        raise ValueError(f"the settings file {path} is not a TOML file of settings: {error}") from None
    return {nearest(f"setting in {path}", key.replace("-", "_"), _NAMES): value for key, value in values.items()}


def _fresh(model: str, dataset: data.DataSet, *, batch_norm: bool = True) -> nn.Module:
    return models.build(model, image=dataset.shape, classes=len(dataset.classes), batch_norm=batch_norm)


def _check(name: str, value: Any, kind: str, choices: tuple[str, ...] = (), **limits: Any) -> None:
    """Refuse a value that the field `name`, whose type is written as `kind`, cannot have."""
    if value is None and kind.endswith("| None"):
        return
    if choices:
        nearest(name, value, choices)
    elif kind.startswith("int"):
        checks.whole(name, value, **{"most": _COUNT, **limits})
    elif kind.startswith("float"):
        checks.number(name, value, **limits)
    elif kind == "bool" and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    elif kind == "str | None" and (not isinstance(value, str) or not value.strip()):
        raise ValueError(f"{name} must be a name, or left out, got {value!r}")
    elif name == "device" and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value)):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {value!r}")
    elif name == "schedule" and (isinstance(value, type) or not hasattr(value, "multiplier")):
        raise ValueError(f"schedule must be an object such as Constant() or Cosine(), got {value!r}")
    elif name == "correction_steps" and not (isinstance(value, tuple) and value):
        raise ValueError(f"{name} must be numbers of iterates such as (2, 5), got {value!r}")
