"""Networks by name: build() makes one, register() adds your own Q, R, S."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from banach.backward import JFB, Mode
from banach.models.blocks import Image
from banach.models.recipe import Recipe
from banach.network import ImplicitNetwork
from banach.solve import Picard, Solver, Tolerance

# builder(image, classes), or builder(image, classes, *, batch_norm=True) where a twin without batch norm in R
# exists. It returns (Q, R, S), or a whole module where there is no fixed point, or more than these settings.
Builder = Callable[..., Any]

_MODELS: dict[str, Model] = {}


@dataclass(frozen=True)
class Model:
    """A named network: how it is built, for which images, and the recipes it comes with, the default one first.

    `channels_last`: its weights may lie with channels side by side, so that its images do too. Not where something
    views an image as if they did not.
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
        """Can it be built without batch norm in R?"""
        return "batch_norm" in inspect.signature(self.builder).parameters


def register(
    name: str,
    builder: Builder,
    *,
    description: str,
    image: Image,
    classes: int = 10,
    recipes: Mapping[str, Recipe] | None = None,
    channels_last: bool = False,
    overwrite: bool = False,
) -> Model:
    """Make `build(name)` call `builder(image, classes)`, which returns (Q, R, S) or a module.

    `image` is (channels, height, width); it and `classes` are what the builder gets unless `build` is given
    others. Without recipes the network is solved to an RMS of 1e-4 and trained by Adam for 20 epochs.
    `channels_last` lets `banach train` lay its weights out as oneDNN likes them, on a CPU.
    """
    if not callable(builder):
        raise TypeError(f"builder must be a function of (image, classes), got {type(builder).__name__}")
    if name in _MODELS and not overwrite:
        raise ValueError(f"there is a model {name!r} already; choose another name, or pass overwrite=True")
    recipes = dict(recipes or {"default": Recipe(lr=1e-3, epochs=20, batch_size=100)})
    _MODELS[name] = Model(name, builder, description, _shape(image), _count(classes), recipes, channels_last)
    return _MODELS[name]


def names() -> tuple[str, ...]:
    """The names that `build` knows, in the order they were registered."""
    return tuple(_MODELS)


def get(name: str) -> Model:
    """What is registered under a name."""
    return _MODELS[_known("model", name, _MODELS)]


def recipe(name: str, which: str | None = None) -> Recipe:
    """A recipe of a model by its name; the default one without."""
    model = get(name)
    return model.recipe if which is None else model.recipes[_known(f"recipe of {name}", which, model.recipes)]


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
    """The network of that name, with fresh weights: an `ImplicitNetwork`, or a plain module for an explicit rival.

    `batch_norm=False` leaves batch norm out of R, for Jacobian-based modes. `explicit=True` is the twin
    S(R(0, Q(d))), the same network with no step of the solver; train it by JFB, which is then exact. What is not
    given: Picard(), the tolerance of the model's default recipe, JFB().
    """
    model = get(name)
    shape = model.image if image is None else _shape(image)
    made = _made(model, shape, model.classes if classes is None else _count(classes), batch_norm)
    given = {"solver": solver, "tolerance": tolerance, "backward": backward}
    net = _network(model, made, {key: value for key, value in given.items() if value is not None})
    if explicit and isinstance(net, ImplicitNetwork):
        net.tolerance = replace(net.tolerance, max_steps=0)
    return net


def _made(model: Model, image: Image, classes: int, batch_norm: bool) -> Any:
    if not batch_norm and not model.has_twin:
        raise ValueError(f"{model.name} has no twin without batch norm; leave out batch_norm=False")
    options = {} if batch_norm else {"batch_norm": False}
    return model.builder(image, classes, **options)


def _network(model: Model, made: Any, given: dict[str, Any]) -> nn.Module:
    """Q, R, S become a network with the settings that were given; a whole one gets those that it has."""
    if isinstance(made, tuple) and len(made) == 3:
        defaults = {"solver": Picard(), "tolerance": model.recipe.tolerance, "backward": JFB()}
        return ImplicitNetwork(*made, **{**defaults, **given})
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"the builder of {model.name} must return (Q, R, S) or a module, got {type(made).__name__}"
        )
    if given and not isinstance(made, ImplicitNetwork):
        raise ValueError(f"{model.name} has no fixed point to find; leave out {' and '.join(given)}")
    for key, value in given.items():
        setattr(made, key, value)
    return made


def _shape(image: Any) -> Image:
    if not isinstance(image, (tuple, list)) or len(image) != 3 or not all(_positive(size) for size in image):
        raise ValueError(f"image must be (channels, height, width), three whole numbers, got {image!r}")
    channels, height, width = image
    return channels, height, width


def _count(classes: Any) -> int:
    if not _positive(classes):
        raise ValueError(f"classes must be a whole number of at least 1, got {classes!r}")
    return classes


def _positive(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _known(what: str, name: str, known: Iterable[str]) -> str:
    if name in known:
        return name
    lower = {key.lower(): key for key in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.4)
    advice = f"did you mean {lower[near[0]]!r}? " if near else ""
    raise ValueError(f"unknown {what}: {name!r}; {advice}choose from {', '.join(known)}")
