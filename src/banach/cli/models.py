"""`banach models`: list the networks, or describe one."""

import dataclasses
from typing import Annotated

import torch
from torch import nn

from banach import models as registry
from banach.cli.console import console, table
from banach.cli.shared import Imports, argument, parameters
from banach.latent import leaves
from banach.models import Model, Recipe
from banach.network import ImplicitNetwork

EPILOG = """\b
Examples:
  banach models
  banach models mnist"""

COLUMNS = ("name", "parameters", "latent", "images", "explicit twin", "without batch norm", "recipes")


def models(name: Annotated[str | None, argument("A model to describe.")] = None, modules: Imports = None) -> None:
    """List the networks, or describe one: parameters, recipes, layers."""
    if name is not None:
        _describe(registry.get(name))
        return
    rows = []
    for model in map(registry.get, registry.names()):
        net = _fresh(model)
        explicit = "yes" if isinstance(net, ImplicitNetwork) else "is explicit"
        norm_free, recipes = "yes" if model.has_twin else "no", ", ".join(model.recipes)
        shapes = _latent(model, net), _by(model.image)
        rows.append((model.name, f"{parameters(net)['all']:,}", *shapes, explicit, norm_free, recipes))
    console.print(table("", COLUMNS, rows))
    console.print("Describe one: banach models NAME.  The explicit twin: banach train --max-steps 0.")


def _describe(model: Model) -> None:
    net = _fresh(model)
    sizes = ", ".join(f"{name} {count:,}" for name, count in parameters(net).items())
    console.print(f"{model.name}: {model.description}")
    console.print(f"images {_by(model.image)}, {model.classes} classes, latent {_latent(model, net) or '-'}")
    console.print(f"parameters: {sizes}\n")
    settings = {one.name: one.name for one in dataclasses.fields(Recipe)}
    settings |= {"momentum": "momentum (- is Adam)", "augment": "augment (cifar10 only)"}
    values = [(said, *(getattr(one, name) for one in model.recipes.values())) for name, said in settings.items()]
    console.print(table("Recipes, the default one first", ("setting", *model.recipes), values))
    console.print(f"\nLayers:\n{net}\n\nTrain it: banach train --model {model.name} --data NAME")


def _latent(model: Model, net: nn.Module) -> str | None:
    """Return the shape of the latent of one image; None if there is no latent."""
    if not isinstance(net, ImplicitNetwork):
        return None
    with torch.no_grad():
        start = net.start(net.Q(torch.zeros(1, *model.image)))
    return " + ".join(_by(tuple(leaf.shape[1:])) for leaf in leaves(start))


def _fresh(model: Model) -> nn.Module:
    """Build the network; the global random state does not change."""
    with torch.random.fork_rng([]):
        return registry.build(model.name).eval()


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape) or "1"
