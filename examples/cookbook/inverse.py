"""An inverse problem with a learned proximal step: find a signal of few jumps from its blurred, noisy version.

u = P(u - tau A'(A u - y)): a gradient step on the data, then a small network P in place of a hand-made proximal
map. P is trained through the fixed point. The answer fits the data whatever P does, unlike that of a plain
network.

    python -m examples.cookbook.inverse
"""

import matplotlib.pyplot as plt
import torch
from examples.cookbook.recipe import BLUE, GRAY, GREEN, ORANGE, main, train
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import conv1d, conv_transpose1d, mse_loss

from banach import ImplicitNetwork, Tolerance

LENGTH, NOISE, TAU = 64, 0.05, 1.0


def blur() -> Tensor:
    """Return A: a moving average of Gaussian weights, rows summing to 1."""
    place = torch.arange(LENGTH, dtype=torch.float32)
    weights = torch.exp(-((place[:, None] - place) ** 2) / (2 * 2.5**2))
    return weights / weights.sum(1, keepdim=True)


def signals(count: int) -> Tensor:
    """Return signals that are constant between a few jumps."""
    jumps = torch.randn(count, LENGTH) * (torch.rand(count, LENGTH) < 0.06)
    return jumps.cumsum(1)


class Restore(nn.Module):
    """R(u, y) = P(u - tau A'(A u - y)),  P(x) = x - C' e tanh(C x / e).

    P is a gradient step on a learned penalty: quadratic where a filter responds weakly, linear where strongly, so
    that jumps stay. Filters C with |C| <= 1 make P nonexpansive.
    """

    def __init__(self, A: Tensor, filters: int = 8) -> None:
        super().__init__()
        self.A: Tensor
        self.register_buffer("A", A)
        self.weight = nn.Parameter(torch.randn(filters, 1, 5) * 0.1 + torch.tensor([0.0, -1, 1, 0, 0]))
        self.log_e = nn.Parameter(torch.full((filters, 1), -3.0))

    def prox(self, x: Tensor) -> Tensor:
        C = self.weight / self.weight.abs().sum(2).square().sum().sqrt()  # at least its norm
        e = self.log_e.exp()
        inner = e * torch.tanh(conv1d(x[:, None], C, padding=2) / e)
        return x - conv_transpose1d(inner, C, padding=2)[:, 0]

    def forward(self, u: Tensor, y: Tensor) -> Tensor:
        return self.prox(u - TAU * (u @ self.A.T - y) @ self.A)


def ridge(A: Tensor, y: Tensor) -> Tensor:
    """Return the best reconstruction by least squares with a penalty on |u|^2."""
    answers = [
        torch.linalg.solve(A.T @ A + weight * torch.eye(LENGTH), (y @ A).T).T for weight in (0.01, 0.03, 0.1)
    ]
    return min(answers, key=lambda u: mse_loss(u @ A.T, y).sub(NOISE**2).abs().item())  # fits as well as the noise


def run(quick: bool) -> tuple[dict[str, float], Figure]:
    A = blur()
    net = ImplicitNetwork(nn.Identity(), Restore(A), nn.Identity(), tolerance=Tolerance(atol=3e-4, max_steps=500))

    def loss() -> Tensor:
        truth = signals(64)
        return mse_loss(net(truth @ A.T + NOISE * torch.randn_like(truth)), truth)

    losses = train(net.parameters(), loss, 2 if quick else 80, 3e-2)
    truth = signals(200)
    y = truth @ A.T + NOISE * torch.randn_like(truth)
    with torch.no_grad():
        answer, found = net(y, solution=True)
    by_ridge = ridge(A, y)

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), width_ratios=(1, 2), layout="constrained")
    left.semilogy(losses, color=BLUE, linewidth=0.8)
    left.set(xlabel="training step", ylabel="mean squared error")
    for values, color, name in (
        (y, GRAY, "blurred, noisy"),
        (truth, "black", "truth"),
        (by_ridge, ORANGE, "ridge"),
    ):
        right.plot(values[3], color=color, linewidth=1, label=name)
    right.plot(answer[3], color=GREEN, label="fixed point")
    right.set(xlabel="place", ylabel="signal")
    right.legend(fontsize=8)
    errors = {
        "error of the fixed point": mse_loss(answer, truth).item(),
        "error of ridge": mse_loss(by_ridge, truth).item(),
    }
    return {**errors, "mean steps": found.steps.double().mean().item()}, figure


if __name__ == "__main__":
    main(run)
