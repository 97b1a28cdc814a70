"""Optimal control as a layer: plan by a fixed point, and learn what an expert cares about from plans.

A cart with position and speed moves by x' = F x + G u. The plan u_1 .. u_H minimises sum |x_t|^2_w + |u_t|^2.
One gradient step on the plan is the map T, the best plan its fixed point; its gradient in the weights w is
`Implicit`'s. For this linear-quadratic problem Riccati's recursion gives the same plan: a check. Nothing in T is
specific to it, though: replace `cost` by any smooth cost and dynamics.

    python -m examples.cookbook.control
"""

import matplotlib.pyplot as plt
import torch
from examples.cookbook.recipe import BLUE, GRAY, GREEN, ORANGE, main, train
from matplotlib.figure import Figure
from torch import Tensor

from banach import Anderson, Implicit, Tolerance, fixed_point

HORIZON = 15
F = torch.tensor([[1.0, 0.2], [0.0, 1.0]], dtype=torch.float64)  # position += 0.2 speed
G = torch.tensor([[0.0], [0.2]], dtype=torch.float64)  # speed += 0.2 force


def states(plan: Tensor, x: Tensor) -> Tensor:
    """Return the states after each force of the plan, (batch, horizon, 2)."""
    found = []
    for t in range(HORIZON):
        x = x @ F.T + plan[:, t, None] @ G.T
        found.append(x)
    return torch.stack(found, 1)


def cost(plan: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    return (weights * states(plan, x).square()).sum() + plan.square().sum()


def best_plan(x: Tensor, weights: Tensor) -> Tensor:
    """Return the plan of least cost for every start in x, differentiable in the weights."""
    slope = torch.func.grad(cost)

    def T(plan: Tensor, x: Tensor) -> Tensor:
        return plan - 0.05 * slope(plan, x, weights)

    start = torch.zeros(len(x), HORIZON, dtype=x.dtype)
    tolerance = Tolerance(atol=1e-9, max_steps=2000)
    return fixed_point(T, start, inputs=(x,), solver=Anderson(), tolerance=tolerance, backward=Implicit())


def riccati(x: Tensor, weights: Tensor) -> Tensor:
    """Return the same plan by dynamic programming."""
    W = weights.diag()
    P, gains = W, []
    for _ in range(HORIZON):
        gain = torch.linalg.solve(torch.eye(1, dtype=x.dtype) + G.T @ P @ G, G.T @ P @ F)
        gains.append(gain)
        P = W + F.T @ P @ (F - G @ gain)
    plan = []
    for gain in reversed(gains):
        force = -x @ gain.T
        plan.append(force)
        x = x @ F.T + force @ G.T
    return torch.cat(plan, 1)


def run(quick: bool) -> tuple[dict[str, float], Figure]:
    wanted = torch.tensor([3.0, 0.5], dtype=torch.float64)
    x = torch.randn(16, 2, dtype=torch.float64)
    expert = riccati(x, wanted)
    error = (best_plan(x, wanted) - expert).abs().max().item()
    log_weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    path = []

    def loss() -> Tensor:
        path.append(log_weights.detach().exp())
        return (best_plan(x, log_weights.exp()) - expert).square().mean()

    losses = train([log_weights], loss, 3 if quick else 60, 0.1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
    left.plot(torch.stack(path), label=["weight of position", "weight of speed"])
    for value in wanted:
        left.axhline(value, color=GRAY, linestyle=":")
    left.set(xlabel="training step", ylabel="learned weight (dotted: the expert's)")
    left.legend(fontsize=8)
    seconds = [0.2 * t for t in range(1, HORIZON + 1)]
    for weights, color, name in ((path[0], ORANGE, "before"), (path[-1], GREEN, "after training")):
        right.plot(seconds, states(best_plan(x, weights), x)[0, :, 0], color=color, label=name)
    right.plot(seconds, states(expert, x)[0, :, 0], ":", color=BLUE, label="expert")
    right.set(xlabel="time", ylabel="position")
    right.legend(fontsize=8)
    off = (log_weights.exp() - wanted).abs().max().item()
    return {"plan against Riccati": error, "last loss": losses[-1], "error of the weights": off}, figure


if __name__ == "__main__":
    main(run)
