"""A graph equilibrium: handwritten digits as nodes, joined to their nearest neighbours, few of them labelled.

u = gamma tanh(A u W) + v: every node hears from all others through the fixed point, at any distance. Nodes share
one equation, so `coupled=True`: the whole graph stops at once.

    python -m examples.cookbook.graph
"""

from functools import partial

import matplotlib.pyplot as plt
import torch
from examples.cookbook.recipe import main, train
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.neighbors import kneighbors_graph
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from banach import ImplicitNetwork, Tolerance
from banach.nn import Lipschitz

NODES, LABELLED, WIDTH = 600, 30, 16


class Propagate(nn.Module):
    """R(u, v) = 0.9 tanh(A u W) + v, a contraction: |A| = 1 and |W| <= 1."""

    def __init__(self, A: Tensor) -> None:
        super().__init__()
        self.register_buffer("A", A)
        self.W = Lipschitz(nn.Linear(WIDTH, WIDTH, bias=False), 1.0)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.9 * torch.tanh(self.A @ self.W(u)) + v


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return features, labels, the normalised adjacency matrix, and the labelled nodes."""
    pixels, y = load_digits(return_X_y=True)
    near = kneighbors_graph(pixels[:NODES], 8).toarray()
    joined = torch.tensor(near + near.T > 0, dtype=torch.float32)
    scale = joined.sum(1).rsqrt()
    known = torch.randperm(NODES)[:LABELLED]
    return (
        torch.tensor(pixels[:NODES] / 16).float(),
        torch.tensor(y[:NODES]),
        scale[:, None] * joined * scale,
        known,
    )


def loss(net: nn.Module, d: Tensor, y: Tensor, known: Tensor) -> Tensor:
    return cross_entropy(net(d)[known], y[known])


def accuracy(net: nn.Module, d: Tensor, y: Tensor, known: Tensor) -> tuple[float, Tensor]:
    """Return the accuracy on the nodes without a label, and all predictions."""
    with torch.no_grad():
        guess = net.eval()(d).argmax(1)
    hidden = torch.ones(NODES, dtype=torch.bool).index_fill(0, known, False)
    return (guess == y)[hidden].double().mean().item(), guess


def run(quick: bool) -> tuple[dict[str, float], Figure]:
    d, y, A, known = data()
    numbers = {}
    for name, steps in (("without the graph", 0), ("with the graph", 60)):
        torch.manual_seed(0)
        Q, S = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
        tolerance = Tolerance(atol=1e-4, max_steps=steps)
        net = (
            nn.Sequential(Q, S)
            if not steps
            else ImplicitNetwork(Q, Propagate(A), S, tolerance=tolerance, coupled=True)
        )
        train(net.parameters(), partial(loss, net, d, y, known), 3 if quick else 120, 1e-2)
        numbers[f"accuracy {name}"], guess = accuracy(net, d, y, known)

    figure, panels = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained")
    plane = PCA(2).fit_transform(d.numpy())
    for axes, color, title in ((panels[0], y, "labels"), (panels[1], guess, "predicted from 30 of them")):
        axes.scatter(*plane.T, c=color, cmap="tab10", s=6, rasterized=True)
        axes.set(title=title, xticks=[], yticks=[], xlabel="first component", ylabel="second component")
    panels[0].scatter(*plane[known].T, facecolors="none", edgecolors="black", s=30, label="known")
    panels[0].legend(fontsize=8)
    return numbers, figure


if __name__ == "__main__":
    main(run)
