"""What the kernels' benchmark is measured with: a budget of time, a line for each result, captured repetitions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from banach.kernels import Layout, Plain
from banach.kernels.operations import Operations
from banach.kernels.tiles import Tiles
from banach.models.cifar10 import CHANNELS

Call = Callable[[], object]
LAYOUT = Layout(CHANNELS)


@dataclass
class Bench:
    """What is measured, where, and what was found so far."""

    device: torch.device
    batch: int = 512
    sides: tuple[int, ...] = (40, 20, 10)
    blocks: int = 16
    seconds: float = 140.0  # begin nothing after that
    found: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def operations(self, tiles: Tiles = Tiles()) -> Operations:
        if self.device.type == "cpu":
            return Plain(LAYOUT, torch.bfloat16)
        from banach.kernels.fused import Fused

        return Fused(LAYOUT, tiles=tiles)

    def line(self, name: str, make: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
        """make(*arguments), printed and kept. One that fails is reported and skipped."""
        used = time.perf_counter() - self.began
        if used > self.seconds:
            print(f"{name}: left out, {used:.0f} s are used", flush=True)
            return {}
        try:
            values = make(*arguments)
        except Exception as error:
            self.found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            print(f"{name}: FAILED: {type(error).__name__}: {str(error).strip()[:160]}", flush=True)
            return {}
        self.found[name] = values
        print(f"{name}: " + "  ".join(f"{key} {value:.4g}" for key, value in values.items()), flush=True)
        return values

    def milliseconds(self, calls: Sequence[Call], repeats: int = 15) -> float:
        """Median time of one of the calls. On a GPU all of them are captured, and replays of that are timed."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - start) * 1e3 / len(calls)
        graph = self._capture(calls)
        marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
        ]
        graph.replay()
        for before, after in marks:
            before.record()
            graph.replay()
            after.record()
        torch.cuda.synchronize()
        return statistics.median(before.elapsed_time(after) for before, after in marks) / len(calls)

    def rates(self, calls: Sequence[Call], flops: float, moved: float) -> dict[str, float]:
        """Time, and the operations and bytes that are needed, over it."""
        ms = self.milliseconds(calls)
        return {"ms": ms, "TFLOP/s": flops / ms / 1e9, "TB/s": moved / ms / 1e9}

    def _capture(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def images(self, side: int, channels: int = CHANNELS) -> Tensor:
        x = torch.randn(self.batch, channels, side, side, device=self.device).bfloat16()
        return x.contiguous(memory_format=torch.channels_last)

    def copies(self, side: int) -> int:
        """So many sets of tensors that they do not stay in the second cache from one repetition to the next."""
        return (
            max(2, 200_000_000 // (self.batch * side * side * LAYOUT.pitch * 4))
            if self.device.type == "cuda"
            else 1
        )
