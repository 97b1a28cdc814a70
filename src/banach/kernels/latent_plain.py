"""The solve for a latent in plain torch: what the kernel is compared with, and what runs without it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from banach.kernels.latent_form import LatentMap, Solved, Stop


def evaluate(R: LatentMap, z: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """R(z, v): products of numbers of `dtype`, all else in the type of z."""
    form = R.form
    x = v + form.inner * z
    for block in range(R.blocks):
        hidden = F.leaky_relu(_convolve(R, 2 * block, x, dtype), form.slope)
        y = _convolve(R, 2 * block + 1, hidden, dtype)
        y = F.leaky_relu(x + y, form.slope_after) if form.late else x + F.leaky_relu(y, form.slope_after)
        x = _normalise(R, block, y)
    return form.outer * x


def _convolve(R: LatentMap, layer: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    exact, weight = x.dtype, R.weights[layer]
    return F.conv2d(x.to(dtype).to(exact), weight.to(dtype).to(exact), R.biases[layer].to(exact), padding=1)


def _normalise(R: LatentMap, block: int, y: Tensor) -> Tensor:
    if R.known is None:
        mean = y.mean((0, 2, 3))
        rstd = ((y - mean[:, None, None]).square().mean((0, 2, 3)) + R.eps).rsqrt()
    else:
        mean, rstd = R.known[:, block].to(y.dtype)
    return (y - mean[:, None, None]) * rstd[:, None, None]


@torch.no_grad()
def plain_latent_solve(R: LatentMap, v: Tensor, z0: Tensor | None, stop: Stop, dtype: torch.dtype) -> Solved:
    """Step after step until every sample has stopped: the host is asked at each."""
    v = v.to(torch.promote_types(v.dtype, torch.float32))
    z = torch.zeros_like(v) if z0 is None else z0.to(v.dtype)
    samples = len(v) if R.known is not None else 1
    best, code, steps = z, v.new_zeros(samples, dtype=torch.int64), v.new_zeros(samples, dtype=torch.int64)
    reached, least = v.new_full((samples,), torch.inf), v.new_full((samples,), torch.inf)
    for step in range(1, stop.max_steps + 1):
        active = code == 0
        if not bool(active.any()):
            break
        Tz = evaluate(R, z, v, dtype)
        residual = _norm(Tz - z, samples, stop)
        test = residual - stop.rtol * _norm(Tz, samples, stop) if stop.rtol else residual
        ended = torch.where(test <= stop.atol, 1, 0).masked_fill_(~test.isfinite(), 2)
        better = active & (residual < least)
        best, least = _choose(better, z, best), torch.where(better, residual, least)
        z, reached = _choose(active, Tz, z), torch.where(active, residual, reached)
        code, steps = torch.where(active, ended, code), torch.where(active, step, steps)
    nonfinite = code == 2
    value, reached = _choose(nonfinite, best, z), torch.where(nonfinite, least, reached)
    found = (reached, code == 1, steps, nonfinite, torch.zeros_like(nonfinite))
    return Solved(value.contiguous(memory_format=torch.channels_last), *(part.expand(len(v)) for part in found))


def _norm(x: Tensor, samples: int, stop: Stop) -> Tensor:
    """(samples,): coupled samples are one."""
    if stop.worst_pixel:
        return torch.linalg.vector_norm(x, dim=1).reshape(samples, -1).amax(1)
    rows = x.reshape(samples, -1)
    return torch.linalg.vector_norm(rows, dim=1) * stop.scale(rows.shape[1])


def _choose(mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(mask[:, None, None, None], one, other)
