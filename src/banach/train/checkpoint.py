"""A checkpoint on disk: tensors as safetensors, one file or one per rank, the rest as JSON, and checksums."""

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

import torch
import torch.distributed as dist
from torch import Tensor

from banach.provenance import digest, naming, sync, whole_file
from banach.train.metrics import Epoch

TENSORS, STATE = "tensors.safetensors", "state.json"
HALF = ".half-"  # begins the name of a checkpoint that is being written
_PREFIX, _ENDING = "epoch-", ".safetensors"
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
        return {name[len(prefix) + 1 :]: v for name, v in self.tensors.items() if name.startswith(f"{prefix}.")}


def write_checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int, best: Position | None
) -> Path:
    """Write a checkpoint under a temporary name, then rename it, so that it is complete or absent.

    The last `keep` up to its position and that of `best` are kept; later ones were refused when training resumed.
    """
    target, sharded = folder / Position(state["epoch"], state["step"]).name, is_sharded(*tensors.values())
    with suppress(CheckpointError):  # replacing a folder takes two steps, and a kill between would lose it
        if not sharded:
            return read_finite(target).path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=HALF, dir=folder, ignore_cleanup_errors=True) as name:
        half = Path(name) / target.name  # the temporary folder is for its owner only, whatever the umask
        half.mkdir()
        with naming(target):
            written = write_shards(tensors, half) if sharded else _write_tensors(half / TENSORS, tensors)
            content = {"tensors": written, "sha256": digest(state), "state": state}
            with whole_file(half / STATE) as file:
                file.write(json.dumps(content, indent=1))
        if target.exists():
            shutil.rmtree(target)
        os.replace(half, target)
    sync(folder)
    found = checkpoints(folder)
    kept = [path for path in found if path <= target][-keep:]
    for path in found:
        if path not in kept and (best is None or path.name != best.name):
            shutil.rmtree(path, ignore_errors=True)
    return target


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
        _compare(STATE, digest(state), content["sha256"])
        files = written if isinstance(written, dict) else {TENSORS: written}
        return Checkpoint(path, _read_tensors(path, files), _checked(state))
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
    watched = ((name, local(tensor)) for name, tensor in tensors.items() if not name.startswith("tally."))
    return next((name for name, tensor in watched if not bool(tensor.isfinite().all())), None)


def _checked(state: Any) -> dict[str, Any]:
    """Return the state of a checkpoint with all keys, each of its type."""
    if wrong := sorted({*state} ^ {*_STATE}):
        raise ValueError(f"{STATE} must have the keys {', '.join(_STATE)}; missing or unknown: {wrong!r:.60}")
    for key, kind in _STATE.items():
        value, counts = state[key], kind in (int, float)
        if type(value) is not kind or (counts and not 0 <= value < 2**63):
            limits = " from 0 to 2^63" if counts else ""
            raise ValueError(f"{key} must be a {kind.__name__}{limits}, got {value!r:.60}")
    numbers = [Epoch.from_dict(values).epoch for values in state["done"]]
    if len(numbers) != state["epoch"] or numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"done must hold the epochs 1 to {state['epoch']!r:.60}, got {numbers!r:.60}")
    return state


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file and return its checksum."""
    from safetensors.torch import save

    # Copies: safetensors refuses tensors that share memory, as tied weights do.
    data = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    with whole_file(path, binary=True) as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()


def _read_tensors(folder: Path, files: Mapping[str, str]) -> dict[str, Tensor]:
    """Return all tensors, whole, on the CPU: the shards of one are its rows, in the order of the files."""
    from safetensors.torch import load

    parts: dict[str, list[Tensor]] = {}
    for file, checksum in sorted(files.items()):
        if Path(file).name != file or not file.endswith(_ENDING):
            raise ValueError(f"tensors must be in {_ENDING} files of the folder, got {file!r:.60}")
        data = (folder / file).read_bytes()
        _compare(file, hashlib.sha256(data).hexdigest(), checksum)
        for name, part in load(data).items():
            parts.setdefault(name, []).append(part)
    return {name: torch.cat(found) if len(found) > 1 else found[0] for name, found in parts.items()}


def local(value: Any) -> Tensor:
    """Return this rank's part of a sharded tensor, the values of a sparse one, or `value`; in the same memory."""
    found: Any = value.detach()
    found = found.to_local() if is_sharded(found) else found
    strided = found.layout is torch.strided
    return found if strided else found._values() if found.is_sparse else found.values()


def is_sharded(*values: Any) -> bool:
    """Return True if a value is a DTensor, sharded over ranks."""
    return any(hasattr(value, "full_tensor") for value in values)


def write_shards(tensors: Mapping[str, Any], folder: Path | None = None) -> dict[str, str]:
    """Write the rows of each rank; all call this together. The first one gives the folder; returns checksums."""
    from torch.distributed.tensor import Shard

    given, rank, checksums = [folder], dist.get_rank(), [("", "")] * dist.get_world_size()
    dist.broadcast_object_list(given)
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            own[name] = tensor.redistribute(placements=[Shard(0)] * tensor.device_mesh.ndim).to_local()
        elif rank == 0:  # the others have the same
            own[name] = tensor
    path = Path(str(given[0])) / f"rank-{rank:05d}{_ENDING}"
    dist.all_gather_object(checksums, (path.name, _write_tensors(path, own)))
    return dict(checksums)


def _compare(name: str, got: str, expected: str) -> None:
    if got != expected:
        raise ValueError(f"{name} has the SHA-256 {got}, expected {expected}")
