"""TODO(merge): old name."""

from banach.kernels.blocks import says

__all__ = ["says"]
