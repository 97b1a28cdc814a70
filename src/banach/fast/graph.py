"""CUDA graphs: run a program once to warm it up, capture it, replay it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WARM_UPS = 2  # runs before a capture: they make what is made lazily (handles, plans, optimizer state, kernels)


class Graphs:
    """Captured programs that share memory, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()

    def warm_up(self, program: Callable[[], None]) -> None:
        """Run it beside the current stream, as a capture must be preceded by."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                program()
        torch.cuda.current_stream(self.device).wait_stream(side)

    def capture(self, program: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record what the program launches; nothing of it is carried out."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            # Other threads (a progress bar) may call CUDA meanwhile: only this thread is held to the rules.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                program()
        except BaseException:
            torch.cuda.set_stream(stream)  # a capture that breaks off leaves its own one current
            self._end_well()
            raise
        return graph

    def _end_well(self) -> None:
        """A capture that breaks off leaves the generator in the midst of one, and every dropout would fail."""
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)


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
