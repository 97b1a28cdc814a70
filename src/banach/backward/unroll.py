"""Backpropagation through a few more steps from the fixed point: the phantom gradient."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from banach import checks
from banach.backward.mode import as_of_now, unchanged
from banach.latent import Latent, detach, map_leaves
from banach.solve import Map


@dataclass(frozen=True)
class Unroll:
    """Backpropagation through K steps z <- d z + (1 - d) T(z) from z*; the value is the K-th iterate.

    From an exact fixed point, undamped, K steps give Neumann(K - 1). Started at z0 with `max_steps=0` it is
    ordinary backpropagation through K steps. `checkpoint=True` keeps one latent per step and recomputes the
    rest, so what T reads must not change before that. (Phantom gradient: Geng et al. 2021.)
    """

    steps: int = 1
    damping: float = 0.0
    checkpoint: bool = False

    def __post_init__(self) -> None:
        checks.whole("steps", self.steps, 1)
        checks.number("damping", self.damping, below=1)

    def attach(self, T: Map, z_star: Latent, inputs: tuple[Any, ...] = (), *, coupled: bool = False) -> Latent:
        z = z_star = detach(z_star)
        keep = self.checkpoint and torch.is_grad_enabled()
        read = unchanged(T, z, inputs) if keep else None
        T = as_of_now(T) if keep else T

        def step(z: Latent, *inputs: Any) -> Latent:
            if read is not None:
                read.check()  # a checkpointed step runs again in the backward pass
            value = T(z, *inputs)
            if not self.damping:
                return value
            return map_leaves(lambda a, b: torch.lerp(b.to(a.dtype), a, self.damping), z, value)

        for _ in range(self.steps):
            # T gets z in the type of z*, also where autocast made its output a shorter one.
            given = (map_leaves(lambda a, b: b.to(a.dtype), z_star, z), *inputs)
            z = checkpoint(step, *given, use_reentrant=False) if keep else step(*given)
        return z
