"""Contenders in processes: each measurement has its own process, so that none finds another's caches or memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

Result = TypeVar("Result")
Job = Callable[[list[Any]], Result]

# A contender that fails must not end the run of the others.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, ImportError, OSError)


def alone(function: Callable[..., Result], *arguments: Any) -> Result:
    """Return function(*arguments), called in a fresh process. Both must be picklable."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def here(function: Callable[..., Result], *arguments: Any) -> Result:
    """Return function(*arguments), called in this process: for tests, where a process costs too much."""
    return function(*arguments)


def in_rounds(jobs: Mapping[str, Job[Result]], rounds: int) -> tuple[dict[str, list[Result]], list[str]]:
    """Run every job once per round, the order turned around each time.

    Args:
        jobs: each is called with its own results so far.
        rounds: how often each job runs. A job that failed is not called again.
    Returns:
        the results of each job that never failed, and one sentence for each that did.
    """
    found: dict[str, list[Result]] = {name: [] for name in jobs}
    notes: list[str] = []
    for number in range(rounds):
        for name in list(found) if number % 2 == 0 else list(found)[::-1]:
            try:
                found[name].append(jobs[name](found[name]))
            except (*FAILURES, BrokenProcessPool) as error:
                lines = str(error).strip().splitlines() or [""]
                notes.append(f"{name} failed: {type(error).__name__}: {lines[0]}")
                del found[name]
    return found, notes
