"""The paper's MNIST network: 54,352 parameters, latent 32x9x9."""

from __future__ import annotations

from dataclasses import replace

from banach.models.blocks import ConvPair, Image, LatentResNet, Parts, readout
from banach.models.registry import Cosine, Recipe, register
from banach.solve import WorstPixel


def mnist(image: Image = (1, 28, 28), classes: int = 10, *, batch_norm: bool = True) -> Parts:
    """Return Q, R and S with 4,896, 36,992 and 12,464 parameters."""
    channels, height, width = image
    return Parts(
        Q=ConvPair(channels, 32, pools=(3, 1)),
        R=LatentResNet(32, blocks=2, gamma=0.5, batch_norm=batch_norm),
        S=readout(32, height // 3, width // 3, classes),
    )


RELEASED = Recipe(
    eps=1e-1, max_steps=50, norm=WorstPixel(), lr=2e-4, weight_decay=1e-6, epochs=100, batch_size=100
)
RECIPES = {
    "released": RELEASED,
    "paper": replace(RELEASED, eps=1e-4, lr=1e-4),  # weight decay and epochs are not printed
    "jacobian": RELEASED,
    "decayed": replace(RELEASED, lr=1e-3, epochs=30, schedule=Cosine()),
}

register(
    "mnist",
    mnist,
    description="the paper's MNIST network: 54,352 parameters, latent 32x9x9",
    image=(1, 28, 28),
    recipes=RECIPES,
    channels_last=True,
)
