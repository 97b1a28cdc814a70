"""A checkpoint on disk: tensors as safetensors, the rest as JSON, checksums of both; nothing that can run code."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from banach import checks
from banach.provenance import naming, sync, write_bytes
from banach.train.metrics import Epoch
from banach.train.shards import are_sharded, local, read_shards, write_shards

TENSORS, STATE = "tensors.safetensors", "state.json"
_PREFIX, _HALF = "epoch-", ".half-"
KEYS = ("epoch", "step", "products", "seconds", "warned", "done", "identity")  # of a complete state
_LATER = {"rewinds": 0, "tensors": None}  # keys that older checkpoints do not have, and what they mean without


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

    The last `keep` up to this position are kept, and that of `best`. Later ones were refused, or training would
    have resumed from them.
    """
    target, sharded = folder / position.name, are_sharded(tensors)
    with suppress(CheckpointError):  # replacing a folder takes two steps, and a kill between would lose it
        if not sharded:
            return read_finite(target).path
    folder.mkdir(parents=True, exist_ok=True)
    half = Path(tempfile.mkdtemp(prefix=_HALF, dir=folder))
    try:
        with naming(target):
            written = write_shards(tensors, half) if sharded else _write_tensors(half / TENSORS, tensors)
            content = {"tensors": written, "sha256": _digest(_canonical(state)), "state": state}
            write_bytes(half / STATE, json.dumps(content, indent=1).encode())
        sync(half)
        half.chmod(0o755)  # mkdtemp's folders are readable by their owner only
        if target.exists():
            shutil.rmtree(target)
        os.replace(half, target)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    sync(folder)
    _prune(folder, target, keep, best)
    return target


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file and return its checksum."""
    from safetensors.torch import save

    # Copies: safetensors refuses tensors that share memory, as tied weights do.
    data = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    write_bytes(path, data)
    return _digest(data)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint after comparing both checksums.

    Args:
        path: its folder, such as runs/digits-1/checkpoints/NAME.
    Raises:
        CheckpointError: if it is damaged, or does not hold the state of a run.
    """
    try:
        content = json.loads((path / STATE).read_bytes())
        state, written = content["state"], content["tensors"]
        _compare(STATE, _digest(_canonical(state)), content["sha256"])
        read = read_shards if isinstance(written, dict) else _read_tensors
        return Checkpoint(path, read(path, written), check_state(state))
    except Exception as error:  # damage may raise anything, and safetensors has its own types
        said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the checkpoint {path} is damaged: {said}") from None


def _read_tensors(folder: Path, checksum: str) -> dict[str, Tensor]:
    from safetensors.torch import load

    data = (folder / TENSORS).read_bytes()
    _compare(TENSORS, _digest(data), checksum)
    return load(data)


def read_finite(path: Path) -> Checkpoint:
    """Read a checkpoint of a run and refuse one whose training had diverged.

    Raises:
        CheckpointError: if it is damaged, of another position than its name says, or holds NaN or infinity.
    """
    checkpoint = read_checkpoint(path)
    if checkpoint.position.name != path.name:
        raise CheckpointError(f"the checkpoint {path} is damaged: it is of {checkpoint.position.name}")
    if name := nonfinite(checkpoint.tensors):
        raise CheckpointError(f"the checkpoint {path} holds NaN or infinity in {name}: its training had diverged")
    return checkpoint


def check_state(state: Any) -> dict[str, Any]:
    """Return the state of a checkpoint with the keys of `KEYS` and `_LATER`.

    Raises:
        ValueError: if a key is missing or a value has the wrong type.
    """
    if not isinstance(state, dict):
        raise ValueError(f"the state must be a table, got {short(state)}")
    if missing := [key for key in KEYS if key not in state]:
        raise ValueError(f"state.json has no {', '.join(missing)}")
    state = {**_LATER, **state}
    if unknown := sorted({*state} - {*KEYS, *_LATER}):
        raise ValueError(f"state.json has an unknown key {short(unknown[0])}")
    for key in ("epoch", "step", "products", "rewinds"):
        checks.whole(key, state[key])
    checks.number("seconds", state["seconds"])
    if not isinstance(state["warned"], bool):
        raise ValueError(f"warned must be true or false, got {short(state['warned'])}")
    if state["tensors"] is not None:
        checks.whole("tensors", state["tensors"])
    named = state["identity"]
    if not isinstance(named, dict) or not all(isinstance(value, str) for value in named.values()):
        raise ValueError(f"identity must be a table of strings, got {short(named)}")
    _check_epochs(state["done"], state["epoch"])
    return state


def _check_epochs(done: Any, count: int) -> None:
    if not isinstance(done, list) or not all(isinstance(values, dict) for values in done):
        raise ValueError(f"done must be a list of tables, got {short(done)}")
    numbers = [Epoch.from_dict(values).epoch for values in done]
    if len(done) != count or numbers != list(range(1, count + 1)):
        raise ValueError(f"done must hold the epochs 1 to {short(count)}, got {short(numbers)}")


def nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a weight, buffer or optimizer state that is NaN or infinite, None if all are finite."""
    for name, tensor in ((name, local(tensor)) for name, tensor in tensors.items()):
        if not name.startswith("tally.") and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return name
    return None


def short(value: Any) -> str:
    """Return the repr of a value, at most 60 characters of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _compare(name: str, got: str, expected: str) -> None:
    if got != expected:
        raise ValueError(f"{name} has the SHA-256 {got}, expected {expected}")


def _canonical(state: Any) -> bytes:
    return json.dumps(state, sort_keys=True, allow_nan=False).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _prune(folder: Path, newest: Path, keep: int, best: Position | None) -> None:
    found = checkpoints(folder)
    kept = [path for path in found if path <= newest][-keep:]
    for path in found:
        if path not in kept and (best is None or path.name != best.name):
            shutil.rmtree(path, ignore_errors=True)
    remove_halves(folder)


def remove_halves(folder: Path) -> None:
    """Remove what killed processes left of checkpoints they were writing."""
    for path in folder.glob(f"{_HALF}*"):
        shutil.rmtree(path, ignore_errors=True)
