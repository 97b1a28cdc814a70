"""Starting near the answer: from the previous frame of a slowly changing input, and from a learned guess.

python examples/warm_starts.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from banach import Implicit, ImplicitNetwork, Tolerance


class Layer(nn.Module):
    """R(u, v) = tanh(W u + v) with a slow contraction."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weight = torch.randn(width, width)
        self.weight = nn.Parameter(0.95 * weight / torch.linalg.matrix_norm(weight, 2))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(u @ self.weight.T + 0.3 * v)


def frames(count: int) -> list[Tensor]:
    """Inputs that drift a little from one to the next."""
    d = torch.randn(16, 8)
    return [d + 0.02 * k * torch.ones(8) for k in range(count)]


@torch.no_grad()
def previous_frame(net: ImplicitNetwork) -> tuple[float, float]:
    """Mean steps from zeros, and from the fixed point of the frame before."""
    cold, warm, u = 0.0, 0.0, None
    for d in frames(10):
        cold += net.latent(d)[1].steps.float().mean().item() / 10
        u, found = net.latent(d, z0=u)
        warm += found.steps.float().mean().item() / 10
    return cold, warm


def learned_guess(net: ImplicitNetwork) -> tuple[float, float]:
    """Mean steps from zeros, and from a small network trained, by a loss of its own, to predict u*."""
    d = torch.randn(512, 8)
    u, found = net.latent(d)
    guess = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
    optimizer = torch.optim.Adam(guess.parameters(), 1e-2)
    v = net.Q(d).detach()
    for _ in range(300):
        loss = (guess(v) - u.detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.start = guess  # no gradient of the task's loss reaches it
    return found.steps.float().mean().item(), net.latent(d)[1].steps.float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    tolerance = Tolerance(atol=1e-4, max_steps=200)
    net = ImplicitNetwork(nn.Linear(8, 32), Layer(32), nn.Linear(32, 1), tolerance=tolerance, backward=Implicit())
    print("steps from zeros {:.1f}, from the previous frame {:.1f}".format(*previous_frame(net)))
    print("steps from zeros {:.1f}, from a learned guess {:.1f}".format(*learned_guess(net)))


if __name__ == "__main__":
    main()
