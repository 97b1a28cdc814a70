"""MonotoneConv2d: monotone convolutions on one grid or on several tiers, with exact inverses by FFT."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from banach import checks
from banach.latent import Latent, leaves, map_leaves, rebuild
from banach.nn.monotone import at_least_float32, inverse_of

_ONE = math.log(math.e - 1)  # softplus of this is 1


class Kernels(NamedTuple):
    """What W is made of, tier by tier."""

    diagonal: list[Tensor]  # 5x5: (1 - m) I - A'A + B - B'
    down: list[Tensor]  # D, 3x3 with stride 2, from each tier to the next
    below: list[Tensor]  # 3x3: -2 A' of the next tier


class Tier(NamedTuple):
    """The inverse of one diagonal block of I + alpha (I - W), by frequencies: `single` - `back` `forth`."""

    single: Tensor
    forth: Tensor | None
    back: Tensor | None


class MonotoneConv2d(nn.Module):
    """z -> W z by circular 3x3 convolutions, with I - W >= m I in its symmetric part, whatever the weights.

        one tier:       W = (1 - m) I - A'A + B - B'
        several tiers:  W_ii = (1 - m) I - A_i'A_i + B_i - B_i' - D_i'D_i,   W_(i+1, i) = -2 A_(i+1)' D_i

    A, B and D are kernels divided by their Frobenius norms. A'A, B and D'D are multiplied by learned scales,
    softplus of `scale`, which begin at 1. D_i has stride 2 and ends with a row and a column of zeros: a tier of s
    pixels is followed by one of s // 2 + 1. A latent is a tensor, or a tuple of them for several tiers, with a
    border of one pixel that `activate` sets to zero, so that nothing wraps around. (Winston and Kolter 2020.)

    Args:
        channels: of the latent, one number or one per tier.
        m: the strong monotonicity.
    """

    def __init__(self, channels: int | Sequence[int], m: float = 1.0) -> None:
        super().__init__()
        self.m = checks.above_zero("m", m)
        widths = (channels,) if isinstance(channels, int) else tuple(channels)
        # Fresh kernels of nn.Conv2d, whose lengths have no effect but on the learning rate.
        self.A = nn.ParameterList(nn.Conv2d(n, n, 3, bias=False).weight for n in widths)
        self.B = nn.ParameterList(nn.Conv2d(n, n, 3, bias=False).weight for n in widths)
        self.D = nn.ParameterList(nn.Conv2d(n, wide, 3, bias=False).weight for n, wide in pairwise(widths))
        self.scale = nn.Parameter(torch.full((3 * len(widths) - 1,), _ONE))

    def forward(self, u: Latent) -> Latent:
        return self.product(self.matrices(), u)

    def matrices(self) -> Kernels:
        a, b, d = F.softplus(self.scale).split([len(self.A), len(self.B), len(self.D)])
        A, B, D = _scaled(self.A, a.sqrt()), _scaled(self.B, b), _scaled(self.D, d.sqrt())
        below = [-2 * _transposed(kernel) for kernel in A[1:]]
        return Kernels([_diagonal(*pair, self.m) for pair in zip(A, B, strict=True)], D, below)

    def product(self, matrices: Kernels, z: Latent, *, border: bool = True) -> Latent:
        found: list[Tensor] = []
        above: Tensor | None = None
        for i, x in enumerate(leaves(z)):
            y = _conv(x, matrices.diagonal[i], wrap=border)
            if above is not None:
                y = y + _conv(above, matrices.below[i - 1], wrap=border)
            if i < len(matrices.down):
                above = _down(x, matrices.down[i])
                # D' y: what a transposed convolution puts before the first pixel belongs to the last.
                up = F.conv_transpose2d(above[..., :-1, :-1], matrices.down[i], stride=2)
                up = up[..., 1:] + F.pad(up[..., :1], (up.shape[-1] - 2, 0))
                y = y - (up[..., 1:, :] + F.pad(up[..., :1, :], (0, 0, up.shape[-2] - 2, 0)))
            found.append(y)
        return rebuild(z, found)

    def inverse(self, matrices: Kernels, alpha: float, like: Latent) -> tuple[Kernels, float, list[Tier]]:
        matrices = Kernels(*([at_least_float32(kernel) for kernel in kernels] for kernels in matrices))
        tiers = zip(matrices.diagonal, [*matrices.down, None], leaves(like), strict=True)
        with torch.autocast(self.scale.device.type, enabled=False):
            return matrices, alpha, [_inverse_tier(W, down, alpha, x.shape[-1]) for W, down, x in tiers]

    def invert(self, inverse: tuple[Kernels, float, list[Tier]], h: Latent) -> Latent:
        """Return V h by forward substitution over the tiers. FFTs run in at least float32."""
        matrices, alpha, inverses = inverse
        found: list[Tensor] = []
        with torch.autocast(self.scale.device.type, enabled=False):
            for i, x in enumerate(leaves(h)):
                x = at_least_float32(x)
                if i:
                    above = _down(found[-1], matrices.down[i - 1])
                    x = x + alpha * _conv(above, matrices.below[i - 1])
                found.append(_invert_tier(inverses[i], x))
        return rebuild(h, [y.to(x.dtype) for y, x in zip(found, leaves(h), strict=True)])

    def activate(self, u: Latent) -> Latent:
        return map_leaves(lambda x: zero_border(torch.relu(x)), u)

    def extra_repr(self) -> str:
        return f"channels={tuple(len(kernel) for kernel in self.A)}, m={self.m}"


def zero_border(x: Tensor) -> Tensor:
    """Return x with its outermost pixels set to zero; out of place."""
    return F.pad(x[..., 1:-1, 1:-1], (1, 1, 1, 1))


def _scaled(kernels: Iterable[Tensor], lengths: Tensor) -> list[Tensor]:
    return [kernel * (g / torch.linalg.vector_norm(kernel)) for kernel, g in zip(kernels, lengths, strict=True)]


def _transposed(kernel: Tensor) -> Tensor:
    """The kernel of the transposed convolution."""
    return kernel.flip(2, 3).transpose(0, 1)


def _diagonal(A: Tensor, B: Tensor, m: float) -> Tensor:
    """The 5x5 kernel of (1 - m) I - A'A + B - B'. A'A is the correlation of A with itself over its outputs."""
    rows = A.transpose(0, 1)
    gram = F.conv2d(rows, rows, padding=2).transpose(0, 1)
    identity = torch.zeros_like(gram)
    identity[:, :, 2, 2] = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return (1 - m) * identity - gram + F.pad(B - _transposed(B), (1, 1, 1, 1))


