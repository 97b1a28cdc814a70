"""Does T mix samples? A probe of two evaluations that record nothing."""

from __future__ import annotations

import torch

from banach.latent import Latent, leaves, leaves_like, map_leaves
from banach.solve.run import Map


@torch.no_grad()
def mixes_samples(T: Map, z: Latent, inputs: tuple = ()) -> bool:
    """Return True if changing the first sample of z changes T(z) of another sample.

    Args:
        T: the map, called as T(z, *inputs).
        z: a latent; axis 0 is the batch.
        inputs: further arguments of T.
    """
    if any(leaf.dim() == 0 or leaf.shape[0] < 2 for leaf in leaves(z)):
        return False
    before = leaves_like(z, T(z, *inputs), "T")
    after = leaves_like(z, T(map_leaves(_with_another_first_row, z), *inputs), "T")
    return any(_rest_differs(a, b) for a, b in zip(before, after, strict=True))


def _with_another_first_row(leaf: torch.Tensor) -> torch.Tensor:
    changed = leaf.clone()
    changed[0] = 0.5 * leaf[0] + 1.0
    return changed


def _rest_differs(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a[1:], b[1:]
    allowed = 100 * torch.finfo(a.dtype).eps * a.abs().amax() if a.numel() else 0.0
    return bool(((a - b).abs() > allowed).any())
