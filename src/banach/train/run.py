"""A run directory: settings.json, environment.json, metrics.jsonl, checkpoints/ and, at the end, test.json."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from banach.provenance import provenance, whole_file, write_json
from banach.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    Position,
    check_state,
    checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from banach.train.history import Epoch
from banach.train.settings import Settings
from banach.train.tally import Totals

SETTINGS, ENVIRONMENT, METRICS, CHECKPOINTS = "settings.json", "environment.json", "metrics.jsonl", "checkpoints"
TEST, LOCK = "test.json", ".lock"


class RunError(RuntimeError):
    """A run directory that cannot be used as asked; the sentence says why, and what to do."""


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the directory of a run, or say that another process does. The system lets go when a process dies."""
    try:
        import fcntl
    except ImportError:  # not on Windows: there two processes are the user's to keep apart
        yield
        return
    with (path / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another process is training {path}; wait for it, or choose another directory"
            ) from None
        yield


def _check_free(path: Path) -> None:
    """Is this a place for a new run? A kill may have left the first file of one that never began."""
    if (path / SETTINGS).exists():
        raise RunError(f"there is a run in {path} already; resume it, or choose another directory")
    if path.exists() and (not path.is_dir() or any(not _is_left_over(f.name) for f in path.iterdir())):
        raise RunError(f"{path} is not an empty directory; choose another one for the run")


def _is_left_over(name: str) -> bool:
    """Of a run that never began: its first file, its lock, or a file of which the writing was cut off."""
    return name in (ENVIRONMENT, LOCK) or name.startswith((f".{SETTINGS}.", f".{ENVIRONMENT}."))


@dataclass(frozen=True)
class Run:
    """The directory of one training run. `fit(..., run=run)` goes on from its last checkpoint, if it has one."""

    path: Path
    settings: Settings

    @staticmethod
    def create(path: str | os.PathLike[str], settings: Settings) -> Run:
        """A new run; a directory that holds one already, or other files, is refused."""
        path = Path(path)
        _check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        with lock(path):
            _check_free(path)
            # The settings come last: where they are, the rest of a new run is there too.
            write_json(path / ENVIRONMENT, provenance(settings.to_dict(), device=settings.torch_device))
            write_json(path / SETTINGS, settings.to_dict())
        return Run(path, settings)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Run:
        """The run in a directory."""
        path = Path(path)
        try:
            values = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
            settings = Settings.from_dict(values)
        except OSError as error:
            raise RunError(f"there is no run in {path}: {error.strerror}: {SETTINGS}") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(f"{path / SETTINGS} cannot be read: {error}; put it right, or train anew") from None
        return Run(path, settings)

    def locked(self) -> AbstractContextManager[None]:
        """For the time of training: a second process that trains the same run is refused."""
        return lock(self.path)

    def check(self, settings: Settings) -> None:
        """Refuse to go on with other settings; the device may change."""
        mine, given = self.settings.to_dict(), settings.to_dict()
        for key in mine:
            if key != "device" and mine[key] != given[key]:
                raise RunError(
                    f"{self.path} was begun with {key}={mine[key]!r}, got {given[key]!r}; go on with the settings "
                    "of the run, or choose another directory"
                )

    def latest(self) -> Checkpoint | None:
        """The newest sound checkpoint, None before the first. A damaged one is passed by with a warning."""
        found = checkpoints(self.path / CHECKPOINTS)
        for path in reversed(found):
            try:
                checkpoint = read_checkpoint(path)
                check_state(checkpoint)
            except CheckpointError as error:
                earlier = "the one before it is tried" if path != found[0] else "there is none before it"
                warnings.warn(f"{error}; {earlier}", RuntimeWarning, stacklevel=2)
                continue
            return checkpoint
        if found:
            raise CheckpointError(
                f"no checkpoint in {self.path / CHECKPOINTS} is sound; delete that folder to begin again"
            )
        return None

    def save(self, position: Position, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Keep a checkpoint, whole or not at all."""
        write_checkpoint(self.path / CHECKPOINTS, position, tensors, state)

    def write_metrics(self, epochs: Iterable[Epoch]) -> None:
        """One JSON line per epoch. The file is written anew each time, so no epoch can stand in it twice."""
        lines = [json.dumps(epoch.to_dict(), allow_nan=False) + "\n" for epoch in epochs]
        with whole_file(self.path / METRICS) as file:
            file.writelines(lines)

    def metrics(self) -> tuple[Epoch, ...]:
        """The epochs that are done."""
        path = self.path / METRICS
        if not path.exists():
            return ()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            return tuple(Epoch.from_dict(json.loads(line)) for line in lines)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(
                f"{path} cannot be read: {error}; delete it, and resume the run to write it anew"
            ) from None

    def write_test(self, content: Mapping[str, Any]) -> None:
        """Keep what the test set said: it is read once."""
        write_json(self.path / TEST, content)

    def test(self) -> dict[str, Any] | None:
        """What the test set said at the end of the run, None before that."""
        path = self.path / TEST
        if not path.exists():
            return None
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            content["title"], content["count"]
            totals = {key: float(v) if isinstance(v, str) else v for key, v in content["totals"].items()}
            made: Any = Totals
            content["totals"] = vars(made(**totals))
            float(totals["accuracy"]), float(totals["loss"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunError(f"{path} cannot be read: {error}; delete it, and resume the run") from None
        return content
