"""CUDA graphs: run a program once to warm it up, capture it, replay it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

_BROKEN: list[torch.cuda.CUDAGraph] = []  # captures that broke off: the allocator may still point to them
WARM_UPS = 2  # runs before a capture: they make what is made lazily (handles, plans, optimizer state, kernels)


class Graphs:
    """Captured programs that share memory, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.side = _side_stream(self.index)

    def warm_up(self, program: Callable[[], None]) -> None:
        """Run it beside the current stream, as a capture must be preceded by."""
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self.side):
                for _ in range(WARM_UPS):
                    program()
        finally:  # what it has changed may be put back now
            torch.cuda.current_stream(self.device).wait_stream(self.side)

    def capture(self, program: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record what the program launches; nothing of it is carried out."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            # Other threads (a progress bar) may call CUDA meanwhile: only this thread is held to the rules.
            with (
                _no_collection(),
                torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
            ):
                program()
        except BaseException:
            torch.cuda.set_stream(stream)  # a capture that breaks off leaves its own one current
            self._clear_up(graph)
            raise
        return graph

    def _clear_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a capture that broke off. What fails here was in order, or is beyond repair."""
        _BROKEN.append(graph)
        with suppress(RuntimeError, AttributeError):  # its pool still records
            torch._C._cuda_endAllocateToPool(self.index, self.pool)
        self.pool = torch.cuda.graph_pool_handle()
        # The generator is in the midst of a capture until one ends well, and every dropout would fail.
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """One for all warm-ups on a device: cuBLAS keeps 32 MiB for every stream that it was used on. Captures have
    another one: what cuBLAS takes there lies in the memory of the graph."""
    return torch.cuda.Stream(index)


@contextmanager
def _no_collection() -> Iterator[None]:
    """An old graph that the garbage collector throws away during a capture would break it off: it can wait."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def unchanged(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Whatever happens inside, the tensors have their values again afterwards."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


def why_not_captured(error: Exception) -> str:
    """What a program did that a capture cannot hold, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
