"""Fused kernels for residual blocks of few channels, and their twins in plain torch. Importing needs no Triton."""

from banach.kernels.block import Stack
from banach.kernels.latent import latent_solve
from banach.kernels.latent_form import LatentForm, Solved, Stop, describe
from banach.kernels.layout import Layout
from banach.kernels.modules import has_triton, operations_for, repeated_stack, residual_stack
from banach.kernels.operations import Operations
from banach.kernels.plain import Plain
from banach.kernels.window import conv2d

__all__ = [
    "LatentForm",
    "Layout",
    "Operations",
    "Plain",
    "Solved",
    "Stack",
    "Stop",
    "conv2d",
    "describe",
    "has_triton",
    "latent_solve",
    "operations_for",
    "repeated_stack",
    "residual_stack",
]
