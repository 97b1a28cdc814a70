"""The whole fixed-point iteration as one launch that finds its own depth, for an R that the kernels know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from banach.kernels import Solved, Stop, describe, has_triton, latent_solve
from banach.network import ImplicitNetwork, zeros
from banach.nn.passes import uses_batch_statistics
from banach.solve import RMS, Euclidean, Picard, Tolerance, WorstPixel


class WholeSolve:
    """v -> what `solve` finds for u = R(u, v) at the network's tolerance; nothing is called stalled.

    The weights are those of the network itself, in the precision of autocast where it is on.
    """

    def __init__(self, net: ImplicitNetwork) -> None:
        self.net = net

    @staticmethod
    def of(net: ImplicitNetwork) -> WholeSolve | None:
        """None where R, the solver, the norm or the device is not one that the kernel is for."""
        return WholeSolve(net) if _has_kernel(net) and _is_known(net) else None

    def __call__(self, v: Tensor, z0: Tensor | None = None) -> Solved:
        stop = stop_of(self.net.tolerance)
        assert stop is not None  # `of` asked
        if z0 is None and self.net.start is not zeros:
            with torch.no_grad():
                z0 = self.net.start(v)
        return latent_solve(self.net.R, v, z0, stop=stop)


def stop_of(tolerance: Tolerance) -> Stop | None:
    """The tolerance as the kernel takes it, None for a norm that it does not know."""
    norm = type(tolerance.norm)
    if norm not in (WorstPixel, RMS, Euclidean):
        return None
    return Stop(
        tolerance.atol,
        tolerance.rtol,
        tolerance.max_steps,
        worst_pixel=norm is WorstPixel,
        mean=norm is RMS,
    )


def _is_known(net: ImplicitNetwork) -> bool:
    """Is the iteration of this network what the kernel computes?"""
    solver: Any = net.solver
    return (
        type(solver) is Picard
        and not solver.damping
        and net.tolerance.max_steps > 0
        and stop_of(net.tolerance) is not None
        and describe(net.R) is not None
        and net.coupled in (None, uses_batch_statistics(net.R))
    )


def _has_kernel(net: ImplicitNetwork) -> bool:
    """Is it on a GPU with Triton, in a type the kernel is for?"""
    weight = next(net.parameters(), None)
    return weight is not None and weight.is_cuda and has_triton() and weight.dtype == torch.float32
