"""Picard's iteration, plain or damped (Krasnoselskii-Mann)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from banach import checks
from banach.solve.solver import Memory, Point


@dataclass(frozen=True)
class Picard:
    """z <- d z + (1 - d) T(z), d the damping.

    Undamped it converges when T contracts (Banach). Damped it also converges when T is merely nonexpansive and
    has a fixed point, such as a rotation (Krasnoselskii 1955, Mann 1953).
    """

    damping: float = 0.0

    def __post_init__(self) -> None:
        checks.number("damping", self.damping, below=1)

    def start(self, z: Tensor) -> Memory:
        return ()

    def step(self, memory: Memory, at: Point) -> tuple[Tensor, Memory]:
        return torch.lerp(at.Tz, at.z, self.damping) if self.damping else at.Tz, memory
