"""The timer: actions in turn on a CPU, events between steps on a GPU, peak memory.

Ratios are taken within one run, never across runs. On a CPU the processor time of this process counts: with one
thread it equals the wall clock on an idle machine, and it leaves out other programs on a busy one.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import torch

from benchmarks.counting import LiveBytes
from benchmarks.results import Figure

Action = Callable[[], object]
Input = TypeVar("Input")


def interleaved(actions: Mapping[str, Action], repeats: int, *, warm_up: int = 2) -> dict[str, list[float]]:
    """Return the processor seconds of each action at each repetition.

    The actions run in turn, and the order turns around each time: a slow moment hits all of them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(-warm_up, repeats):
        for name in list(actions) if repeat % 2 else list(actions)[::-1]:
            start = time.process_time()
            actions[name]()
            taken = time.process_time() - start
            if repeat >= 0:
                seconds[name].append(taken)
    return seconds


def ratio(above: list[float], below: list[float]) -> Figure:
    """Return the ratio of two interleaved actions, from its value at each repetition."""
    return Figure.of(a / b for a, b in zip(above, below, strict=True))


def timed_steps(step: Callable[[Input], object], inputs: Iterable[Input], device: torch.device) -> list[float]:
    """Return the milliseconds of each step.

    On a GPU events stand between the steps and only the end waits, as in a training loop. The time of a step then
    includes every pause in which the device had nothing to do.
    """
    given = list(inputs)
    if device.type != "cuda":
        times = [time.perf_counter()]
        for one in given:
            step(one)
            times.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(times)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(given) + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for one, mark in zip(given, marks[1:], strict=True):
        step(one)
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def milliseconds_of(action: Action, device: torch.device, repeats: int = 10, *, warm_up: int = 3) -> Figure:
    """Return the wall time of an action that is waited for each time."""
    taken: list[float] = []
    wait: Any = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    for repeat in range(-warm_up, repeats):
        wait(device)
        start = time.perf_counter()
        action()
        wait(device)
        taken += [1e3 * (time.perf_counter() - start)] if repeat >= 0 else []
    return Figure.of(taken)


def peak_bytes(action: Action, device: torch.device) -> int:
    """Return the most bytes that `action` held at one time, beyond what was there before it."""
    if device.type != "cuda":
        with LiveBytes() as live:
            action()
        return live.peak
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
