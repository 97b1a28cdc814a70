"""Waves of processes: they prepare at the same time and take turns on the device, so that only one is timed.

Lock files order them. A turn is an exclusive lock. For a meeting the parent takes a shared lock for each process
before it starts; a process that arrives gives it up and waits for an exclusive one. A process that dies loses its
locks. Every process appends one line to a file of records.
"""

import fcntl
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
# One compiler thread per process: there are as many processes as cores, and idle workers would disturb the timing.
QUIET = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True)
class Gate:
    """The turns and meetings of one process. Without locks, as in tests, nothing waits."""

    handles: tuple[int, ...] = ()  # of the device, of the first and of the second meeting

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other process has its turn, and keep the device."""
        if not self.handles:
            yield
            return
        fcntl.flock(self.handles[0], fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.handles[0], fcntl.LOCK_UN)

    def meet(self, number: int) -> None:
        """Wait until all processes of the wave have come to this meeting, 1 or 2, or have ended."""
        if self.handles:
            fcntl.flock(self.handles[number], fcntl.LOCK_EX)
            fcntl.flock(self.handles[number], fcntl.LOCK_UN)


def run_wave(commands: Mapping[str, list[str]], deadline: float, env: Mapping[str, str]) -> dict[str, str]:
    """Run commands at the same time; return the last line of stderr of each process that failed by itself.

    The numbers of their locks are added as the last arguments. At the deadline (time.monotonic) all are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name, command in commands.items():
                running[name] = _start(command, Path(folder), len(running), env)
            for process in running.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0.0))
            ended = {name: process.poll() for name, process in running.items()}
        finally:
            for process in running.values():
                if process.poll() is None:  # end it, and those that it started
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        failed = {}
        for number, (name, code) in enumerate(ended.items()):
            if code:
                text = Path(folder, f"{number}.err").read_text(errors="replace").strip() or f"exit code {code}"
                failed[name] = text.splitlines()[-1][:300]
        return failed


def _start(command: list[str], folder: Path, number: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    here = str(Path(__file__).resolve().parents[1])  # so that the process finds this package, wherever it runs
    python_path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", ""))))
    # Locks belong to open files, so each process gets its own.
    handles = [os.open(folder / f"lock{lock}", os.O_RDWR | os.O_CREAT) for lock in range(3)]
    for handle in handles[1:]:
        fcntl.flock(handle, fcntl.LOCK_SH)
    try:
        with (folder / f"{number}.err").open("wb") as errors:
            return subprocess.Popen(
                [*command, *map(str, handles)],
                pass_fds=handles,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **QUIET, **env, "PYTHONPATH": python_path},
                start_new_session=True,
            )
    finally:
        for handle in handles:
            os.close(handle)


def append(path: Path, record: Record) -> None:
    """Append a record as one line of JSON. Several processes may do so at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Record]:
    """Return the records of a file, none if it does not exist."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
