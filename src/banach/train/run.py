"""A run directory: settings.json, environment.json, metrics.jsonl, checkpoints/ and, at the end, test.json."""

from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from banach.provenance import numbers, provenance, whole_file, write_json
from banach.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    Position,
    checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from banach.train.metrics import Epoch, Totals
from banach.train.settings import Settings

SETTINGS, ENVIRONMENT, METRICS, CHECKPOINTS = "settings.json", "environment.json", "metrics.jsonl", "checkpoints"
TEST, LOCK = "test.json", ".lock"


class RunError(RuntimeError):
    """A run directory that cannot be used; the message says why, and what to do."""


@dataclass(frozen=True)
class Run:
    """The directory of one training run. `fit(..., run=run)` resumes from its last checkpoint, if it has one."""

    path: Path
    settings: Settings

    @staticmethod
    def create(path: str | os.PathLike[str], settings: Settings) -> Run:
        """Make the directory of a new run.

        Raises:
            RunError: if the directory holds a run or other files.
        """
        path = Path(path)
        _check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        with lock(path):
            _check_free(path)
            # The settings come last: if they exist, the rest of a new run exists too.
            write_json(path / ENVIRONMENT, provenance(settings.to_dict(), device=settings.torch_device))
            write_json(path / SETTINGS, settings.to_dict())
        return Run(path, settings)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Run:
        """Return the run in a directory.

        Raises:
            RunError: if there is none, or its settings cannot be read.
        """
        path = Path(path)
        try:
            text = (path / SETTINGS).read_bytes()
        except OSError as error:
            raise RunError(f"there is no run in {path}: {error.strerror}: {SETTINGS}") from None
        with _reading(path / SETTINGS, "fix the file, or start a new run with --out"):
            return Run(path, Settings.from_dict(json.loads(text)))

    def check(self, settings: Settings) -> None:
        """Refuse to resume with other settings; the device may change."""
        given, advice = settings.to_dict(), "resume with the settings of the run, or choose another directory"
        for key, mine in self.settings.to_dict().items():
            if key != "device" and mine != given[key]:
                raise RunError(f"{self.path} was started with {key}={mine!r}, got {given[key]!r}; {advice}")

    def latest(self) -> Checkpoint | None:
        """Return the newest sound checkpoint, None before the first. Damaged ones are skipped with a warning.

        Raises:
            CheckpointError: if there are checkpoints and none is sound.
        """
        folder = self.path / CHECKPOINTS
        found = checkpoints(folder)
        for path in reversed(found):
            try:
                return read_checkpoint(path)
            except CheckpointError as error:
                earlier = "the one before it is tried" if path != found[0] else "there is none before it"
                warnings.warn(f"{error}; {earlier}", RuntimeWarning, stacklevel=2)
        if found:
            raise CheckpointError(f"no checkpoint in {folder} is sound; delete that folder to begin again")
        return None

    def save(self, position: Position, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write a checkpoint."""
        write_checkpoint(self.path / CHECKPOINTS, position, tensors, state)

    def write_metrics(self, epochs: Iterable[Epoch]) -> None:
        """Write one JSON line per epoch. The whole file is replaced, so no epoch can occur twice."""
        lines = [json.dumps(epoch.to_dict(), allow_nan=False) + "\n" for epoch in epochs]
        with whole_file(self.path / METRICS) as file:
            file.writelines(lines)

    def metrics(self) -> tuple[Epoch, ...]:
        """Return the epochs that are done."""
        path = self.path / METRICS
        if not path.exists():
            return ()
        with _reading(path, "delete it, and resume the run to write it"):
            return tuple(Epoch.from_dict(json.loads(line)) for line in path.read_bytes().splitlines())

    def write_test(self, content: Mapping[str, Any]) -> None:
        """Store the figures of the test set, which is read once."""
        write_json(self.path / TEST, content)

    def write_plan(self, plan: dict[str, str]) -> None:
        """Add how steps run to environment.json. Nothing is read from that file, so a damaged one is replaced."""
        path, content = self.path / ENVIRONMENT, {}
        with suppress(OSError, ValueError, TypeError):
            content = dict(json.loads(path.read_bytes()))
        write_json(path, {**content, "plan": plan})

    def test(self) -> dict[str, Any] | None:
        """Return the figures of the test set at the end of the run, None before that."""
        path = self.path / TEST
        if not path.exists():
            return None
        with _reading(path, "delete it, and resume the run"):
            content: dict[str, Any] = json.loads(path.read_bytes())
            totals = Totals(**numbers(content["totals"]))
            float(totals.accuracy), float(totals.loss), content["title"], content["count"]
            return {**content, "totals": vars(totals)}


@contextmanager
def _reading(path: Path, advice: str) -> Iterator[None]:
    """Say which file is damaged, and what to do."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}; {advice}") from None


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the directory of a run: a second process that trains it is refused.

    The system releases the lock when the process ends.
    """
    try:
        import fcntl
    except ImportError:  # on Windows there is no lock
        yield
        return
    with (path / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advice = "wait for it, or choose another directory"
            raise RunError(f"another process is training {path}; {advice}") from None
        yield


def _check_free(path: Path) -> None:
    """Refuse a directory that holds a run or other files. A kill may have left some of a run that never began."""
    if (path / SETTINGS).exists():
        raise RunError(f"there is a run in {path} already; resume it, or choose another directory")
    left_over = (f".{SETTINGS}.", f".{ENVIRONMENT}.", ENVIRONMENT, LOCK)
    if path.exists() and (not path.is_dir() or any(not f.name.startswith(left_over) for f in path.iterdir())):
        raise RunError(f"{path} is not an empty directory; choose another one for the run")


@contextmanager
def noted_signals(wanted: bool = True) -> Iterator[list[int]]:
    """Yield a list to which the first SIGINT or SIGTERM in the block is added; a second one acts as before.

    Outside the main thread, where Python does not allow signal handlers, nothing changes.
    """
    noted: list[int] = []
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        restore()

    for number in (signal.SIGINT, signal.SIGTERM):
        # An ignored signal stays ignored, as in a background job. None: a handler that Python did not install.
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            before[number] = signal.signal(number, note)
    try:
        yield noted
    finally:
        restore()
