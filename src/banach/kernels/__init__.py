"""Kernels in Triton, each with a reference in plain PyTorch. Importing this package does not import Triton."""

from banach.kernels.blocks import says
from banach.kernels.device import has_triton
from banach.kernels.latent import LatentForm, describe, latent_solve
from banach.kernels.stack import repeated_stack, residual_stack
from banach.kernels.window import conv2d
from banach.solve import RMS, Euclidean, Tolerance, WorstPixel
from banach.solve import Solution as Solved  # TODO(merge): old name


def Stop(  # TODO(merge): old name of Tolerance
    atol: float, rtol: float = 0.0, max_steps: int = 50, worst_pixel: bool = True, mean: bool = False
) -> Tolerance:
    norm = WorstPixel() if worst_pixel else RMS() if mean else Euclidean()
    return Tolerance(atol=atol, rtol=rtol, max_steps=max_steps, norm=norm)


__all__ = [
    "LatentForm",
    "Solved",
    "Stop",
    "conv2d",
    "describe",
    "has_triton",
    "latent_solve",
    "repeated_stack",
    "residual_stack",
    "says",
]
