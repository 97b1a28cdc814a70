"""latent_solve: u = R(u, v) by Picard's iteration as one launch, for the R that the kernel knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from banach.kernels.latent_form import LatentForm, LatentMap, Solved, Stop, latent_map
from banach.kernels.latent_plain import plain_latent_solve
from banach.kernels.modules import has_triton


def latent_solve(
    R: Any,
    v: Tensor,
    z0: Tensor | None = None,
    *,
    stop: Stop,
    form: LatentForm | None = None,
    dtype: torch.dtype | None = None,
) -> Solved:
    """What `solve` finds from z0, or from zero, for T(u) = R(u, v), but that nothing is called stalled.

    In train mode the batch is normalised by its own statistics and stops as one; running statistics stay as they
    are. In eval mode every image stops on its own. Iterates are in float32 (float64 where v is), `dtype` is that
    of the numbers that convolutions multiply: autocast's where it is on, else the type of v. On a GPU with Triton
    this is one kernel, and the host is asked nothing; elsewhere the same steps in plain torch. The kernel
    multiplies float32 numbers in two parts of 16 bits: pixels above 10^6 and weights above 65,504 count as not
    finite, and where all pixels are below 10^-3 digits are lost (four are left at 10^-6).
    """
    known = R if isinstance(R, LatentMap) else latent_map(R, form)
    dtype = _products(v) if dtype is None else dtype
    _check(known, v, z0)
    with torch.no_grad(), torch.autocast(v.device.type, enabled=False):
        if v.is_cuda and has_triton() and v.dtype != torch.float64 and dtype in (torch.bfloat16, torch.float32):
            from banach.kernels.latent_launch import kernel_latent_solve

            return kernel_latent_solve(known, v, z0, stop, dtype)
        return plain_latent_solve(known, v, z0, stop, dtype)


def _products(v: Tensor) -> torch.dtype:
    kind = v.device.type
    if torch.is_autocast_enabled(kind) and v.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return v.dtype


def _check(R: LatentMap, v: Tensor, z0: Tensor | None) -> None:
    if v.dim() != 4 or v.shape[1] != R.weights.shape[1]:
        raise ValueError(f"v is (batch, {R.weights.shape[1]}, height, width), got {tuple(v.shape)}; check Q")
    if z0 is not None and z0.shape != v.shape:
        raise ValueError(f"z0 has the shape of v, {tuple(v.shape)}, got {tuple(z0.shape)}; check the start")
