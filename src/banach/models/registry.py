"""Networks by name, with the recipes they were tuned with: build() makes one, register() adds your own."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from banach import checks
from banach.backward import Mode
from banach.models.blocks import Image
from banach.network import ImplicitNetwork
from banach.solve import RMS, Norm, Solver, Tolerance

# builder(image, classes), or builder(image, classes, *, batch_norm=True) where a variant without batch norm in R
# exists. It returns (Q, R, S), or a module where there is no fixed point, or more than these settings.
Builder = Callable[..., Any]


class Schedule(Protocol):
    """How the learning rate changes over a run."""

    def multiplier(self, epoch: float, epochs: int) -> float:
        """Return the factor of the learning rate after `epoch` of `epochs` epochs; fractions count."""


@dataclass(frozen=True)
class Constant:
    """1 throughout."""

    def multiplier(self, epoch: float, epochs: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Steps:
    """factor^k, where k is the number of milestones `at` (in epochs) that are reached."""

    at: tuple[int, ...]
    factor: float

    def __post_init__(self) -> None:
        integers = isinstance(self.at, tuple) and all(type(epoch) is int and epoch >= 0 for epoch in self.at)
        if not integers or list(self.at) != sorted(self.at):
            raise ValueError(f"at must be epochs in ascending order, whole numbers from 0 on, got {self.at!r}")
        checks.number("factor", self.factor)

    def multiplier(self, epoch: float, epochs: int) -> float:
        return self.factor ** sum(epoch >= milestone for milestone in self.at)


@dataclass(frozen=True)
class Cosine:
    """(1 + cos(pi t)) / 2, where t is the share of the run that is done: from 1 down to 0."""

    def multiplier(self, epoch: float, epochs: int) -> float:
        return _half_cosine(1.0, 0.0, epoch / epochs)


@dataclass(frozen=True)
class OneCycle:
    """From `start` up to 1 over the first `warm` share of the run, then down to `end`, each half a cosine."""

    warm: float = 0.3
    start: float = 0.04
    end: float = 1e-4

    def __post_init__(self) -> None:
        checks.number("warm", self.warm, below=1)
        checks.number("start", self.start)
        checks.number("end", self.end)

    def multiplier(self, epoch: float, epochs: int) -> float:
        done = epoch / epochs
        if done < self.warm:
            return _half_cosine(self.start, 1.0, done / self.warm)
        return _half_cosine(1.0, self.end, (done - self.warm) / (1 - self.warm))


def _half_cosine(first: float, last: float, share: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is solved and trained, with cross entropy. Words are those of the flags of `banach train`.

    `momentum=None` is Adam; a number is SGD with that momentum. In both cases the weight decay is added to the
    gradient (`torch.optim.Adam`, not `AdamW`). Solver and backward mode are Picard and JFB if None. `augment`
    applies to CIFAR-10; other data are not augmented. Without `normalise`, pixels are in [0, 1]. The first
    `pretrain` steps unroll R. `tune` lets R choose its step size during training, see `banach.nn.tune_alpha`.
    """

    lr: float
    epochs: int
    batch_size: int
    weight_decay: float = 0.0
    momentum: float | None = None
    label_smoothing: float = 0.0
    schedule: Schedule = Constant()
    eps: float = 1e-4
    rtol: float | None = None
    max_steps: int = 50
    norm: Norm = RMS()
    solver: str | None = None
    backward: str | None = None
    augment: str = "paper"
    normalise: bool = True
    pretrain: int = 0
    tune: bool = False

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(atol=self.eps, rtol=self.rtol or 0.0, max_steps=self.max_steps, norm=self.norm)


@dataclass(frozen=True)
class Model:
    """A named network: its builder, the images it is for, and its recipes, the default one first.

    `channels_last`: weights and images may use the channels_last memory format. Set it only if no layer views an
    image as rows of pixels.
    """

    name: str
    builder: Builder
    description: str
    image: Image
    classes: int
    recipes: Mapping[str, Recipe]
    channels_last: bool = False

    @property
    def recipe(self) -> Recipe:
        """The default recipe."""
        return next(iter(self.recipes.values()))

    @property
    def has_twin(self) -> bool:
        """True if it can be built without batch norm in R."""
        return "batch_norm" in inspect.signature(self.builder).parameters


_MODELS: dict[str, Model] = {}


