"""Backpropagation through a few more steps from the fixed point: the phantom gradient."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from banach import checks
from banach.backward.mode import CHANGED, as_of_now, is_other, unchanged
from banach.latent import Latent, Space, detach, leaves, map_leaves, versions
from banach.solve import Map
from banach.solve.context import rounding
from banach.solve.warning import AdjointWarning, warn_user


@dataclass(frozen=True)
class Unroll:
    """Backpropagation through K steps z <- d z + (1 - d) T(z) from z*; the value is the K-th iterate.

    From an exact fixed point, undamped, K steps give Neumann(K - 1). Started at z0 with `max_steps=0` it is
    ordinary backpropagation through K steps. `checkpoint=True` keeps one latent per step and recomputes the
    rest, so what T reads must not change before that. On a CPU an `AdjointWarning` reports such a change; on a
    GPU that would cost a host sync. (Phantom gradient: Geng et al. 2021.)
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
        one = leaves(z)[0]  # fake tensors, for one, have no values to compare
        watch = keep and one.is_cpu and type(one) is Tensor and not torch.compiler.is_compiling()

        def step(z: Latent, *inputs: Any) -> Latent:
            if read is not None:
                read.check()  # a checkpointed step runs again in the backward pass
            value = T(z, *inputs)
            if not self.damping:
                return value
            return map_leaves(lambda a, b: torch.lerp(b.to(a.dtype), a, self.damping), z, value)

        for number in range(1, self.steps + 1):
            # T gets z in the type of z*, also where autocast made its output a shorter one.
            given = (map_leaves(lambda a, b: b.to(a.dtype), z_star, z), *inputs)
            if not keep:
                z = step(*given)
            elif watch and number == self.steps:
                z = _last(step, given, Space.of(z_star, coupled=coupled))
            else:
                z = checkpoint(step, *given, use_reentrant=False)
        return z


def _last(step: Map, given: tuple[Any, ...], space: Space) -> Latent:
    """Return step(*given), checkpointed. The backward pass, which begins here, warns if it finds another value.

    It does not where the value was written to meanwhile, as by an in-place activation.
    """
    first: list[tuple[Latent, list[int | None]]] = []
    eps = rounding(space)

    def watched(*given: Any) -> Latent:
        value = step(*given)
        if not first:
            first.append((detach(value), versions(leaves(value))))
            return value
        was, written = first[0]
        if versions(leaves(was)) == written and is_other(detach(value), was, space, eps):
            warn_user(CHANGED, AdjointWarning)
        return value

    with set_checkpoint_early_stop(False):  # so that the value is computed again, and not only what autograd saved
        return checkpoint(watched, *given, use_reentrant=False)
