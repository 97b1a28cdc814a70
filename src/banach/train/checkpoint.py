"""A checkpoint on disk: tensors as safetensors, the rest as JSON, both with a checksum; nothing can run code."""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from banach.provenance import digest, naming, sync, write_bytes
from banach.train.metrics import Epoch

TENSORS, STATE = "tensors.safetensors", "state.json"
_PREFIX, _HALF = "epoch-", ".half-"
# The keys of a complete state.
_STATE: dict[str, type[Any]] = dict.fromkeys(("epoch", "step", "products", "rewinds", "tensors"), int)
_STATE |= {"seconds": float, "warned": bool, "done": list, "identity": dict}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message says which and why."""


@dataclass(frozen=True, order=True)
class Position:
    """The progress of training: `epoch` epochs are done, and `step` steps of the next one."""

    epoch: int
    step: int

    @property
    def name(self) -> str:
        return f"{_PREFIX}{self.epoch:05d}-step-{self.step:07d}"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The tensors and the plain values of a checkpoint."""

    path: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def position(self) -> Position:
        return Position(self.state["epoch"], self.state["step"])

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors of one part ("net", "average", "optimizer"), by their names in it."""
        start = f"{prefix}."
        return {name.removeprefix(start): v for name, v in self.tensors.items() if name.startswith(start)}


def write_checkpoint(
    folder: Path,
    position: Position,
    tensors: Mapping[str, Tensor],
    *,
    state: Mapping[str, Any],
    keep: int = 2,
    best: Position | None = None,
) -> Path:
    """Write a checkpoint under a temporary name, then rename it, so that it is complete or absent.

    The last `keep` up to this position and that of `best` are kept; later ones were refused when training resumed.
    """
    from safetensors.torch import save

    target = folder / position.name
    with suppress(CheckpointError):  # replacing a folder takes two steps, and a kill between would lose it
        return read_finite(target).path
    folder.mkdir(parents=True, exist_ok=True)
    half = Path(tempfile.mkdtemp(prefix=_HALF, dir=folder))
    try:
        with naming(target):
            # Copies: safetensors refuses tensors that share memory, as tied weights do.
            data = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
            write_bytes(half / TENSORS, data)
            write_bytes(half / STATE, json.dumps({**_checksums(state, data), "state": state}, indent=1).encode())
        sync(half)
        half.chmod(0o755)  # mkdtemp's folders are readable by their owner only
        if target.exists():
            shutil.rmtree(target)
        os.replace(half, target)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    sync(folder)
    found = checkpoints(folder)
    kept = [path for path in found if path <= target][-keep:]
    for path in found:
        if path not in kept and (best is None or path.name != best.name):
            shutil.rmtree(path, ignore_errors=True)
    remove_halves(folder)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())


def remove_halves(folder: Path) -> None:
    """Remove what killed processes left of checkpoints they were writing."""
    for path in folder.glob(f"{_HALF}*"):
        shutil.rmtree(path, ignore_errors=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint after comparing both checksums.

    Args:
        path: its folder, such as runs/digits-1/checkpoints/NAME.
    Raises:
        CheckpointError: if it is damaged, or does not hold the state of a run.
    """
    try:
        from safetensors.torch import load

        content, data = json.loads((path / STATE).read_bytes()), (path / TENSORS).read_bytes()
        for key, found in _checksums(content["state"], data).items():
            if found != content[key]:
                name = TENSORS if key == "tensors" else STATE
                raise ValueError(f"{name} has the SHA-256 {found}, expected {content[key]!r:.70}")
        return Checkpoint(path, load(data), _checked(content["state"]))
    except Exception as error:  # damage may raise anything, and safetensors has its own types
        said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the checkpoint {path} is damaged: {said}") from None


def read_finite(path: Path) -> Checkpoint:
    """Read a checkpoint of a run; refuse one of another position than its name says, or with NaN or infinity."""
    checkpoint = read_checkpoint(path)
    if checkpoint.position.name != path.name:
        raise CheckpointError(f"the checkpoint {path} is damaged: it is of {checkpoint.position.name}")
    if name := nonfinite(checkpoint.tensors):
        raise CheckpointError(f"the checkpoint {path} holds NaN or infinity in {name}: its training had diverged")
    return checkpoint


def nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a weight, buffer or optimizer state that is NaN or infinite, None if all are finite."""
    watched = (name for name in tensors if not name.startswith("tally."))
    return next((name for name in watched if not bool(tensors[name].isfinite().all())), None)


def _checked(state: Any) -> dict[str, Any]:
    """Return the state of a checkpoint with all keys, each of its type."""
    if wrong := sorted({*state} ^ {*_STATE}):
        raise ValueError(f"{STATE} must have the keys {', '.join(_STATE)}; missing or unknown: {wrong!r:.60}")
    for key, kind in _STATE.items():
        value, counts = state[key], kind in (int, float)
        if type(value) is not kind or (counts and not 0 <= value < math.inf):
            raise ValueError(f"{key} must be a {kind.__name__}, at least 0 if a number, got {value!r:.60}")
    numbers = [Epoch.from_dict(values).epoch for values in state["done"]]
    if len(numbers) != state["epoch"] or numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"done must hold the epochs 1 to {state['epoch']!r:.60}, got {numbers!r:.60}")
    return state


def _checksums(state: Any, data: bytes) -> dict[str, str]:
    """Return the SHA-256 of both files of a checkpoint."""
    return {"tensors": hashlib.sha256(data).hexdigest(), "sha256": digest(state)}
