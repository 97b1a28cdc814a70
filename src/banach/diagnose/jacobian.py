"""The Jacobian of a map to be measured, one row per sample, and its largest singular value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from banach import checks
from banach.backward.jacobian import Jacobian
from banach.diagnose.frozen import plain, unchanging
from banach.latent import Latent, Space
from banach.solve import Map
from banach.solve.context import rounding, with_autocast_of, without_autocast

VECTORS = 24  # kept of each sample before the iteration starts again from their best combination
QUIET = 5


def jacobian(T: Map, z: Latent, inputs: tuple[Any, ...], *, coupled: bool = False) -> Jacobian:
    """Return dT/dz at z, where T keeps the shape of z. T is evaluated once, a module on copies of its buffers."""
    z, fixed = plain(z), plain(inputs)
    space = Space.of(z, coupled=coupled)
    under = with_autocast_of(space, unchanging(T) if isinstance(T, nn.Module) else T)

    def checked(x: Latent) -> Latent:
        value = under(x, *fixed)
        space.check(value)
        return value

    with without_autocast(space.device):
        return Jacobian(checked, z, space)


@torch.no_grad()
def largest_singular_value(J: Jacobian, *, max_steps: int, rtol: float, seed: int) -> Tensor:
    """(samples,): sigma_max of every row's Jacobian: power iteration on J'J, accelerated by Lanczos.

    A step is one product with J and one with J'. Plain power iteration was measured to need five to ten times as
    many, and recurrences that keep no vectors to drift upwards with bfloat16 products. The estimate is |J v| of a
    unit vector v, so it grows from below. A sample is done when its growth, continued as a geometric series, added
    less than rtol for QUIET steps in a row: from an unlucky start it rests at the second value for a while.
    """
    checks.whole("max_steps", max_steps, 1)
    rtol = max(rtol, rounding(J.source))
    krylov = _Krylov(J, _unit(random_rows(J.source, seed)))
    history = [torch.zeros(J.source.samples, dtype=torch.float64)] * 2
    quiet = torch.zeros(J.source.samples, dtype=torch.long)
    with without_autocast(J.source.device):
        for step in range(1, max_steps + 1):
            history.append(krylov.sigma())
            grew = _to_come(history[-3:]) > rtol * history[-1]
            quiet = torch.where(grew & (quiet < QUIET), 0, quiet + 1)
            if bool((quiet >= QUIET).all()):
                break
            if step % VECTORS:
                krylov.extend()
            else:
                krylov = _Krylov(J, krylov.best())
    return history[-1].to(J.source.device, J.source.rows_dtype)


class _Krylov:
    """Orthonormal vectors V, their images W = J V, and the Gram matrix of those, one set per sample."""

    def __init__(self, J: Jacobian, v: Tensor) -> None:
        self.J, self.V = J, v[:, None]
        self.W = v.new_empty(len(v), 0, sum(J.source.sizes))
        self.gram = torch.empty(len(v), 0, 0, dtype=torch.float64)  # on the host: it is small

    def sigma(self) -> Tensor:
        """(samples,): the largest |J v| over unit vectors v in the span of V."""
        self.W = torch.cat([self.W, self.J.forward(self.V[:, -1].contiguous())[:, None]], 1)
        # Sums of products, here and below, not matrix products: those may be rounded to TF32.
        row = torch.linalg.vecdot(self.W, self.W[:, -1:]).double().cpu()
        self.gram = torch.cat([torch.cat([self.gram, row[:, :-1, None]], 2), row[:, None]], 1)
        finite = self.gram.isfinite().all(2).all(1)
        values, vectors = torch.linalg.eigh(torch.where(finite[:, None, None], self.gram, 0.0))
        self.weights = vectors[:, :, -1].to(self.W)
        return torch.where(finite, values[:, -1].clamp(min=0).sqrt(), torch.nan)

    def best(self) -> Tensor:
        """The unit vector at which that largest value is reached."""
        return _unit((self.weights[:, :, None] * self.V).sum(1))

    def extend(self) -> None:
        """One more vector: J'J of the last, without its parts along the others; zero if only rounding is left."""
        v = self.J.transposed(_unit(self.W[:, -1]))
        least = 100 * torch.finfo(v.dtype).eps * torch.linalg.vector_norm(v, dim=1, keepdim=True)
        for _ in range(2):  # once loses orthogonality
            v = v - (torch.linalg.vecdot(self.V, v[:, None])[:, :, None] * self.V).sum(1)
        left = torch.linalg.vector_norm(v, dim=1, keepdim=True) > least
        self.V = torch.cat([self.V, _unit(torch.where(left, v, 0.0))[:, None]], 1)


def _to_come(history: list[Tensor]) -> Tensor:
    """What is still to be added, if every change is to the next as the last one to the one before."""
    before, change = history[1] - history[0], history[2] - history[1]
    ratio = (change / before).nan_to_num(nan=0.0).clamp(0.0, 0.999)
    return torch.maximum(change, change * ratio / (1 - ratio))


def random_rows(space: Space, seed: int) -> Tensor:
    """Normal numbers, drawn on the host, so that a seed means the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(space.samples, sum(space.sizes), generator=generator, dtype=torch.float64)
    return rows.to(space.device, space.rows_dtype)


def _unit(rows: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / torch.where(length > 0, length, 1.0)
