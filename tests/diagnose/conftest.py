"""Small networks in float64, dense references, and a guard that nothing was changed by measuring."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import banach
from banach.nn import Dropout, Dropout2d

TIGHT = banach.Tolerance(atol=1e-13, max_steps=2000)


class TanhR(nn.Module):
    """tanh(A u + v), batch norm and dropout after it where asked; |A| = gain."""

    def __init__(self, n: int, gain: float, *, norm: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(n, n)
        with torch.no_grad():
            self.linear.weight.mul_(gain / torch.linalg.matrix_norm(self.linear.weight, 2))
        self.norm = nn.BatchNorm1d(n) if norm else nn.Identity()
        self.drop = Dropout(drop)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.drop(self.norm(torch.tanh(self.linear(u) + v)))


class ConvR(nn.Module):
    """The paper's residual block with batch norm, at a few channels: gamma BN(x + res(x)), x = u + v."""

    def __init__(self, channels: int, gamma: float, *, norm: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.two = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels, affine=False) if norm else nn.Identity()
        self.drop = Dropout2d(drop)
        self.gamma = gamma

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        x = u + v
        inner = nn.functional.leaky_relu(self.one(x), 0.1)
        return self.gamma * self.norm(x + self.drop(nn.functional.leaky_relu(self.two(inner), 0.1)))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@pytest.fixture
def tiny() -> Callable[..., banach.ImplicitNetwork]:
    """A network of 4 data, n latent and 3 output numbers, float64."""

    def make(
        n: int = 5, gain: float = 0.6, *, norm: bool = False, drop: float = 0.0, seed: int = 0, **options: Any
    ) -> banach.ImplicitNetwork:
        with seeded(seed):
            Q: nn.Module = nn.Linear(4, n)
            S: nn.Module = nn.Linear(n, 3)
            if drop:
                Q, S = nn.Sequential(Q, nn.Dropout(drop)), nn.Sequential(nn.Dropout(drop), S)
            options.setdefault("tolerance", TIGHT)
            return banach.ImplicitNetwork(Q, TanhR(n, gain, norm=norm, drop=drop), S, **options).double()

    return make


@pytest.fixture
def conv() -> Callable[..., banach.ImplicitNetwork]:
    """A convolutional network for the digits, float64: latent (channels, 4, 4)."""

    def make(
        channels: int = 2, gamma: float = 0.5, *, norm: bool = True, drop: float = 0.0, **options: Any
    ) -> banach.ImplicitNetwork:
        with seeded(3):
            Q = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.AvgPool2d(2))
            S = nn.Sequential(nn.Flatten(), nn.Dropout(drop), nn.Linear(16 * channels, 10))
            options.setdefault("tolerance", TIGHT)
            R = ConvR(channels, gamma, norm=norm, drop=drop)
            net = banach.ImplicitNetwork(Q, R, S, **options).double()
            with torch.no_grad():  # running statistics of a network that has seen data
                for _ in range(5):
                    net(digits_batch(32)[0])
            return net

    return make


def digits_batch(count: int) -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:count] / 16).view(-1, 1, 8, 8), torch.tensor(labels[:count])


@pytest.fixture
def digits() -> Callable[[int], tuple[Tensor, Tensor]]:
    """Real images (count, 1, 8, 8) in float64, and their labels."""
    return digits_batch


@pytest.fixture
def data() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


@pytest.fixture
def unchanged() -> Callable[..., Any]:
    """`with unchanged(net):` fails if weights, buffers, gradients, modes or random state differ after it."""

    @contextmanager
    def guard(*modules: nn.Module) -> Iterator[None]:
        before = [copy.deepcopy(module.state_dict()) for module in modules]
        modes = [[part.training for part in module.modules()] for module in modules]
        random = torch.get_rng_state()
        yield
        assert torch.equal(torch.get_rng_state(), random), "the global random state moved"
        for module, state, mode in zip(modules, before, modes, strict=True):
            for name, value in module.state_dict().items():
                assert torch.equal(value, state[name]), f"{name} changed"
            assert mode == [part.training for part in module.modules()]
            assert all(weight.grad is None for weight in module.parameters())

    return guard


@pytest.fixture
def jacobian() -> Callable[..., Tensor]:
    """dT/dz as a dense matrix over the whole of z, one row of plain autograd at a time."""

    def dense(T: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        found: Any = torch.autograd.functional.jacobian(T, z.detach())
        return found.reshape(z.numel(), z.numel())

    return dense
