"""The arithmetic of a run: true fp32, TF32 products, or bf16 by autocast."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def arithmetic(precision: str, device: torch.device, *, search: bool | None = None) -> Iterator[None]:
    """Set TF32 for the block and restore it: on a GPU it is a global switch, and on for convolutions.

    `search` lets cuDNN try its algorithms, which pays where shapes repeat; None: as it is.
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
    """Return autocast to bf16 for "bf16", else a context that does nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
