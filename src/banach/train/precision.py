"""The arithmetic of a run: true fp32, or TF32 products."""

from contextlib import AbstractContextManager

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
