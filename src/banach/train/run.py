"""A run directory: settings.json, environment.json, metrics.jsonl, checkpoints/ and, at the end, test.json."""

import json
import math
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from banach import checks
from banach.provenance import provenance, signed, unsigned, whole_file, write_json
from banach.train import checkpoint as files
from banach.train.checkpoint import Checkpoint, CheckpointError, Position
from banach.train.metrics import Epoch, Totals
from banach.train.settings import FREE, Settings

SETTINGS, ENVIRONMENT, METRICS, CHECKPOINTS = "settings.json", "environment.json", "metrics.jsonl", "checkpoints"
TEST, PLOT, LOCK = "test.json", "training.png", ".lock"
TERMINATING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class RunError(RuntimeError):
    """A run directory that cannot be used; the message says why, and what to do."""


class DivergenceError(RuntimeError):
    """Training stopped, since a number was not finite; the message says where, why, and what to do."""


@dataclass(frozen=True)
class Run:
    """The directory of one training run. `fit(..., run=run)` resumes from its last checkpoint, if it has one."""

    path: Path
    settings: Settings

    @staticmethod
    def create(path: str | os.PathLike[str], settings: Settings) -> "Run":
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
            write_json(path / SETTINGS, signed(settings.to_dict()))
        return Run(path, settings)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> "Run":
        """Return the run in a directory.

        Raises:
            RunError: if there is none, or its settings cannot be read.
        """
        path = Path(path)
        try:
            text = (path / SETTINGS).read_bytes()
        except OSError as error:
            raise RunError(f"no run in {path} ({SETTINGS}: {error.strerror}); give a run directory") from None
        with _reading(path / SETTINGS, "fix the file, or start a new run with --out"):
            if text.strip(b"\0 \r\n"):
                return Run(path, Settings.from_dict(unsigned(json.loads(text))))
            # What a power cut leaves of a file.
            settings = Settings.from_dict(json.loads((path / ENVIRONMENT).read_bytes())["settings"])
            said = f"{path / SETTINGS} was empty and is restored from {ENVIRONMENT}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
            write_json(path / SETTINGS, signed(settings.to_dict()))
            return Run(path, settings)

    def check(self, settings: Settings) -> None:
        """Refuse to resume with other settings, but for those of `FREE`."""
        given, advice = settings.to_dict(), "resume with the settings of the run, or choose another directory"
        for key, mine in self.settings.to_dict().items():
            if key not in FREE and mine != given[key]:
                raise RunError(f"{self.path} was started with {key}={mine!r}, got {given[key]!r}; {advice}")

    def latest(self) -> Checkpoint | None:
        """Return the newest sound checkpoint, None before the first. Others are skipped with a warning.

        A checkpoint is sound if it is complete and finite.

        Raises:
            CheckpointError: if there are checkpoints and none is sound.
        """
        folder = self.path / CHECKPOINTS
        found = files.checkpoints(folder)
        for path in reversed(found):
            try:
                return files.read_finite(path)
            except CheckpointError as error:
                earlier = "the one before it is tried" if path != found[0] else "there is none before it"
                warnings.warn(f"{error}; {earlier}", RuntimeWarning, stacklevel=2)
        if found:
            raise CheckpointError(f"no checkpoint in {folder} is sound; delete that folder to begin again")
        return None

    def best(self) -> Checkpoint | None:
        """Return the checkpoint of the best epoch, None if nothing was validated.

        The best one has the highest validation accuracy or, without accuracy, the lowest validation loss.

        Raises:
            CheckpointError: if it is damaged.
        """
        position = _best(self.metrics())
        path = None if position is None else self.path / CHECKPOINTS / position.name
        return None if path is None or not path.exists() else files.read_finite(path)

    def save(self, position: Position, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write a checkpoint. The last ones and the best one are kept.

        Raises:
            DivergenceError: if the state is not finite; then nothing is written.
        """
        if name := files.nonfinite(tensors):
            raise DivergenceError(f"{name} is NaN or infinite, so no checkpoint is written; resume {self.path}")
        best = _best([Epoch.from_dict(values) for values in state["done"]])
        files.write_checkpoint(self.path / CHECKPOINTS, tensors, state, self.settings.keep, best)

    def clean(self) -> None:
        """Remove temporary files and folders that a killed process left; call it while holding the lock."""
        for name in (SETTINGS, ENVIRONMENT, METRICS, TEST, PLOT):
            for file in self.path.glob(f".{name}.*"):
                file.unlink(missing_ok=True)
        for folder in (self.path / CHECKPOINTS).glob(f"{files.HALF}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def write_metrics(self, epochs: Iterable[Epoch]) -> None:
        """Write one JSON line per epoch. The whole file is replaced, so no epoch can occur twice."""
        lines = [json.dumps(signed(epoch.to_dict()), allow_nan=False) + "\n" for epoch in epochs]
        with whole_file(self.path / METRICS) as file:
            file.writelines(lines)

    def metrics(self) -> tuple[Epoch, ...]:
        """Return the epochs that are done."""
        path = self.path / METRICS
        if not path.exists():
            return ()
        with _reading(path, "delete it, and resume the run to write it"):
            lines = path.read_bytes().splitlines()
            return tuple(Epoch.from_dict(unsigned(json.loads(line))) for line in lines)

    def write_test(self, content: Mapping[str, Any]) -> None:
        """Store the figures of the test set, which is read once."""
        write_json(self.path / TEST, signed(content))

    def write_plan(self, plan: dict[str, str]) -> None:
        """Add how steps run to environment.json; a damaged one is replaced."""
        write_json(self.path / ENVIRONMENT, {**self.environment(), "plan": plan})

    def environment(self) -> dict[str, Any]:
        """Return what environment.json holds, nothing if it is damaged or missing."""
        with suppress(OSError, ValueError, TypeError, RecursionError):
            return dict(json.loads((self.path / ENVIRONMENT).read_bytes()))
        return {}

    def test(self) -> dict[str, Any] | None:
        """Return the figures of the test set at the end of the run, None before that."""
        path = self.path / TEST
        if not path.exists():
            return None
        with _reading(path, "delete it, and resume the run"):
            content = unsigned(json.loads(path.read_bytes()))
            totals = vars(Totals.from_dict(content["totals"]))
            checks.whole("count", content["count"])
            return {**content, "title": str(content["title"]), "totals": totals}


def _best(epochs: Sequence[Epoch]) -> Position | None:
    """Return where the best epoch ended, see `Run.best`; of equal ones the first."""
    judged = [
        (-loss if epoch.validation_accuracy is None else epoch.validation_accuracy, -epoch.epoch)
        for epoch in epochs
        if (loss := epoch.validation_loss) is not None and math.isfinite(loss + (epoch.validation_accuracy or 0))
    ]
    return Position(-max(judged)[1], 0) if judged else None


@contextmanager
def _reading(path: Path, advice: str) -> Iterator[None]:
    """Say which file is damaged, and what to do."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}; {advice}") from None


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the directory of a run, until the process ends: a second one that trains it is refused."""
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
    """Yield a list to which the first SIGINT, SIGTERM or SIGHUP is added; a second one acts as before.

    Outside the main thread, where Python does not allow signal handlers, nothing changes.
    """
    noted: list[int] = []
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        restore()

    if wanted and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, *TERMINATING):
            # An ignored signal stays ignored, as in a background job. None: a handler that Python did not install.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, note)
    try:
        yield noted
    finally:
        restore()
