"""A latent at two resolutions: fine and coarse feature maps of a digit that feed each other until both settle.

The latent is a dict of tensors. `solve` treats it as one vector per sample: one residual, one depth.

    python -m examples.cookbook.multiscale
"""

from itertools import pairwise

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from examples.cookbook.recipe import BLUE, GREEN, ORANGE, main, train
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

from banach import Anderson, ImplicitNetwork, Tolerance, solve
from banach.nn import Lipschitz

CHANNELS = 12
Scales = dict[str, Tensor]


class Q(nn.Module):
    """Image (1, 8, 8) -> fine (C, 8, 8) and coarse (C, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(1, CHANNELS, 3, padding=1), nn.Conv2d(1, CHANNELS, 3, 2, 1)

    def forward(self, d: Tensor) -> Scales:
        return {"fine": self.fine(d), "coarse": self.coarse(d)}


class R(nn.Module):
    """Each scale from itself and from the other, tanh(convolutions + data). The bounds make R a contraction:
    upsampling doubles the norm of a map and pooling halves it, so
    |dR/du| <= |[[0.45, 0.44], [0.45, 0.45]]| < 0.9."""

    def __init__(self) -> None:
        super().__init__()
        bounds = {"fine": (0.45, 8), "coarse": (0.45, 4), "up": (0.22, 4), "down": (0.9, 8)}
        self.convs = nn.ModuleDict({name: conv(*bound) for name, bound in bounds.items()})

    def forward(self, u: Scales, v: Scales) -> Scales:
        up = F.interpolate(self.convs["up"](u["coarse"]), scale_factor=2)
        down = F.avg_pool2d(self.convs["down"](u["fine"]), 2)
        fine, coarse = self.convs["fine"](u["fine"]) + up, self.convs["coarse"](u["coarse"]) + down
        return {"fine": torch.tanh(fine + v["fine"]), "coarse": torch.tanh(coarse + v["coarse"])}


def conv(bound: float, side: int) -> nn.Module:
    """Return a convolution whose norm on maps of side x side is at most `bound`."""
    return Lipschitz(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), bound, size=(side, side))


class S(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * CHANNELS * 16, 10)

    def forward(self, u: Scales) -> Tensor:
        return self.linear(torch.cat((F.max_pool2d(u["fine"], 2), u["coarse"]), 1).flatten(1))


def changes(net: ImplicitNetwork, d: Tensor) -> dict[str, list[float]]:
    """Return the size of the last change at each scale, step by step."""
    v, iterates = net.Q(d), []
    tolerance = Tolerance(atol=1e-6, max_steps=100)
    solve(net.R, net.start(v), inputs=(v,), tolerance=tolerance, on_step=lambda k, u: iterates.append(u))
    pairs = list(pairwise(iterates))
    return {name: [(b[name] - a[name]).square().mean().sqrt().item() for a, b in pairs] for name in v}


def run(quick: bool) -> tuple[dict[str, float], Figure]:
    pixels, labels = load_digits(return_X_y=True)
    d, y = torch.tensor(pixels / 16).float().view(-1, 1, 8, 8), torch.tensor(labels)
    net = ImplicitNetwork(Q(), R(), S(), solver=Anderson(), tolerance=Tolerance(atol=1e-3))

    def loss() -> Tensor:
        batch = torch.randint(1300, (64,))
        return F.cross_entropy(net(d[batch]), y[batch])

    losses = train(net.parameters(), loss, 3 if quick else 250, 5e-3)
    with torch.no_grad():
        scores, found = net.eval()(d[1300:], solution=True)
        sizes = changes(net, d[1300:1301])
    accuracy = (scores.argmax(1) == y[1300:]).double().mean().item()

    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
    left.plot(losses, color=BLUE, linewidth=0.8)
    left.set(xlabel="training step", ylabel="loss", title=f"test accuracy {accuracy:.1%}")
    for (name, values), color in zip(sizes.items(), (ORANGE, GREEN), strict=True):
        right.semilogy(range(1, len(values) + 1), values, "o-", markersize=3, color=color, label=name)
    right.set(xlabel="step", ylabel="change of the latent (RMS)", title="both scales settle together")
    right.legend()
    return {"test accuracy": accuracy, "mean steps": found.steps.double().mean().item()}, figure


if __name__ == "__main__":
    main(run)
