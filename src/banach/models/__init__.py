"""Named networks: the paper's three, their explicit twins, ResNet-56, one for digits; and your own."""

from banach.models.blocks import Image, LatentBlock, LatentResNet, Parts, Shortcut
from banach.models.cifar10 import cifar10
from banach.models.digits import digits
from banach.models.mnist import mnist
from banach.models.registry import (
    Constant,
    Cosine,
    Model,
    OneCycle,
    Recipe,
    Schedule,
    Steps,
    build,
    get,
    names,
    recipe,
    register,
)
from banach.models.resnet import ResNet, resnet56
from banach.models.svhn import svhn

__all__ = [
    "Constant",
    "Cosine",
    "Image",
    "LatentBlock",
    "LatentResNet",
    "Model",
    "OneCycle",
    "Parts",
    "Recipe",
    "ResNet",
    "Schedule",
    "Shortcut",
    "Steps",
    "build",
    "cifar10",
    "digits",
    "get",
    "mnist",
    "names",
    "recipe",
    "register",
    "resnet56",
    "svhn",
]
