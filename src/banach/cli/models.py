"""`banach models`: list the networks, or describe one."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import torch
import typer
from torch import nn

from banach import data
from banach import models as registry
from banach.cli.console import console, table
from banach.latent import leaves
from banach.models import Model, Recipe
from banach.network import ImplicitNetwork

EPILOG = """\b
Examples:
  banach models
  banach models mnist"""

COLUMNS = ("name", "parameters", "latent", "images", "explicit twin", "without batch norm", "recipes")


def models(
    name: Annotated[str | None, typer.Argument(help="A model to describe.", show_default=False)] = None,
) -> None:
    """List the networks, or describe one: parameters, recipes, layers."""
    if name is None:
        _print_all()
    else:
        _print_one(registry.get(name))


def _print_all() -> None:
    rows = [_row(registry.get(name)) for name in registry.names()]
    console.print(table("", COLUMNS, rows))
    console.print("Describe one: banach models NAME.  The explicit twin: banach train --max-steps 0.")


def _row(model: Model) -> tuple[Any, ...]:
    net = _fresh(model)
    return (
        model.name,
        f"{count(net):,}",
        latent_shape(model, net),
        _by(model.image),
        "yes" if isinstance(net, ImplicitNetwork) else "is one",
        "yes" if model.has_twin else "no",
        ", ".join(model.recipes),
    )


def _print_one(model: Model) -> None:
    net = _fresh(model)
    console.print(f"{model.name}: {model.description}")
    console.print(f"images {_by(model.image)}, {model.classes} classes, latent {latent_shape(model, net) or '-'}")
    console.print()
    console.print(table("Parameters", ("part", "parameters"), _parts(net)))
    console.print()
    console.print(table("Recipes, the default one first", ("setting", *model.recipes), _recipes(model)))
    console.print()
    console.print(f"Layers:\n{net}\n")
    for line in _examples(model, net):
        console.print(line)


def _parts(net: nn.Module) -> list[tuple[str, str]]:
    parts = [name for name in ("Q", "R", "S") if isinstance(getattr(net, name, None), nn.Module)]
    rows = [(name, f"{count(getattr(net, name)):,}") for name in parts]
    return [*rows, ("all", f"{count(net):,}")]


def _recipes(model: Model) -> list[tuple[str, ...]]:
    """Return one row per setting, with one column per recipe."""
    fields = [field.name for field in dataclasses.fields(Recipe)]
    return [(field, *(_value(recipe, field) for recipe in model.recipes.values())) for field in fields]


def _value(recipe: Recipe, field: str) -> str:
    value = getattr(recipe, field)
    if field == "momentum":
        return "Adam" if value is None else f"SGD, {value:g}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _examples(model: Model, net: nn.Module) -> list[str]:
    """Return commands that train it, on the data set of its name, or else on one with images of its shape."""
    fitting = [name for name in data.names() if data.get(name).shape == model.image]
    fitting = [name for name in fitting if len(data.get(name).classes) == model.classes]
    if not fitting:
        return [
            f"No data set has images of {_by(model.image)} in {model.classes} classes; register one to train it."
        ]
    own = model.name if model.name in fitting else fitting[0]
    command = f"banach train --data {own} --model {model.name}"
    if not isinstance(net, ImplicitNetwork):
        return ["Train it:", f"  {command}"]
    return ["Train it, and its explicit twin:", f"  {command}", f"  {command} --max-steps 0"]


def latent_shape(model: Model, net: nn.Module) -> str | None:
    """Return the shape of the latent of one image; None if there is no latent."""
    if not isinstance(net, ImplicitNetwork):
        return None
    with torch.no_grad():
        start = net.start(net.Q(torch.zeros(1, *model.image)))
    return " + ".join(_by(tuple(leaf.shape[1:])) for leaf in leaves(start))


def count(net: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in net.parameters())


def _fresh(model: Model) -> nn.Module:
    """Build the network; the global random state does not change."""
    with torch.random.fork_rng([]):
        return registry.build(model.name).eval()


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape) or "1"
