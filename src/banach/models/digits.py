"""A network for scikit-learn's digits, 8x8 grey images: 17,986 parameters, latent 24x4x4, trained in seconds."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from banach.models.blocks import ConvPair, Image, LatentResNet, Parts
from banach.models.registry import Cosine, Recipe, register

CHANNELS = 24


def digits(image: Image = (1, 8, 8), classes: int = 10, *, batch_norm: bool = True) -> Parts:
    """Return Q, R and S with 3,720, 10,416 and 3,850 parameters.

    With gamma = .4 Picard's iteration reaches an RMS of 1e-4 in about 13 steps after training.
    """
    channels, height, width = image
    if min(height, width) < 2:
        raise ValueError(f"Q pools 2x2 pixels, got images of {height}x{width}; use larger ones")
    linear = nn.Linear(CHANNELS * (height // 2) * (width // 2), classes)
    return Parts(
        Q=ConvPair(channels, CHANNELS, pools=(1, 2)),
        R=LatentResNet(CHANNELS, blocks=1, gamma=0.4, batch_norm=batch_norm),
        S=nn.Sequential(OrderedDict(drop=nn.Dropout2d(0.3), flat=nn.Flatten(), linear=linear)),
    )


# Chosen by four-fold cross-validation on the training and validation images, where it reaches 99.4 per cent.
DEFAULT = Recipe(lr=7e-3, weight_decay=1e-4, label_smoothing=0.1, epochs=20, batch_size=64, schedule=Cosine())

register(
    "digits",
    digits,
    description="a small network for scikit-learn's digits: 17,986 parameters, latent 24x4x4",
    image=(1, 8, 8),
    recipes={"default": DEFAULT},
    channels_last=True,
)