def _conv(x: Tensor, kernel: Tensor, *, wrap: bool = True) -> Tensor:
    """A circular convolution; without `wrap`, zeros are read outside of the grid."""
    pad = kernel.shape[-1] // 2
    if not wrap:
        return F.conv2d(x, kernel, padding=pad)
    return F.conv2d(F.pad(x, (pad,) * 4, mode="circular"), kernel)


def _down(x: Tensor, kernel: Tensor) -> Tensor:
    """D x: a circular convolution of stride 2, then a row and a column of zeros."""
    return F.pad(F.conv2d(F.pad(x, (1, 0, 1, 0), mode="circular"), kernel, stride=2), (0, 1, 0, 1))


def _response(kernel: Tensor, size: int) -> Tensor:
    """The frequency response sum_t K(t) exp(i k t) of a circular convolution: (rows, columns, outputs, inputs).

    Columns as `rfft2` has them, size // 2 + 1; the others are conjugates of these.
    """
    t = torch.arange(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device) - kernel.shape[-1] // 2
    k = torch.arange(size, dtype=kernel.dtype, device=kernel.device) * (2 * math.pi / size)
    waves = torch.polar(torch.ones_like(k[:, None] * t), k[:, None] * t)
    return torch.einsum("oiyx,py,qx->pqoi", kernel.to(waves.dtype), waves, waves[: size // 2 + 1])


def _inverse_tier(diagonal: Tensor, down: Tensor | None, alpha: float, size: int) -> Tier:
    """Invert E + alpha D'D by frequencies, E = (1 + alpha) I - alpha (the convolution `diagonal`).

    Stride 2 joins the four frequencies k + {0, size / 2}: with P the response of D, the inverse is
    E^-1 - (alpha / 4) E^-1 P* (I + (alpha / 4) sum P E^-1 P*)^-1 sum P E^-1, sums over the four.
    """
    if down is not None and size % 2:
        raise ValueError(f"a tier that is followed by another needs an even size, border included, got {size}")
    response = _response(diagonal, size)
    eye = torch.eye(response.shape[-1], dtype=response.dtype, device=response.device)
    single = inverse_of((1 + alpha) * eye - alpha * response)
    if down is None:
        return Tier(single, None, None)
    P = _response(down, size)
    forth, back = P @ single, (alpha / 4) * single @ P.mH
    joined = _join(P @ back)
    eye = torch.eye(joined.shape[-1], dtype=joined.dtype, device=joined.device)
    return Tier(single, _spread(inverse_of(eye + joined)) @ forth, back)


def _invert_tier(tier: Tier, x: Tensor) -> Tensor:
    y = torch.fft.rfft2(x).permute(2, 3, 1, 0).contiguous()  # (rows, columns, channels, batch)
    found = tier.single @ y
    if tier.forth is not None and tier.back is not None:
        found = found - tier.back @ _spread(_join(tier.forth @ y))
    return torch.fft.irfft2(found.permute(3, 2, 0, 1), s=x.shape[-2:])


def _join(y: Tensor) -> Tensor:
    """Sum the four frequencies that stride 2 joins, of (2 n, n + 1, ...) as `rfft2` has them: (n, n, ...)."""
    n = len(y) // 2
    rows = y.unflatten(0, (2, n)).sum(0)
    mirrored = rows.flip(0, 1)[:, :n].roll(1, 0)  # at (-p, n - q), whose conjugate is at (p, n + q)
    return rows[:, :n] + mirrored.conj()


def _spread(y: Tensor) -> Tensor:
    """Repeat what four frequencies share, (n, n, ...), for each of them: (2 n, n + 1, ...)."""
    wide = torch.cat([y, y[:, :1]], 1)
    return torch.cat([wide, wide])
