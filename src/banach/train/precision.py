"""The arithmetic of a run: true fp32, TF32 products, or bf16 by autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def arithmetic(precision: str, device: torch.device) -> Iterator[None]:
    """TF32 on a GPU is a global switch, and convolutions have it on: set for the run, then put back."""
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """bf16 where it is asked for, nothing elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
