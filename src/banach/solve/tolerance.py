"""When to stop: absolute and relative tolerance, the norm they are in, the budget of steps."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from banach import checks
from banach.latent import Latent, Space


class Norm(Protocol):
    """A norm per sample, as `scale(space) * measure(rows, space)`.

    The two are apart so that the loop can compare unscaled values and scale once at the end.
    """

    def measure(self, rows: Tensor, space: Space) -> Tensor:
        """Return (samples,), the norm of every row up to the constant factor `scale`."""

    def scale(self, space: Space) -> float:
        """Return the factor that turns `measure` into the norm."""
        return 1.0


@dataclass(frozen=True)
class Euclidean(Norm):
    """|x|_2 over everything a sample holds. Grows with the size of the latent."""

    def measure(self, rows: Tensor, space: Space) -> Tensor:
        return torch.linalg.vector_norm(rows, dim=1)


@dataclass(frozen=True)
class RMS(Euclidean):
    """|x|_2 / sqrt(n): the size of a typical entry, so one tolerance fits latents of any size."""

    def scale(self, space: Space) -> float:
        return 1.0 / math.sqrt(max(sum(space.sizes), 1))


@dataclass(frozen=True)
class WorstPixel(Norm):
    """max over pixels of the 2-norm over channels (axis 1): the test in the JFB authors' code."""

    def measure(self, rows: Tensor, space: Space) -> Tensor:
        parts = [part for part in space.parts(rows) if part.numel()]
        if not parts:
            return rows.new_zeros(len(rows))
        pixels = [torch.linalg.vector_norm(part, dim=1) if part.dim() > 1 else part.abs() for part in parts]
        worst = [pixel.reshape(rows.shape[0], -1).amax(1) for pixel in pixels]
        return worst[0] if len(worst) == 1 else torch.stack(worst).amax(0)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """A sample has converged when its residual is finite and at most `atol + rtol * norm(T(z))`.

    Args:
        atol: absolute tolerance; the default suits latents whose entries are about 1.
        rtol: tolerance relative to the norm of T(z). Rescale float32 latents below 1e-20: their norm is 0.
        max_steps: evaluations of T at most; 0 evaluates nothing.
        norm: `RMS()`, `Euclidean()` or `WorstPixel()`.
        check_every: steps between two host checks that end the loop once all samples are done. 0: no check, so
            exactly `max_steps` steps run and the loop can be captured. None: chosen by device. Samples freeze at
            the right step in every case.
    """

    atol: float = 1e-4
    rtol: float = 0.0
    max_steps: int = 50
    norm: Norm = RMS()
    check_every: int | None = None

    def __post_init__(self) -> None:
        checks.number("atol", self.atol)
        checks.number("rtol", self.rtol)
        checks.whole("max_steps", self.max_steps)
        if self.check_every is not None:
            checks.whole("check_every", self.check_every)
        if isinstance(self.norm, type) or not hasattr(self.norm, "measure"):
            raise TypeError(f"norm must be a norm such as RMS(), Euclidean() or WorstPixel(), got {self.norm!r}")

    @property
    def steps_per_check(self) -> int:
        """Steps between two host checks, 0 for none. None counts as 1; see also `stride`."""
        return 1 if self.check_every is None else self.check_every


def measure(space: Space, tolerance: Tolerance, z: Latent, Tz: Latent) -> tuple[Tensor, Tensor]:
    """Return the residual of every sample and the largest one that counts as converged.

    The second number is NaN where the norm of T(z) is infinite, so that `residual <= allowed` is False there.
    """
    norm, rows = tolerance.norm, space.rows(Tz)
    residual = norm.measure(rows - space.rows(z), space) * norm.scale(space)
    if not tolerance.rtol:
        return residual, torch.full_like(residual, tolerance.atol)
    allowed = tolerance.atol + tolerance.rtol * (norm.scale(space) * norm.measure(rows, space))
    return residual, torch.nan_to_num(allowed, nan=torch.nan, posinf=torch.nan)
