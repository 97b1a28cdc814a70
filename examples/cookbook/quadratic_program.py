"""Quadratic programs and projections as layers: the answer by splitting, the gradient by implicit differentiation.

    minimise  x'Px / 2 + q'x   subject to  A x <= b                 (a batch of q, shared P, A, b)

Douglas-Rachford splitting is the map T below; its fixed point gives x. `Implicit` differentiates T at the fixed
point, so no derivation by hand is needed. Compared with the gradient from the KKT equations on the active
constraints. With P = I and q = -y the same layer projects y onto the polygon A x <= b.

    python -m examples.cookbook.quadratic_program
"""

import matplotlib.pyplot as plt
import torch
from examples.cookbook.recipe import BLUE, GREEN, ORANGE, main
from matplotlib.figure import Figure
from torch import Tensor

from banach import Anderson, Implicit, Tolerance, fixed_point

RHO = 1.0


def solve_qp(P: Tensor, q: Tensor, A: Tensor, b: Tensor) -> Tensor:
    """Return the x of every row of q, differentiable in P, q, A and b."""
    inverse = torch.linalg.inv(P + RHO * A.T @ A)

    def x_of(w: Tensor, q: Tensor) -> Tensor:
        return (RHO * w @ A - q) @ inverse  # the x that minimises the objective + rho/2 |Ax - w|^2

    def T(z: Tensor, q: Tensor) -> Tensor:
        s = torch.minimum(z, b)  # project onto s <= b
        return z + x_of(2 * s - z, q) @ A.T - s

    z0 = torch.zeros(len(q), len(b), dtype=q.dtype)
    tolerance = Tolerance(atol=1e-12, max_steps=5000)
    z = fixed_point(T, z0, inputs=(q,), solver=Anderson(), tolerance=tolerance, backward=Implicit())
    return x_of(2 * torch.minimum(z, b) - z, q)


def kkt_gradient(P: Tensor, x: Tensor, A: Tensor, b: Tensor, g: Tensor) -> Tensor:
    """Return d(g'x)/dq for one q: solve the KKT equations with the constraints that hold with equality."""
    active = A[(A @ x - b).abs() < 1e-7]
    n, m = len(x), len(active)
    K = torch.zeros(n + m, n + m, dtype=x.dtype)
    K[:n, :n], K[:n, n:], K[n:, :n] = P, active.T, active
    return -torch.linalg.solve(K, torch.cat((g, g.new_zeros(m))))[:n]


def polygon(sides: int) -> tuple[Tensor, Tensor]:
    """Return A and b of a polygon around the origin."""
    angle = torch.linspace(0, 2 * torch.pi, sides + 1, dtype=torch.float64)[:-1]
    return torch.stack((angle.cos(), angle.sin()), 1), torch.ones(sides, dtype=torch.float64)


def run(quick: bool) -> tuple[dict[str, float], Figure]:
    generator = torch.Generator().manual_seed(0)
    n, m, batch = (4, 6, 3) if quick else (10, 15, 20)
    root = torch.randn(n, n, dtype=torch.float64, generator=generator)
    P, A = root @ root.T / n + torch.eye(n), torch.randn(m, n, dtype=torch.float64, generator=generator)
    b = torch.full((m,), 0.5, dtype=torch.float64)
    q = 2 * torch.randn(batch, n, dtype=torch.float64, generator=generator)
    q.requires_grad_()
    x = solve_qp(P, q, A, b)
    g = torch.randn(batch, n, dtype=torch.float64, generator=generator)
    (ours,) = torch.autograd.grad((g * x).sum(), q)
    exact = torch.stack([kkt_gradient(P, x[k].detach(), A, b, g[k]) for k in range(batch)])
    error = ((ours - exact).norm() / exact.norm()).item()

    sides, bound = polygon(5)
    y = torch.tensor([[2.0, 1.5], [-1.6, 1.2], [0.2, -2.0], [0.3, 0.2]], dtype=torch.float64)
    near = solve_qp(torch.eye(2, dtype=torch.float64), -y, sides, bound)
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
    left.plot(exact.flatten(), ours.detach().flatten(), "o", color=BLUE, markersize=3)
    left.axline((0, 0), slope=1, color="gray", linewidth=0.8)
    left.set(xlabel="gradient by the KKT equations", ylabel="gradient by Implicit()", title=f"error {error:.0e}")
    corners = torch.linalg.solve(
        torch.stack((sides, sides.roll(-1, 0)), 1), torch.stack((bound, bound.roll(-1)), 1)
    )
    right.fill(*corners.T, facecolor="#e8eef9", edgecolor=BLUE)
    for point, foot in zip(y, near, strict=True):
        right.annotate("", foot.tolist(), point.tolist(), arrowprops={"arrowstyle": "-|>", "color": ORANGE})
    right.plot(*y.T, "o", color=ORANGE)
    right.plot(*near.T, "o", color=GREEN)
    right.set(
        aspect="equal", title="projection onto a polygon", xlabel="first coordinate", ylabel="second coordinate"
    )
    violation = (x @ A.T - b).amax().item()
    return {"error of the gradient": error, "largest violation": max(violation, 0.0)}, figure


if __name__ == "__main__":
    main(run)
