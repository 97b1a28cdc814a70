"""Work that nothing waits for until the end: on a second stream, beside the chain that goes on."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result", bound=tuple[Any, ...])
LAG = 2  # pieces of work that may be under way: what they read stays in memory


class Beside:
    """`run` starts work that reads some tensors and makes others, `join` waits for all of it.

    On a CPU it is done at once. Two streams that use this keep apart: each has a second stream of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _second_stream(torch.cuda.current_stream(device)) if device.type == "cuda" else None
        self._under_way: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(self, work: Callable[..., Result], *reads: Tensor) -> Result:
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
        self._under_way.append((done, reads))  # not freed, and so not written over, before it is read
        while len(self._under_way) > LAG:
            main.wait_event(self._under_way.popleft()[0])
        return made

    def join(self) -> None:
        """What was made may be used. Where nothing was, there is nothing to wait for: in a capture, which the
        second stream has then no part in, that would be refused."""
        if self.stream is not None and self._under_way:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self._under_way.clear()


@functools.cache
def _second_stream(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """One for each stream: what is freed after use on that one is written over after it has been waited for."""
    return torch.cuda.Stream(main.device)
