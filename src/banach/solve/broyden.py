"""Broyden's good method with a bounded memory, per sample, safeguarded."""

from dataclasses import dataclass

import torch
from torch import Tensor

from banach import checks
from banach.solve.solver import Memory, Point


@dataclass(frozen=True)
class Broyden:
    """z <- z - H r,  H ~ (J - I)^-1 = -I + U V', one rank more per step.

    After `memory` ranks H starts again from -I, so memory and time per step are bounded. (Overwriting the oldest
    rank instead diverges on a symmetric map of contraction .95 that this solves in a sixth of Picard's steps.) A
    rank whose denominator vanishes is skipped. A sample whose residual is beyond `growth` times its least, or had
    no new least in `patience` evaluations, forgets its ranks and takes a Picard step.
    (Broyden 1965; Kelley 1995.)
    """

    memory: int = 10
    growth: float = 10.0
    patience: int = 10

    def __post_init__(self) -> None:
        checks.whole("memory", self.memory, 1)
        checks.whole("patience", self.patience, 1)
        if not self.growth > 1:
            raise ValueError(f"growth must be above 1, got {self.growth}")

    def start(self, z: Tensor) -> Memory:
        samples, width = z.shape
        ranks = z.new_zeros(2, samples, self.memory, width)
        return z, z, ranks[0], ranks[1]

    def step(self, memory: Memory, at: Point) -> tuple[Tensor, Memory]:
        z_before, r_before, U, V = memory
        if at.step == 1:
            return at.Tz, (at.z, at.r, U, V)
        slot = (at.step - 2) % self.memory
        wild = (at.residual > self.growth * at.least) | (at.least_at < at.evaluation - self.patience)
        U.masked_fill_(wild[:, None, None], 0.0) if slot else U.zero_()
        self._learn(U, V, at.z - z_before, at.r - r_before, slot)
        move = _inverse(U, V, at.r)
        sound = (torch.linalg.vector_norm(move, dim=1) < torch.inf) & ~wild
        return torch.where(sound[:, None], at.z - move, at.Tz), (at.z, at.r, U, V)

    def _learn(self, U: Tensor, V: Tensor, dz: Tensor, dr: Tensor, slot: int) -> None:
        """H <- H + (dz - H dr) (dz' H) / (dz' H dr): the least change after which H dr = dz."""
        hdr = _inverse(U, V, dr)
        denominator = torch.linalg.vecdot(dz, hdr)
        # Small compared with dz too: a residual that moves by rounding alone would send z to infinity.
        length = torch.linalg.vector_norm(dz, dim=1)
        size = length * torch.maximum(length, torch.linalg.vector_norm(hdr, dim=1))
        sound = denominator.abs() > 1e3 * torch.finfo(dz.dtype).eps * size
        left = (dz - hdr) / denominator[:, None]
        right = _inverse(V, U, dz)
        U[:, slot] = torch.where(sound[:, None], left, 0.0)
        V[:, slot] = torch.where(sound[:, None], right, 0.0)


def _inverse(U: Tensor, V: Tensor, x: Tensor) -> Tensor:
    """(-I + U V') x for every row; with U and V exchanged, the transpose."""
    weights = torch.bmm(x[:, None], V.mT)  # a row times a matrix: on the CPU far faster than matrix times column
    return torch.baddbmm(x[:, None], weights, U, beta=-1)[:, 0]
