"""Timing on a GPU, where work goes on after a call returns, and on a CPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from benchmarks.gpu.points import Batch
from benchmarks.gpu.step import Seen, Step


def timed(step: Step, batches: Iterator[Batch], device: torch.device) -> tuple[list[float], list[Seen]]:
    """Seconds of each step, and what it left behind.

    On a GPU events stand between the steps and nothing waits until the last, as in a training loop: a step's time
    is the device's clock from the end of the one before, with every pause in which the device had nothing to do.
    """
    if device.type != "cuda":
        return _timed_on_cpu(step, batches)
    steps = list(batches)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    seen = []
    torch.cuda.synchronize(device)
    marks[0].record()
    for batch, mark in zip(steps, marks[1:], strict=True):
        step(*batch)
        mark.record()
        seen.append(step.seen)
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)], seen


def _timed_on_cpu(step: Step, batches: Iterator[Batch]) -> tuple[list[float], list[Seen]]:
    seconds, seen = [], []
    for batch in batches:
        start = time.perf_counter()
        step(*batch)
        seconds.append(time.perf_counter() - start)
        seen.append(step.seen)
    return seconds, seen


def seconds_of(action: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The median time of an action, waited for each time."""
    taken = []
    for repeat in range(-3, repeats):
        synchronise(device)
        start = time.perf_counter()
        action()
        synchronise(device)
        if repeat >= 0:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def synchronise(device: torch.device) -> None:
    """Wait for the device, where it works on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quantile(ordered: list[float], share: float) -> float:
    """The nearest of the measured values: with few of them an interpolated one would be invented."""
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
