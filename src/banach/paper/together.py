"""Several trainings at once on one device, each in a process of its own, with what is measured of it."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from banach.paper.study import Options, Part
from banach.train.run import RunError
from banach.train.stop import stop_on_signals

LOOK = 0.5  # seconds between looks whether a signal came


def carry_out_together(
    parts: Sequence[Part], options: Options, told: Callable[[int], None] = lambda _: None
) -> None:
    """Every part once, `options.at_once` at a time, in their order; `told` hears how many are done.

    After an error, or SIGINT or SIGTERM, no more begin; those at work end, or keep what they have. Then it is
    raised.
    """
    waiting, working = deque(parts), list[_Worker]()
    errors = list[BaseException]()
    try:
        with stop_on_signals() as stop:
            while working or waiting:
                while waiting and len(working) < options.at_once:
                    working.append(_Worker(waiting.popleft(), replace(options, say=Options.say)))
                wait([worker.process.sentinel for worker in working], LOOK)
                for worker in [worker for worker in working if not worker.process.is_alive()]:
                    working.remove(worker)
                    errors += worker.errors()
                    told(len(parts) - len(waiting) - len(working) - len(errors))
                if stop.asked or errors:
                    waiting.clear()
                if stop.asked:
                    _pass_on(stop.asked, working)
    finally:
        for worker in working:
            worker.process.terminate()
    if stop.asked:
        raise KeyboardInterrupt  # as from a training alone: it is resumed next time
    if errors:
        raise errors[0]


class _Worker:
    """A process at one part; what goes wrong there comes back by a pipe."""

    def __init__(self, part: Part, options: Options) -> None:
        context = mp.get_context("spawn")  # CUDA does not survive a fork
        self.told: int | None = None  # the signal
        self.pipe, there = context.Pipe(duplex=False)
        self.process: Any = context.Process(target=_work, args=(part, options, there), daemon=True)
        self.process.start()
        there.close()

    def errors(self) -> list[BaseException]:
        """None, or the one."""
        self.process.join()
        try:
            found = self.pipe.recv()
        except EOFError:
            found = RunError(
                f"a training ended without a word, exit code {self.process.exitcode}; run the command again, "
                "which goes on from what is kept; if memory is short, with fewer at once"
            )
        self.pipe.close()
        return [] if found is None else [found]


def _pass_on(number: int, working: Sequence[_Worker]) -> None:
    """Once to each: to a training, a second signal says to drop everything."""
    for worker in working:
        if worker.told is None:
            worker.told = number
            os.kill(worker.process.pid, number)


def _work(part: Part, options: Options, pipe: Connection) -> None:
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # a terminal sends its interrupt to the whole group; here it comes by the parent alone
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if options.torch_device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.at_once))
    try:
        part(options)
        pipe.send(None)
    except (Exception, KeyboardInterrupt) as error:
        pipe.send(_portable(error))


def _end_with_parent() -> None:
    """One that was killed can pass nothing on: its trainings keep what they have and stop, too."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)


def _portable(error: BaseException) -> BaseException:
    """Itself, if it arrives as it was sent."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
