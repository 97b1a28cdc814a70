"""CUDA graphs: warm up a program, capture it, replay it. The one capture layer."""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from banach.fast.depth import LAG, DepthControl

_BROKEN: list[torch.cuda.CUDAGraph] = []  # captures that failed: the allocator may still point to them
WARM_UPS = 2  # runs before a capture: they create handles, plans, optimizer state and compiled kernels


class Graphs:
    """Captured programs that share memory, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.side = _side_stream(self.index)

    def warm_up(self, program: Callable[[], None]) -> None:
        """Run the program on a side stream, which must precede a capture."""
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self.side):
                for _ in range(WARM_UPS):
                    program()
        finally:  # the caller may now restore what it changed
            torch.cuda.current_stream(self.device).wait_stream(self.side)

    def capture(self, program: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record the kernels that the program launches, without running them."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            # Other threads, such as a progress bar, may call CUDA meanwhile: only this thread is restricted.
            with _no_collection(), torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                program()
        except BaseException:
            torch.cuda.set_stream(stream)  # a failed capture leaves its stream current
            self._clean_up(graph)
            raise
        return graph

    def _clean_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Reset allocator and generator after a failed capture. Errors here cannot be repaired, so they pass."""
        _BROKEN.append(graph)
        with suppress(RuntimeError, AttributeError):  # its pool still records
            torch._C._cuda_endAllocateToPool(self.index, self.pool)
        self.pool = torch.cuda.graph_pool_handle()
        # The generator stays in capture mode until a capture succeeds, and every dropout would fail.
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)


class CapturedCalls:
    """Calls of functions of tensors, each a CUDA graph that is captured at the first call with its key.

    On a CPU the functions run eagerly. Results belong to the graph: the next call with the same key overwrites
    them. Capturing changes neither the random state nor the tensors in `keep`.
    """

    def __init__(self, keep: Iterable[Tensor] = ()) -> None:
        self.keep = list(keep)
        self._graphs: Graphs | None = None
        self._made: dict[Any, tuple[list[Tensor], Any, Callable[[], None]]] = {}

    def __call__(self, key: Any, function: Callable[..., Any], inputs: Sequence[Tensor], size: int) -> Any:
        """Return function(*inputs), whose rows beyond those of the inputs, up to `size`, are to be ignored."""
        if inputs[0].device.type != "cuda":
            return function(*inputs)
        if key not in self._made:
            self._made[key] = self._capture(function, [filled(x, size) for x in inputs])
        buffers, result, replay = self._made[key]
        for buffer, x in zip(buffers, inputs, strict=True):
            buffer[: len(x)].copy_(x)
        replay()
        return result

    def _capture(
        self, function: Callable[..., Any], buffers: list[Tensor]
    ) -> tuple[list[Tensor], Any, Callable[[], None]]:
        made: list[Any] = []
        device = buffers[0].device
        if self._graphs is None:
            self._graphs = Graphs(device)

        def program() -> None:
            made[:] = [function(*buffers)]

        with torch.random.fork_rng([device]), unchanged(self.keep):
            self._graphs.warm_up(program)
            graph = self._graphs.capture(program)
        return buffers, made[0], graph.replay


class CapturedLoop:
    """Runs of a body at the depth that a `DepthControl` chooses: one CUDA graph per depth, no host sync.

    A depth is captured when it is first needed. The residuals of a run reach the control `LAG` runs later. The
    body reads tensors that stay in place.

    Args:
        device: a GPU.
        body: body(depth) runs at a depth and returns the excess (2,) that `FixedDepth` returns, or None.
        control: chooses the depth. None: there is one graph, of depth 0.
        restored: a context manager that undoes what the body changes; it surrounds the warm-up.
    """

    def __init__(
        self,
        device: torch.device,
        body: Callable[[int], Tensor | None],
        control: DepthControl | None,
        restored: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.body, self.control, self.restored = body, control, restored
        self.graphs = Graphs(device)
        self.captured: dict[int, torch.cuda.CUDAGraph] = {}
        self.excess = torch.zeros(2, dtype=torch.float64, device=device)
        # Pinned memory, so that a copy does not block the host.
        self.free = [torch.zeros(2, dtype=torch.float64, pin_memory=True) for _ in range(LAG + 1)]
        self.sent: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()

    @property
    def depth(self) -> int:
        """The depth of the next run."""
        return 0 if self.control is None else self.control.depth

    def prepare(self) -> None:
        """Capture the current depth. A body that cannot be captured raises here, and changes nothing."""
        depth = self.depth
        if depth in self.captured:
            return
        if not self.captured:
            with self.restored():
                self.graphs.warm_up(lambda: self._program(depth))
        self.captured[depth] = self.graphs.capture(lambda: self._program(depth))

    def run(self) -> int:
        """Replay one step and return its depth."""
        self.prepare()
        depth = self.depth
        self.captured[depth].replay()
        if self.control is not None:
            self._send(depth)
            self._receive(self.control)
        return depth

    def _program(self, depth: int) -> None:
        excess = self.body(depth)
        if excess is not None:
            self.excess.copy_(excess)

    def _send(self, depth: int) -> None:
        slot, event = self.free.pop(), torch.cuda.Event()
        slot.copy_(self.excess, non_blocking=True)
        event.record()
        self.sent.append((depth, slot, event))

    def _receive(self, control: DepthControl) -> None:
        """Read what was sent LAG runs ago. The host waits only if it is that far ahead of the device."""
        if len(self.sent) <= LAG:
            return
        depth, slot, event = self.sent.popleft()
        event.synchronize()
        control.observe(depth, *slot.tolist())
        self.free.append(slot)


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """Return one stream for all warm-ups on a device: cuBLAS keeps 32 MiB for every stream it was used on.

    Captures run on another one, where cuBLAS takes memory from the graph's pool.
    """
    return torch.cuda.Stream(index)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector: an old graph that it deletes during a capture would break the capture."""
    gc.collect()  # an autograd graph of the warm-up, kept alive by a cycle, would accumulate on its own stream
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def unchanged(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of the tensors after the block."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


def reason_of(error: Exception) -> str:
    """Return why a program could not be captured, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def bucket(count: int) -> int:
    """Return the next power of two: one graph per batch size would be one per call."""
    return 1 << max(count - 1, 0).bit_length()


def filled(x: Tensor, size: int) -> Tensor:
    """Return x, then copies of its first sample up to `size`: layers give finite values for real samples."""
    if size == len(x):
        return x.clone()
    buffer = torch.empty_like(x[:1].expand(size, *x.shape[1:]), memory_format=torch.preserve_format)
    buffer = buffer.contiguous() if 0 in buffer.stride() else buffer
    buffer.copy_(x[:1].expand(size, *x.shape[1:]))
    buffer[: len(x)].copy_(x)
    return buffer
