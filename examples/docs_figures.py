"""Draw the figures of docs/idea.md: an implicit network, its convergence, its solvers, its gradients.

    python examples/docs_figures.py [--out docs/images]

Every curve is computed here, on a CPU, in a few seconds.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from banach import JFB, Anderson, Broyden, ImplicitNetwork, Neumann, Picard, Tolerance, diagnose, solve

BLUE, ORANGE, GREEN = "#3366cc", "#dd7722", "#228855"


class R(nn.Module):
    """u, v -> tanh(g W u + v), W orthogonal, so that |dR/du| is at most g."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(width, width, bias=False), gain
        nn.init.orthogonal_(self.linear.weight)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(self.gain * self.linear(u) + v)


def network() -> Any:
    """Draw d -> Q -> R, whose output returns to its input -> S -> y."""
    figure, axes = plt.subplots(figsize=(6.4, 2.0))
    for x, name in ((1.4, "Q"), (3.6, "R"), (5.8, "S")):
        axes.add_patch(plt.Rectangle((x, 0.5), 1, 1, facecolor="#e8eef9", edgecolor=BLUE, linewidth=1.5))
        axes.text(x + 0.5, 1.0, name, ha="center", va="center", fontsize=15)
    arrow = {"arrowstyle": "-|>", "color": "black", "linewidth": 1.3}
    for begin, end, label in ((0.5, 1.4, "d"), (2.4, 3.6, "Q(d)"), (4.6, 5.8, "u*"), (6.8, 7.7, "N(d)")):
        axes.annotate("", (end, 1.0), (begin, 1.0), arrowprops=arrow)
        axes.text((begin + end) / 2, 1.14, label, ha="center", fontsize=11)
    loop = {**arrow, "color": ORANGE, "connectionstyle": "arc3,rad=1.3"}
    axes.annotate("", (3.75, 1.5), (4.45, 1.5), arrowprops=loop)
    axes.text(4.1, 2.12, "u = R(u, Q(d)), until u stops changing", ha="center", fontsize=11, color=ORANGE)
    axes.set(xlim=(0.3, 7.9), ylim=(0.3, 2.4))
    axes.axis("off")
    return figure


def cobweb() -> Any:
    """Draw the iterations u <- T(u) of a map that contracts, and of one that does not."""
    figure, panels = plt.subplots(1, 2, figsize=(6.4, 3.0))
    for axes, slope, title in ((panels[0], -0.7, "|T'| < 1: converges"), (panels[1], -1.15, "|T'| > 1: does not")):
        x = torch.linspace(-1.5, 1.5, 50)
        u, path = 0.9 if slope > -1 else 0.35, []
        for _ in range(9):
            path += [(u, u), (u, slope * u)]
            u = slope * u
        axes.plot(x, x, color="gray", linewidth=1, label="u")
        axes.plot(x, slope * x, color=BLUE, label="T(u)")
        axes.plot(*zip(*path, strict=True), color=ORANGE, linewidth=1.2, label="iteration")
        axes.plot(0, 0, "o", color="black")
        axes.set(title=title, xlabel="u", xlim=(-1.3, 1.3), ylim=(-1.3, 1.3))
    panels[0].legend(fontsize=8, loc="lower left")
    return figure


def residuals() -> Any:
    """Draw the residual of eight samples against the step, for three solvers on one map."""
    torch.manual_seed(0)
    W = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0]
    W = W @ torch.diag(torch.linspace(0, 0.95, 64, dtype=torch.float64)) @ W.T
    v = torch.randn(8, 64, dtype=torch.float64) * torch.logspace(-1, 0.5, 8, dtype=torch.float64)[:, None]
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    for solver, color in ((Picard(), BLUE), (Anderson(5), ORANGE), (Broyden(10), GREEN)):
        tolerance = Tolerance(atol=1e-6, max_steps=400)
        found = solve(
            lambda z: torch.tanh(z @ W.T + v), torch.zeros_like(v), solver, tolerance=tolerance, record=True
        )
        assert found.trace is not None
        for sample, steps in enumerate(found.steps.tolist()):
            label = type(solver).__name__ if sample == 0 else None
            axes.semilogy(range(1, steps + 1), found.trace[:steps, sample], color=color, linewidth=1, label=label)
            axes.plot(steps, found.residual[sample], "o", color=color, markersize=3)
    axes.axhline(1e-6, color="gray", linewidth=1, linestyle=":")
    axes.set(xlabel="evaluations of T", ylabel="residual |T(u) - u|")
    axes.legend(fontsize=9)
    return figure


def gradients() -> Any:
    """Draw the angle between cheap and exact gradients against the contraction factor."""
    modes = (JFB(), Neumann(1), Neumann(3))
    gains, cosines = torch.linspace(0.1, 0.95, 8), []
    for gain in gains.tolist():
        torch.manual_seed(0)
        net = ImplicitNetwork(nn.Linear(8, 32), R(32, gain), nn.Linear(32, 4)).double()
        net.tolerance = Tolerance(atol=1e-9, max_steps=1000)
        d, target = torch.randn(16, 8).double(), torch.randn(16, 4).double()
        loss = partial(nn.functional.mse_loss, target=target)
        cosines.append([check.parts["R"].cosine for check in diagnose.descent_checks(net, d, loss, modes=modes)])
    figure, axes = plt.subplots(figsize=(6.4, 3.0))
    for mode, color, values in zip(modes, (BLUE, ORANGE, GREEN), zip(*cosines, strict=True), strict=True):
        axes.plot(gains, values, "o-", color=color, markersize=4, label=str(mode))
    axes.set(xlabel="bound on |dR/du|", ylabel="cosine with the exact gradient of R", ylim=(0, 1.05))
    axes.legend(fontsize=9)
    return figure


def main() -> None:
    """Write the four figures as SVG files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "images")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"svg.hashsalt": "banach", "svg.fonttype": "none"})  # the same bytes at every run
    for draw in (network, cobweb, residuals, gradients):
        figure = draw()
        figure.savefig(out / f"{draw.__name__}.svg", bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
        print(out / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main()
