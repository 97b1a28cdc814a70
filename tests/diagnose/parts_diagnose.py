"""Small networks in float64, dense references, and a guard that nothing was changed by measuring."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from banach import ImplicitNetwork, Tolerance
from banach.nn import Dropout
from networks import ConvR
from problems import normal

TIGHT = Tolerance(atol=1e-13, max_steps=2000)
DATA = normal(6, 4, seed=9)


class TanhR(nn.Module):
    """tanh(A u + v), batch norm and dropout after it where asked; |A| = gain."""

    def __init__(self, n: int, gain: float, *, norm: bool, drop: float) -> None:
        super().__init__()
        self.linear = nn.Linear(n, n)
        with torch.no_grad():
            self.linear.weight.mul_(gain / torch.linalg.matrix_norm(self.linear.weight, 2))
        self.norm = nn.BatchNorm1d(n) if norm else nn.Identity()
        self.drop = Dropout(drop)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.drop(self.norm(torch.tanh(self.linear(u) + v)))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def tiny(n: int = 5, gain: float = 0.6, *, norm: bool = False, drop: float = 0.0, **options: Any) -> Any:
    """A network of 4 data, n latent and 3 output numbers."""
    with seeded(0):
        Q: nn.Module = nn.Linear(4, n)
        S: nn.Module = nn.Linear(n, 3)
        if drop:
            Q, S = nn.Sequential(Q, nn.Dropout(drop)), nn.Sequential(nn.Dropout(drop), S)
        R = TanhR(n, gain, norm=norm, drop=drop)
    return ImplicitNetwork(Q, R, S, **{"tolerance": TIGHT, **options}).double()


def conv(drop: float = 0.0) -> Any:
    """A convolutional network for the digits, latent (2, 4, 4), whose running statistics have seen data."""
    with seeded(3):
        Q = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.AvgPool2d(2))
        S = nn.Sequential(nn.Flatten(), nn.Dropout(drop), nn.Linear(32, 10))
        R = ConvR(2, batch_norm=True, dropout=drop, gamma=0.5)
        net = ImplicitNetwork(Q, R, S, tolerance=TIGHT).double()
        with torch.no_grad():
            for _ in range(5):
                net(digits(32)[0])
    return net


def digits(count: int) -> tuple[Tensor, Tensor]:
    """Real images (count, 1, 8, 8), and their labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:count] / 16).view(-1, 1, 8, 8), torch.tensor(labels[:count])


@contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    """Fail if weights, buffers, gradients, modes or the random state differ afterwards."""
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


def jacobian(T: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """dT/dz as a dense matrix over the whole of z, one row of plain autograd at a time."""
    found: Any = torch.autograd.functional.jacobian(T, z.detach())
    return found.reshape(z.numel(), z.numel())
