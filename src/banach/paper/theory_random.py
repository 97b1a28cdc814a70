"""The Theorem's bound on random matrices for which its assumptions hold: as it is printed, and mended."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from banach.diagnose import Linearised, theorem

N, C, P = 4, 2, 9  # latent numbers, outputs, weights


@dataclass(frozen=True)
class Counted:
    """Of `cases`: how many violate a bound, and how many are descent directions."""

    cases: int
    printed: int
    mended: int
    descends: int


def count(cases: int, seed: int = 0) -> Counted:
    generator = torch.Generator().manual_seed(seed)
    found = [theorem(random_case(generator)) for _ in range(cases)]
    return Counted(
        cases,
        sum(not case.printed_holds for case in found),
        sum(not case.holds for case in found),
        sum(case.descends for case in found),
    )


def random_case(generator: torch.Generator) -> Linearised:
    """|J| = gamma below 1 and kappa(M'M) below 1 / gamma, both drawn; gradient and p by their formulas."""
    gamma, part = (0.02 + 0.96 * torch.rand(2, generator=generator, dtype=torch.float64)).tolist()
    A = _normal(generator, N, N)
    J = gamma * A / torch.linalg.matrix_norm(A, 2)
    # Singular values from 1 to sqrt(kappa), both attained.
    top = (1 + part * (1 / gamma - 1)) ** 0.5
    between = 1 + (top - 1) * torch.rand(N + C - 2, generator=generator, dtype=torch.float64)
    s = torch.cat([torch.tensor([1.0, top], dtype=torch.float64), between])
    left, right = (torch.linalg.qr(_normal(generator, rows, N + C))[0] for rows in (P, N + C))
    M, v = left @ torch.diag(s) @ right.mT, _normal(generator, N + C)
    bare = Linearised(J, M, v, v, v, outputs=C)
    return Linearised(J, M, v, M @ torch.linalg.solve(bare.J_tilde.mT, v), -M @ v, outputs=C)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
