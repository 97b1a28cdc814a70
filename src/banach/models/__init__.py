"""Named networks: the paper's three, their explicit twins, ResNet-56, one for digits; and your own."""

from banach.models.paper import ResNet, cifar10, digits, mnist, resnet56, svhn

# isort: split
# `banach models` lists networks in this order: the paper's first.
from banach.models.blocks import Image, LatentBlock, LatentResNet, Parts, Shortcut
from banach.models.mdeq import mdeq, mdeq_tiny, unrolled
from banach.models.mon import mon, mon_fc, mon_large, mon_tiers
from banach.models.ode import ODENet, anode, node
from banach.models.registry import (
    Constant, Cosine, Model, OneCycle, Recipe, Schedule, Steps, build, get, names, recipe, register,
)  # fmt: skip

__all__ = [
    "Constant", "Cosine", "Image", "LatentBlock", "LatentResNet", "Model", "ODENet", "OneCycle", "Parts", "Recipe",
    "ResNet", "Schedule", "Shortcut", "Steps", "anode", "build", "cifar10", "digits", "get", "mdeq", "mdeq_tiny",
    "mnist", "mon", "mon_fc", "mon_large", "mon_tiers", "names", "node", "recipe", "register", "resnet56", "svhn",
    "unrolled",
]  # fmt: skip
