"""What the host code of the kernels shares: the GPU and Triton, constants of a launch, a second stream."""

from __future__ import annotations

import functools
import importlib.metadata
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result", bound=tuple[Any, ...])
LAG = 2  # pieces of work in flight on the second stream: the tensors that they read stay allocated


@functools.cache
def has_triton() -> bool:
    """Return True if Triton 3.4 or later is installed (PyTorch 2.8); importing it is left to the kernels.

    Older ones cannot read the fields of a constant, and every kernel here gets its sizes as one such record.
    """
    try:
        version = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(version[0]), int(version[1])) >= (3, 4)


@functools.cache
def constants(record: Any) -> Any:
    """Return a frozen dataclass of sizes with its fields as `tl.constexpr`, for a kernel's argument K."""
    from triton.language import constexpr

    return replace(record, **{field.name: constexpr(getattr(record, field.name)) for field in fields(record)})


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def power_of_two(least: int) -> int:
    """Return the least power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def pixel_rows(x: Tensor) -> Tensor:
    """Return images as (N, H, W, C), contiguous. No copy if x is channels_last."""
    return x.detach().permute(0, 2, 3, 1).contiguous()


class SideStream:
    """Run weight-gradient kernels on a second CUDA stream, in parallel with the main chain. On a CPU: at once.

    Every stream that uses this has its own second stream, so that two of them do not wait for each other.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _second_stream(torch.cuda.current_stream(device)) if device.type == "cuda" else None
        self._in_flight: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(self, work: Callable[..., Result], *reads: Tensor) -> Result:
        """Start work(*reads). Use what it returns after `join` only."""
        if self.stream is None:
            return work(*reads)
        main = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        try:
            with torch.cuda.stream(self.stream):
                made = work(*reads)
                done = torch.cuda.Event()
                done.record(self.stream)
        except BaseException:
            main.wait_stream(self.stream)
            raise
        self._in_flight.append((done, reads))  # keeps `reads` from being freed and overwritten
        while len(self._in_flight) > LAG:
            main.wait_event(self._in_flight.popleft()[0])
        return made

    def join(self) -> None:
        """Wait for all work. Without any, a wait would be an error during a capture, so there is none."""
        if self.stream is not None and self._in_flight:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self._in_flight.clear()


@functools.cache
def _second_stream(main: torch.cuda.Stream) -> torch.cuda.Stream:
    return torch.cuda.Stream(main.device)
