"""R that contracts by gamma: a 1-Lipschitz map scaled, and the paper's two-stream operator."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from banach import checks
from banach.latent import Latent, map_leaves
from banach.nn.lipschitz import Lipschitz

Activation = Callable[[], nn.Module]
Affine = Callable[[int, float], nn.Module]  # makes one affine map: features in, Lipschitz bound


class Scaled(nn.Module):
    """u, v -> gamma R(u, v): contracts by gamma if R is 1-Lipschitz in u. The paper's MNIST and SVHN networks."""

    def __init__(self, R: nn.Module, gamma: float) -> None:
        super().__init__()
        self.R, self.gamma = R, checks.number("gamma", gamma, below=1)

    def forward(self, u: Latent, v: Latent) -> Latent:
        return map_leaves(lambda leaf: self.gamma * leaf, self.R(u, v))

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}"


class ScaledInput(Scaled):
    """u, v -> R(gamma u, v): contracts likewise, with the data at full strength. The paper's CIFAR-10 network."""

    def forward(self, u: Latent, v: Latent) -> Latent:
        return self.R(map_leaves(lambda leaf: self.gamma * leaf, u), v)


class TwoStream(nn.Module):
    """R(u, v) = F(gamma L(u) + D(v)):  |dR/du| <= gamma,  |dR/dv| <= l^k.

    L, the latent stream, and F, the final stream after the merge, are 1-Lipschitz; D, the data stream, has k
    affine maps that are l-Lipschitz. `TwoStream.linear` and `TwoStream.conv` build all three out of affine maps
    and activations in turn; other modules that keep the bounds may be given instead. Activations must be
    1-Lipschitz: ReLU, LeakyReLU and tanh are, GELU and SiLU are not. D is evaluated at every step; with
    `layers=(k, 0, m)` it is empty, and Q is the data stream.
    (The paper's figure of a possible architecture for T.)
    """

    def __init__(
        self, latent: nn.Module, data: nn.Module, final: nn.Module | None = None, *, gamma: float
    ) -> None:
        super().__init__()
        self.latent, self.data, self.final = latent, data, nn.Identity() if final is None else final
        self.gamma = checks.number("gamma", gamma, below=1)

    @staticmethod
    def linear(
        width: int,
        data_width: int | None = None,
        *,
        gamma: float = 0.9,
        ell: float = 1.0,
        layers: tuple[int, int, int] = (1, 1, 1),
        activation: Activation = nn.ReLU,
    ) -> "TwoStream":
        """For vectors. `layers` counts the affine maps of the latent, data and final streams."""

        def affine(features: int, bound: float) -> nn.Module:
            return Lipschitz(nn.Linear(features, width), bound)

        return TwoStream(*_streams(affine, (width, data_width or width), layers, ell, activation), gamma=gamma)

    @staticmethod
    def conv(
        channels: int,
        size: tuple[int, int],
        data_channels: int | None = None,
        *,
        kernel: int = 3,
        gamma: float = 0.9,
        ell: float = 1.0,
        layers: tuple[int, int, int] = (1, 1, 1),
        activation: Activation = nn.ReLU,
    ) -> "TwoStream":
        """For images of `size` (height, width), which the convolutions keep."""

        def affine(features: int, bound: float) -> nn.Module:
            return Lipschitz(nn.Conv2d(features, channels, kernel, padding="same"), bound, size=size)

        features = channels, data_channels or channels
        return TwoStream(*_streams(affine, features, layers, ell, activation), gamma=gamma)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.final(torch.add(self.data(v), self.latent(u), alpha=self.gamma))

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}"


def _streams(
    affine: Affine, features: tuple[int, int], layers: tuple[int, int, int], ell: float, activation: Activation
) -> list[nn.Sequential]:
    """Build the three streams: as many affine maps as `layers` says, each with an activation after it."""
    width, source = features
    if len(layers) != 3 or min(layers) < 0 or (layers[1] == 0 and source != width):
        raise ValueError(
            f"layers must count the affine maps of the latent, data and final streams, got {layers}; "
            f"a data stream that turns {source} features into {width} needs at least one"
        )

    streams = []
    for count, first, bound in zip(layers, (width, source, width), (1.0, ell, 1.0), strict=True):
        widths = [first, *[width] * count][:count]
        streams.append(nn.Sequential(*[part for n in widths for part in (affine(n, bound), activation())]))
    return streams
