"""Peak memory of a contender among others: what it adds to what was there before."""

from __future__ import annotations

import gc

import torch


def base(device: torch.device) -> int:
    """Bytes in use before a contender is built, garbage apart."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    _forget_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def above(device: torch.device, base: int) -> int | None:
    """The most that was in use beside `base`: weights, moments, gradients, activations. None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - base


def forget(device: torch.device) -> None:
    """Begin again: the peak is what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _forget_workspaces() -> None:
    """cuBLAS keeps 32 MiB for each stream it was used on: who comes first would pay for who comes later."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
