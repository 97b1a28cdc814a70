"""SIGINT and SIGTERM as a request: finish the step, checkpoint, stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stop:
    """`asked` is the signal that came, None before one does."""

    asked: int | None = None


@contextmanager
def stop_on_signals(wanted: bool = True) -> Iterator[Stop]:
    """Inside, the first SIGINT or SIGTERM is noted; a second one acts as it did before.

    Outside the main thread, where Python lets no one handle signals, nothing changes.
    """
    stop = Stop()
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: Any) -> None:
        stop.asked = number
        restore()

    for number in (signal.SIGINT, signal.SIGTERM):
        # What was told to be ignored, as in a background job, stays so. None: a handler that is not Python's.
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            before[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()
