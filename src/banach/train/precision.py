"""The arithmetic of a run: true fp32, TF32 products, or bf16 by autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from banach.solve.context import assigned


def arithmetic(
    precision: str, device: torch.device, *, search: bool | None = None
) -> AbstractContextManager[None]:
    """Set TF32 for the block and restore it: on a GPU it is a global switch, and on for convolutions.

    `search` lets cuDNN try its algorithms, which pays where shapes repeat; None: as it is.
    """
    matmul, cudnn, tf32 = torch.backends.cuda.matmul, torch.backends.cudnn, precision == "tf32"
    changes = [(matmul, "allow_tf32", tf32), (cudnn, "allow_tf32", tf32)]
    if search is not None:
        changes.append((cudnn, "benchmark", search))
    return assigned(changes if device.type == "cuda" else [])


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return autocast to bf16 for "bf16", else a context that does nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
