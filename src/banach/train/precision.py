"""The arithmetic of a run: true fp32, TF32 products, or bf16 by autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


@contextmanager
def arithmetic(precision: str, device: torch.device, *, search: bool | None = None) -> Iterator[None]:
    """TF32 on a GPU is a global switch, and convolutions have it on: set for the block, then put back.

    `search` lets cuDNN try its algorithms, which pays where the same shapes come again and again.
    """
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    cudnn.benchmark = before[2] if search is None else search
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """bf16 where it is asked for, nothing elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def at_least_fp32(output: Tensor) -> Tensor:
    """What a loss is computed from: half precision would lose its digits in the sum over classes."""
    return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
