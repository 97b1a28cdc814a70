"""Linear systems (I - J') w = g of every temper, put to Implicit through an affine map, and solved densely."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from banach import GMRES, Anderson, Broyden, Implicit, NormalCG, Picard, Status, Tolerance
from problems import contraction, normal, orthogonal

METHODS: list[Any] = [NormalCG(), GMRES(), GMRES(3), Picard(), Anderson(), Broyden()]


@dataclass
class Reports:
    """What `report` was log, one entry per backward pass."""

    products: list[int] = field(default_factory=list)
    residual: list[Tensor] = field(default_factory=list)
    status: list[tuple[Status, ...]] = field(default_factory=list)

    def __call__(self, products: int, residual: Tensor, status: tuple[Status, ...]) -> None:
        self.products.append(products)
        self.residual.append(residual)
        self.status.append(status)


def solve_adjoint(
    method: Any, J: Tensor, g: Tensor, log: Reports | None = None, *, order: int = 1, **tolerance: Any
) -> Tensor:
    """w, read off as the gradient in x of T(z) = J z + x; J is (samples, n, n)."""
    x = torch.zeros_like(g).requires_grad_()
    settings = Tolerance(**{"atol": 0, "rtol": 1e-12, "max_steps": 2000, **tolerance})
    mode = Implicit(method, settings, report=log, order=order)
    value = mode.attach(lambda z, x: torch.bmm(J, z[..., None])[..., 0] + x, torch.zeros_like(g), (x,))
    return torch.autograd.grad(value, x, g)[0]


def dense(J: Tensor, g: Tensor) -> Tensor:
    """w by a dense solve in float64."""
    eye = torch.eye(J.shape[-1], dtype=torch.float64)
    return torch.linalg.solve(eye - J.double().mT, g.double()[..., None])[..., 0]


def residual(J: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """RMS of g - (I - J') w, per sample."""
    r = g - w + torch.bmm(J.mT, w[..., None])[..., 0]
    return r.square().mean(1).sqrt()


def worst(w: Tensor, exact: Tensor) -> float:
    """The largest relative error of any sample."""
    return float((torch.linalg.vector_norm(w - exact, dim=1) / torch.linalg.vector_norm(exact, dim=1)).max())


def spectrum(values: Tensor, seed: int = 2) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    V = orthogonal(len(values), seed)
    return V @ torch.diag(values) @ V.T


def hard_contraction(n: int = 12, gap: float = 1e-3) -> Tensor:
    """Symmetric, eigenvalues from 0 up to 1 - gap: .999, so that I - J has condition 1000."""
    return spectrum(1 - torch.logspace(math.log10(gap), 0, n, dtype=torch.float64))


def non_normal(n: int = 8, above: float = 1.0) -> Tensor:
    """Spectral radius .5, norm about 1.5: powers grow before they shrink."""
    return 0.5 * torch.eye(n, dtype=torch.float64) + above * shift(n).T


def expanding(n: int = 8) -> Tensor:
    """Eigenvalues on both sides of 1 and of the unit circle: nothing contracts, I - J is invertible."""
    return spectrum(torch.tensor([-4.0, -2.0, -0.5, 0.0, 0.5, 2.0, 3.0, 5.0], dtype=torch.float64)[:n])


def turning(n: int = 8) -> Tensor:
    """Twice an orthogonal matrix: an expansion in every direction."""
    return 2.0 * orthogonal(n)


def shift(n: int = 8) -> Tensor:
    """e_i -> e_(i+1), e_n -> 0: nilpotent, so the Neumann series ends after n terms."""
    return torch.diag(torch.ones(n - 1, dtype=torch.float64), -1)


SPREAD = torch.tensor([0.95, 0.8, 0.4, -0.2, -0.6, -0.9], dtype=torch.float64)


def mixed(n: int = 6) -> Tensor:
    """A batch in which every sample is of another kind, and ready at another step."""
    half, zero = 0.5 * torch.eye(n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    return torch.stack([half, zero, shift(n), contraction(n, 0.9), non_normal(n, 0.4), spectrum(SPREAD[:n])])


def cotangents(samples: int, n: int, seed: int = 50) -> Tensor:
    return normal(samples, n, seed=seed)
