"""Kernels in Triton, each with a reference in plain PyTorch. Importing this package does not import Triton."""

from banach.kernels.host import declares, has_triton, lacks
from banach.kernels.inverse import invert
from banach.kernels.latent import LatentForm, describe, latent_solve
from banach.kernels.stack import residual_stack
from banach.kernels.steps import AndersonMemory, anderson_step, picard_step
from banach.kernels.window import conv2d

__all__ = [
    "AndersonMemory", "LatentForm", "anderson_step", "conv2d", "declares", "describe", "has_triton",
    "invert", "lacks", "latent_solve", "picard_step", "residual_stack",
]  # fmt: skip
