"""A small network for tests of backward modes, its gradient, and the same by a plain loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from banach import ImplicitNetwork, Tolerance
from banach.backward import Mode
from networks import by_hand
from problems import normal

TIGHT = Tolerance(atol=1e-13, max_steps=999)
ADJOINT = Tolerance(atol=0, rtol=1e-10, max_steps=200)
IMAGES, LATENTS = normal(8, 3, seed=1), normal(3, 6, seed=1)


class Cell(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6) if norm else nn.Identity()

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.norm(self.linear(u) + v))


def network(make: Callable[[], Any], mode: Mode, Q: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    R, S = make(), nn.Linear(6, 2)
    Q = nn.Linear(3, 6) if Q is None else Q
    return ImplicitNetwork(Q, R, S, tolerance=TIGHT, backward=mode).double()


def gradient(net: Any, x: Tensor = IMAGES, output: Tensor | None = None) -> Tensor:
    """The gradient of a loss of the output, by default the network's own, as one vector."""
    net.zero_grad()
    (net(x) if output is None else output).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def check_exact(net: Any, x: Tensor = IMAGES) -> None:
    found, wanted = gradient(net, x), gradient(net, output=by_hand(net, x))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
