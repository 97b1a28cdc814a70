"""How often a step makes the host wait for the device."""

from __future__ import annotations

import warnings

import torch

from benchmarks.counting import Calls
from benchmarks.gpu.points import Batch
from benchmarks.gpu.step import Step


def host_syncs(step: Step, batch: Batch, device: torch.device) -> int:
    """One step, watched.

    On a GPU PyTorch itself tells of every operation that waits (its synchronisation debug mode). Waiting for an
    event or for the whole device on purpose is not told: `--profile` counts those calls too. On a CPU nothing
    waits; there the reads that would wait on a GPU are counted, in the forward and backward pass. (Adam keeps its
    step numbers on the host and reads them there.)
    """
    if device.type != "cuda":
        calls = Calls(1)
        with calls:
            step.gradients(*batch)
        return calls.syncs.total()
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step(*batch)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing" in str(one.message) for one in told)
