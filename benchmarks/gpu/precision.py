"""fp32, tf32 and bf16 as switches that are set for a block of code and put back after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from banach.train.precision import arithmetic, autocast

__all__ = ["PRECISIONS", "autocast", "possible", "searched", "switches"]

PRECISIONS = ("fp32", "tf32", "bf16")


def possible(device: torch.device) -> tuple[str, ...]:
    """The precisions that differ on this device: TF32 is a matter of NVIDIA's tensor cores."""
    return PRECISIONS if device.type == "cuda" else ("fp32", "bf16")


def switches(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """TF32 for "tf32" and nowhere else. PyTorch has it on for convolutions unless someone turns it off."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    return arithmetic(precision, device)


@contextmanager
def searched(device: torch.device, wanted: bool) -> Iterator[None]:
    """cuDNN tries its algorithms at the first call of each shape, for everyone alike."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted and device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
