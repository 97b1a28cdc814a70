"""Sharded tensors on disk, by torch.distributed.checkpoint: every rank writes its part, one process reads all."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_METADATA = ".metadata"
_IN = "torch.distributed.checkpoint."
_RECORDS = "Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata ChunkStorageMetadata"
_NAMES = {
    *("pathlib.PosixPath", "pathlib.WindowsPath", "torch.Size", "torch.serialization._get_layout"),
    *(_IN + "filesystem._StorageInfo", _IN + "metadata._MEM_FORMAT_ENCODING"),
    *(f"{_IN}metadata.{name}" for name in _RECORDS.split()),
}


def is_sharded(value: Any) -> bool:
    """Return True for a DTensor."""
    return hasattr(value, "full_tensor")


def local(value: Any) -> Tensor:
    """Return this rank's part of a sharded tensor, in the same memory; others as they are, without gradient."""
    found: Tensor = value.detach()
    return found.to_local() if is_sharded(found) else found  # type: ignore[attr-defined]


def are_sharded(tensors: Mapping[str, Tensor]) -> bool:
    """Return True if some tensors are sharded over ranks."""
    return any(map(is_sharded, tensors.values()))


def write_shards(tensors: Mapping[str, Tensor], folder: Path | None = None) -> dict[str, str]:
    """Write tensors, each rank its part; all ranks call this together.

    Args:
        tensors: sharded tensors, and others that are the same on all ranks.
        folder: where to write, given by the first rank.
    Returns:
        The SHA-256 of every file by its name, on the first rank.
    """
    from torch.distributed.checkpoint import FileSystemWriter, save

    given = [folder]
    dist.broadcast_object_list(given)
    place = Path(str(given[0]))
    save(dict(tensors), storage_writer=FileSystemWriter(place))
    return {path.name: _digest(path) for path in sorted(place.iterdir())} if folder else {}


def read_shards(folder: Path, files: Mapping[str, str]) -> dict[str, Tensor]:
    """Return all tensors, whole, on the CPU. No other rank takes part.

    Args:
        folder: where the files are.
        files: what `write_shards` returned.
    Raises:
        ValueError: if a file is missing or damaged, or the metadata hold something else than tensors.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    for name, expected in files.items():
        if Path(name).name != name or (got := _digest(folder / name)) != expected:
            raise ValueError(f"{name} has the SHA-256 {got}, expected {expected}")
    with (folder / _METADATA).open("rb") as file:
        metadata = _Unpickler(file).load()
    entries = metadata.state_dict_metadata
    read_from = {info.relative_path for info in metadata.storage_data.values()}
    if not all(type(entry) is TensorStorageMetadata for entry in entries.values()) or not read_from <= {*files}:
        raise ValueError(f"{_METADATA} must describe tensors in {', '.join(sorted(files))}, got something else")
    size = sum(math.prod(entry.size) * entry.properties.dtype.itemsize for entry in entries.values())
    if size > (held := sum((folder / name).stat().st_size for name in files)):
        raise ValueError(f"{_METADATA} describes {size:,} bytes of tensors, but the files have {held:,}")
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    # `load` would wait for other ranks in the versions of PyTorch without no_dist.
    try:
        _load_state_dict(tensors, _reader(folder, metadata), no_dist=True)
    except CheckpointException as error:  # a BaseException
        raise ValueError(f"its shards cannot be read: {list(error.failures.values())}") from None
    return tensors


def _reader(folder: Path, metadata: Any) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        """Reads tensors only: the metadata, which PyTorch would unpickle, are given."""

        def read_metadata(self, *args: Any, **options: Any) -> Any:
            return metadata

    return Reader(folder)


class _Unpickler(pickle.Unpickler):
    """Builds the records of a checkpoint's metadata and nothing else, so that a forged file runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if f"{module}.{name}" not in _NAMES and not is_type:
            raise ValueError(f"{_METADATA} names {module}.{name}, which tensors do not need")
        return super().find_class(module, name)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
