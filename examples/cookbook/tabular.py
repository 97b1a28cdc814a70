"""An implicit MLP on tabular data: 30 measurements of a tumour -> benign or malignant.

R(u, v) = tanh(W u + v) with |W| <= 0.9 converges from every start. Each sample takes the steps that it needs.

    python -m examples.cookbook.tabular
"""

import matplotlib.pyplot as plt
import torch
from examples.cookbook.recipe import BLUE, ORANGE, main, train
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from banach import JFB, ImplicitNetwork, Tolerance
from banach.nn import Lipschitz

WIDTH = 32


class R(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Lipschitz(nn.Linear(WIDTH, WIDTH, bias=False), 0.9)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(self.linear(u) + v)


def data() -> list[Tensor]:
    """Return standardised training inputs, test inputs, training targets, test targets."""
    table = load_breast_cancer()
    parts = train_test_split(table.data, table.target, test_size=0.3, random_state=0)
    d, d_test = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    mean, spread = d.mean(0), d.std(0)
    return [(d - mean) / spread, (d_test - mean) / spread, *map(torch.tensor, parts[2:])]


def run(quick: bool) -> tuple[dict[str, float], Figure]:
    d, d_test, y, y_test = data()
    net = ImplicitNetwork(
        nn.Linear(30, WIDTH), R(), nn.Linear(WIDTH, 2), tolerance=Tolerance(atol=1e-4), backward=JFB()
    )
    losses = train(net.parameters(), lambda: cross_entropy(net(d), y), 5 if quick else 150, 3e-3)
    with torch.no_grad():
        scores, found = net.eval()(d_test, solution=True)
    accuracy = (scores.argmax(1) == y_test).double().mean().item()

    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
    left.plot(losses, color=BLUE)
    left.set(xlabel="training step", ylabel="loss", title=f"test accuracy {accuracy:.1%}", yscale="log")
    steps = found.steps.numpy()
    right.hist(steps, bins=range(steps.min(), steps.max() + 2), color=ORANGE, align="left", rwidth=0.9)
    right.set(xlabel="evaluations of R until converged", ylabel="test samples", title="each sample, its depth")
    return {"test accuracy": accuracy, "mean steps": float(steps.mean()), "most steps": float(steps.max())}, figure


if __name__ == "__main__":
    main(run)