def register(
    name: str,
    builder: Builder,
    *,
    description: str | None = None,
    image: Image | None = None,
    classes: int = 10,
    recipes: Mapping[str, Recipe] | None = None,
    channels_last: bool = False,
    overwrite: bool = False,
) -> Model:
    """Make `build(name)` call `builder(image, classes)`.

    Args:
        name: the name of the model.
        builder: returns (Q, R, S) or a module.
        description: one line for `banach models`. None: the first line of the builder's docstring.
        image: (channels, height, width) that the builder gets by default. None: the default of its `image`.
        classes: the number of classes that it gets by default.
        recipes: by name, the default one first. Without any: RMS 1e-4, Adam, 20 epochs.
        channels_last: lets `banach train` use the channels_last memory format on a CPU.
        overwrite: allow a name that is registered already.

    Raises:
        ValueError: if the name is taken.
    """
    if name in _MODELS and not overwrite:
        raise ValueError(f"model {name!r} is registered already; choose another name, or pass overwrite=True")
    recipes = dict(recipes or {"default": Recipe(lr=1e-3, epochs=20, batch_size=100)})
    classes = checks.whole("classes", classes, 1)
    if image is None:
        own = inspect.signature(builder).parameters.get("image")
        image = None if own is None or own.default is own.empty else own.default
    if description is None:
        description = (inspect.getdoc(builder) or "").partition("\n")[0].removeprefix("Return ").rstrip(".")
    _MODELS[name] = Model(name, builder, description, _shape(image), classes, recipes, channels_last)
    return _MODELS[name]


def names() -> tuple[str, ...]:
    """Return the registered names, in order."""
    return tuple(_MODELS)


def get(name: str) -> Model:
    """Return the model of that name, or of "package.module:name" if that module has been imported.

    Raises:
        ValueError: if there is none; the message suggests the closest name.
    """
    return _MODELS[checks.nearest("model", checks.own_name(name), _MODELS)]


def recipe(name: str, which: str | None = None) -> Recipe:
    """Return a recipe of a model by its name, or the default one."""
    model = get(name)
    if which is None:
        return model.recipe
    return model.recipes[checks.nearest(f"recipe of {name}", which, model.recipes)]


def build(
    name: str,
    *,
    image: Image | None = None,
    classes: int | None = None,
    batch_norm: bool = True,
    explicit: bool = False,
    solver: Solver | None = None,
    tolerance: Tolerance | None = None,
    backward: Mode | None = None,
) -> nn.Module:
    """Build a network with fresh weights: an `ImplicitNetwork`, or a plain module for an explicit model.

    Args:
        name: the model, see `names()`.
        image: (channels, height, width); the model's by default.
        classes: the number of classes; the model's by default.
        batch_norm: False leaves batch norm out of R, for Jacobian-based modes.
        explicit: True is the twin S(R(0, Q(d))), with no step of the solver; JFB is then exact.
        solver: by default Picard().
        tolerance: by default that of the model's default recipe.
        backward: by default JFB().
    """
    model = get(name)
    if not batch_norm and not model.has_twin:
        raise ValueError(f"{name} has no twin without batch norm; leave out batch_norm=False")
    shape = model.image if image is None else _shape(image)
    count = model.classes if classes is None else checks.whole("classes", classes, 1)
    made = model.builder(shape, count, **({} if batch_norm else {"batch_norm": False}))
    if isinstance(made, tuple) and len(made) == 3:
        made = ImplicitNetwork(*made, tolerance=model.recipe.tolerance)
    if not isinstance(made, nn.Module):
        raise ValueError(f"the builder of {name} must return (Q, R, S) or a module, got {type(made).__name__}")
    given = {"solver": solver, "tolerance": tolerance, "backward": backward}
    given = {key: value for key, value in given.items() if value is not None}
    if given and not isinstance(made, ImplicitNetwork):
        raise ValueError(f"{name} has no fixed point to find; leave out {' and '.join(given)}")
    for key, value in given.items():
        setattr(made, key, value)
    if explicit and isinstance(made, ImplicitNetwork):
        made.tolerance = replace(made.tolerance, max_steps=0)
    return made


def _shape(image: Any) -> Image:
    sizes = tuple(image) if isinstance(image, (tuple, list)) else ()
    if len(sizes) != 3 or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"image must be (channels, height, width), three whole numbers, got {image!r}")
    return sizes
