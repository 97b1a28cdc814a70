"""R scaled by gamma: a contraction from a map that is merely 1-Lipschitz in u."""

from __future__ import annotations

from torch import nn

from banach.latent import Latent, map_leaves


class Scaled(nn.Module):
    """u, v -> gamma R(u, v), which contracts by gamma if R is 1-Lipschitz in u. The form of the paper's MNIST
    and SVHN networks."""

    def __init__(self, R: nn.Module, gamma: float) -> None:
        super().__init__()
        self.R, self.gamma = R, checked_gamma(gamma)

    def forward(self, u: Latent, v: Latent) -> Latent:
        return map_leaves(lambda leaf: self.gamma * leaf, self.R(u, v))

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}"


class ScaledInput(nn.Module):
    """u, v -> R(gamma u, v), which contracts by gamma if R is 1-Lipschitz in u, and leaves the data at full
    strength. The form of the paper's CIFAR-10 network."""

    def __init__(self, R: nn.Module, gamma: float) -> None:
        super().__init__()
        self.R, self.gamma = R, checked_gamma(gamma)

    def forward(self, u: Latent, v: Latent) -> Latent:
        return self.R(map_leaves(lambda leaf: self.gamma * leaf, u), v)

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}"


def checked_gamma(gamma: float) -> float:
    """Refuse a contraction factor outside [0, 1)."""
    if not 0.0 <= gamma < 1.0:
        raise ValueError(f"gamma must be at least 0 and below 1, got {gamma}")
    return float(gamma)
