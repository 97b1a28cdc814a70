"""Where the time of a step goes: the kernels that take most, and the share of each kind of work."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.gpu.clock import synchronise
from benchmarks.gpu.points import Batch
from benchmarks.gpu.step import Step

# The first kind with a word in the kernel's name. A fused kernel of Triton carries the names of all that it does,
# and copies are elementwise kernels by name, so the order matters.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("pointwise", ("triton_poi", "pool")),
    ("batch norm and reduction", ("triton_red", "triton_per")),
    ("convolution", ("triton_tem", "splitk")),
    ("copy", ("memcpy", "memset", "direct_copy", "copy_", "nchwtonhwc", "nhwctonchw", "catarray", "aten::fill_")),
    ("optimizer", ("multi_tensor_apply", "adam", "_foreach", "aten::lerp", "aten::addcdiv", "aten::addcmul")),
    ("batch norm and reduction", ("bn_fw", "bn_bw", "batch_norm", "batchnorm", "reduce", "welford", "norm")),
    ("batch norm and reduction", ("softmax", "aten::sum", "aten::mean", "aten::amax", "aten::max")),
    ("convolution", ("conv", "gemm", "fprop", "dgrad", "wgrad", "winograd", "xmma", "cutlass", "cudnn", "mm")),
    ("pointwise", ("elementwise", "leaky_relu", "dropout", "aten::", "nll_loss", "triton_")),
)
# The kernels of banach.kernels, by their whole names.
OWN = {
    "iterate": "whole solve",
    **dict.fromkeys(("look", "look_back", "convolve", "correlate", "unfold", "add"), "convolution"),
    **dict.fromkeys(("fold", "average", "unnormalise"), "batch norm and reduction"),
    **dict.fromkeys(("pack", "turn", "enter", "leave"), "copy"),
}
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Span:
    """A kernel, or an operation of the CPU: when it ran, in microseconds."""

    name: str
    start: float
    taken: float


@dataclass(frozen=True)
class Profile:
    """Per step: wall time, time in which the device worked, ms and share of the wall by kind, the top kernels."""

    wall_ms: float
    busy_ms: float
    kernels: float
    kinds: dict[str, float]
    shares: dict[str, float]
    top: list[dict[str, Any]]
    waits: dict[str, float]  # calls by which the host waits, per step

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def profile(
    step: Step, batches: Iterator[Batch], device: torch.device, *, steps: int = 5, top: int = 15
) -> Profile:
    """Some steps under PyTorch's profiler, after two that are not. The profiler itself slows the host down."""
    for batch in islice(batches, 2):
        step(*batch)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    synchronise(device)
    with torch.profiler.profile(activities=activities) as prof:
        start = time.perf_counter()
        for batch in islice(batches, steps):
            step(*batch)
        synchronise(device)
        wall = 1e6 * (time.perf_counter() - start)
    if device.type == "cuda":
        events = _trace(prof)
        spans = [Span(e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") in _ON_GPU]
        waits = Counter(e["name"] for e in events if e.get("cat") == "cuda_runtime" and e["name"] in _WAITS)
    else:
        # On a CPU an operation holds others: what it took by itself is all that is asked of it.
        own = [e for e in prof.key_averages() if e.key.startswith("aten::")]
        spans = [Span(e.key, 0.0, e.self_cpu_time_total / e.count) for e in own for _ in range(e.count)]
        waits = Counter()
    return summarise(spans, wall, steps, top=top, waits=waits, apart=device.type == "cuda")


def summarise(
    spans: list[Span], wall: float, steps: int, *, top: int = 15, waits: Counter[str], apart: bool = True
) -> Profile:
    """Sums of the spans by kind and by name. `apart`: the spans have places in time, so their union is known."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        by_name[span.name].append(span.taken)
    totals = {name: sum(taken) for name, taken in by_name.items()}
    kinds: Counter[str] = Counter()
    for name, total in totals.items():
        kinds[kind(name)] += total  # type: ignore[assignment]
    busy = union(spans) if apart else sum(totals.values())
    kinds["idle"] = max(wall - busy, 0.0)  # type: ignore[assignment]
    order = sorted(totals, key=lambda name: -totals[name])[:top]
    return Profile(
        wall_ms=wall / steps / 1e3,
        busy_ms=busy / steps / 1e3,
        kernels=len(spans) / steps,
        kinds={name: total / steps / 1e3 for name, total in kinds.most_common()},
        shares={name: total / max(wall, busy) for name, total in kinds.most_common()},
        top=[
            {
                "name": name[:160],
                "kind": kind(name),
                "ms": totals[name] / steps / 1e3,
                "calls": len(by_name[name]) / steps,
            }
            for name in order
        ],
        waits={name: number / steps for name, number in waits.items()},
    )


def kind(name: str) -> str:
    """What a kernel does, by its name."""
    if name in OWN:
        return OWN[name]
    lower = name.lower()
    return next((kind for kind, words in KINDS if any(word in lower for word in words)), "other")


def union(spans: Iterable[Span]) -> float:
    """The time in which at least one of them ran."""
    busy, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda one: one.start):
        last = span.start + span.taken
        busy += max(0.0, last - max(end, span.start))
        end = max(end, last)
    return busy


def _trace(prof: Any) -> list[dict[str, Any]]:
    """The profiler's events with their categories, which tell kernels from annotations that span them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]
