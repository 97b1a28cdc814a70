"""Timings that can be compared: interleaved, paired, medians; ratios within one run, never across runs.

Processor time of this process, not the clock on the wall: with one thread they are the same on an idle
machine, and on a busy one the other programs' time is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from banach.provenance import Summary

Action = Callable[[], object]


def interleaved(actions: Mapping[str, Action], repeats: int, *, warm_up: int = 2) -> dict[str, list[float]]:
    """Processor seconds of every action at every repetition, in turn, so a slow moment hits all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(-warm_up, repeats):
        # The order turns around each time: what runs first finds the caches as the last one left them.
        names = list(actions) if repeat % 2 else list(actions)[::-1]
        for name in names:
            start = time.process_time()
            actions[name]()
            taken = time.process_time() - start
            if repeat >= 0:
                seconds[name].append(taken)
    return seconds


def ratio(above: list[float], below: list[float]) -> Summary:
    """The ratio of two actions, from its value at each repetition."""
    return Summary.of(a / b for a, b in zip(above, below, strict=True))
