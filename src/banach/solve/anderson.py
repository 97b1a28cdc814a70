"""Anderson acceleration, per sample, safeguarded."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from banach import checks
from banach.solve.solver import Memory, Point


@dataclass(frozen=True)
class Anderson:
    """z <- z + b r - (dZ + b dR) c,  c = argmin |r - dR c|,  b = 1 - damping.

    dZ and dR hold the last `memory` differences of z and of r = T(z) - z. (Differences, since the Gram matrix of
    nearly equal residuals loses its digits.) `ridge` lifts the diagonal of dR' dR, relative to itself; None: ten
    roundings of the dtype. A sample takes a Picard step where the fit cannot be trusted: a coefficient is beyond
    `bound` (infinity: none is too large), the history is singular, the residual is beyond `growth` times its
    least, or there was no new least in `patience` evaluations. (Without that it can circle for ever on a ReLU map
    that Picard solves.) (Anderson 1965; Walker and Ni 2011.)
    """

    memory: int = 5
    damping: float = 0.0
    ridge: float | None = None
    bound: float = 1e4
    growth: float = 10.0
    patience: int = 10

    def __post_init__(self) -> None:
        checks.whole("memory", self.memory, 1)
        checks.whole("patience", self.patience, 1)
        checks.number("damping", self.damping, below=1)
        if self.ridge is not None:
            checks.number("ridge", self.ridge)
        for name in ("bound", "growth"):
            if not getattr(self, name) > 1:
                raise ValueError(f"{name} must be above 1, got {getattr(self, name)}")

    def start(self, z: Tensor) -> Memory:
        samples, width = z.shape
        # The slot is the outer axis in memory, so that writing one is writing one contiguous matrix.
        history = z.new_zeros(2, self.memory, samples, width).transpose(1, 2)
        gram = torch.eye(self.memory, dtype=z.dtype, device=z.device).repeat(samples, 1, 1)
        return z, z, history[0], history[1], gram, z.new_zeros(samples, 1, 1)

    def step(self, memory: Memory, at: Point) -> tuple[Tensor, Memory]:
        z_before, r_before, dZ, dR, gram, zero = memory
        memory = (at.z, at.r, *memory[2:])
        if at.step == 1:
            return self._mix(at), memory
        slot = (at.step - 2) % self.memory
        torch.sub(at.z, z_before, out=dZ[:, slot])
        torch.sub(at.r, r_before, out=dR[:, slot])
        # The diagonal of the Gram matrix is lifted as its new row and column are written: no copy is needed later.
        row = torch.bmm(dR[:, slot, None], dR.mT)[:, 0]
        row[:, slot].mul_(1 + (10 * torch.finfo(row.dtype).eps if self.ridge is None else self.ridge))
        gram[:, slot] = row
        gram[:, :, slot] = row
        c, _ = torch.linalg.solve_ex(gram, torch.bmm(at.r[:, None], dR.mT).mT)
        c = torch.where(self._trusted(c, at)[:, None, None], c, zero).mT
        z = torch.baddbmm(self._mix(at)[:, None], c, dZ, alpha=-1)
        z.baddbmm_(c, dR, alpha=self.damping - 1)
        return z[:, 0], memory

    def _mix(self, at: Point) -> Tensor:
        return torch.lerp(at.Tz, at.z, self.damping) if self.damping else at.Tz

    def _trusted(self, c: Tensor, at: Point) -> Tensor:
        """(samples,): is the fit to be used? |c| / bound + growth so far / growth + age / patience <= 1.

        One comparison for all safeguards, in units of bound; NaN and infinity, from a singular history, fail it.
        """
        size, unit = torch.linalg.vector_norm(c, dim=(1, 2)), self.bound
        if unit == math.inf:
            size, unit = size.mul_(0.0), 1.0  # of any finite size nothing is left, of NaN and infinity NaN
        doubt = torch.addcdiv(size, at.residual, at.least, value=unit / self.growth)
        doubt.sub_(at.least_at, alpha=unit / self.patience)
        return doubt <= unit * (1 - at.evaluation / self.patience)
