"""Hyper-gradients: tune one ridge penalty per feature by descending the validation loss.

w(lambda) minimises |Xw - y|^2 / n + sum_i lambda_i w_i^2. One gradient step in w is the map T; its fixed point
is w. `Implicit` gives d(validation loss)/d(lambda), which is compared with the closed form.

    python -m examples.cookbook.ridge
"""

import matplotlib.pyplot as plt
import torch
from examples.cookbook.recipe import BLUE, ORANGE, main
from matplotlib.figure import Figure
from torch import Tensor

from banach import Anderson, Implicit, Tolerance, fixed_point

FEATURES, USEFUL, ROWS = 30, 5, 40


def data() -> tuple[Tensor, ...]:
    """Return X and y for training, then for validation; five features matter, the others are noise."""
    w = torch.zeros(FEATURES, dtype=torch.float64)
    w[:USEFUL] = 1.0
    X = torch.randn(2 * ROWS, FEATURES, dtype=torch.float64)
    y = X @ w + 0.5 * torch.randn(2 * ROWS, dtype=torch.float64)
    return X[:ROWS], y[:ROWS], X[ROWS:], y[ROWS:]


def fit(X: Tensor, y: Tensor, penalty: Tensor) -> Tensor:
    """Return w(penalty), differentiable in the penalty. One problem is one sample: w[None]."""
    curvature, pull = 2 * X.T @ X / len(X), 2 * X.T @ y / len(X)
    step = 1 / (torch.linalg.matrix_norm(curvature, 2) + 2 * penalty.max()).detach()

    def T(w: Tensor) -> Tensor:
        return w - step * (w @ curvature - pull + 2 * penalty * w)

    tolerance = Tolerance(atol=1e-12, max_steps=20000)
    start = torch.zeros(1, X.shape[1], dtype=X.dtype)
    return fixed_point(T, start, solver=Anderson(memory=10), tolerance=tolerance, backward=Implicit())[0]


def closed_form(X: Tensor, y: Tensor, penalty: Tensor) -> Tensor:
    return torch.linalg.solve(X.T @ X / len(X) + penalty.diag(), X.T @ y / len(X))


def run(quick: bool) -> tuple[dict[str, float], Figure]:
    X, y, X_valid, y_valid = data()
    log_penalty = torch.full((FEATURES,), -2.0, dtype=torch.float64, requires_grad=True)

    def validation(w: Tensor) -> Tensor:
        return (X_valid @ w - y_valid).square().mean()

    gradients = [
        torch.autograd.grad(validation(find(X, y, log_penalty.exp())), log_penalty)[0]
        for find in (fit, closed_form)
    ]
    error = ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item()
    optimizer = torch.optim.Adam([log_penalty], 0.2)
    losses = []
    for _ in range(3 if quick else 60):
        optimizer.zero_grad()
        loss = validation(fit(X, y, log_penalty.exp()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    grid = torch.logspace(-4, 1, 30, dtype=torch.float64)
    shared = [validation(closed_form(X, y, value.expand(FEATURES))).item() for value in grid]

    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
    left.plot(losses, color=BLUE, label="one penalty per feature")
    left.axhline(min(shared), color=ORANGE, linestyle="--", label="best shared penalty (grid)")
    left.set(xlabel="hyper-gradient step", ylabel="validation loss", ylim=(0, None))
    left.legend(fontsize=8)
    colors = [BLUE if k < USEFUL else ORANGE for k in range(FEATURES)]
    right.bar(range(FEATURES), log_penalty.detach().div(torch.tensor(10.0).log()).tolist(), color=colors)
    right.set(xlabel="feature (the first five matter)", ylabel="log10 of its penalty")
    return {
        "error of the hyper-gradient": error,
        "validation loss": losses[-1],
        "best shared": min(shared),
    }, figure


if __name__ == "__main__":
    main(run)
