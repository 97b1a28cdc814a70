"""A run as tar files that travel between machines, each at most 15 MiB unless one checkpoint is larger.

JOB.tar holds the newest checkpoint and all records: it is enough to go on. Snapshots are added if they fit, and
otherwise go to JOB.snapshots-1.tar, JOB.snapshots-2.tar and so on, which need not travel back.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

from banach.train import RunError
from reproduction.rundir import SNAPSHOTS

MOST = 15 * 2**20
CHECKPOINTS = "checkpoints"


def pack(folder: Path, target: Path) -> list[Path]:
    """Write the run in `folder` into tar files in the folder `target`; return them, JOB.tar first."""
    target.mkdir(parents=True, exist_ok=True)
    # Temporary files and the lock start with a dot.
    main = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    main += sorted((folder / CHECKPOINTS / newest(folder)).glob("*")) if newest(folder) else []
    snapshots = sorted((folder / SNAPSHOTS).glob("*.safetensors"))
    if _size([*main, *snapshots]) <= MOST:
        return [_write(target / f"{folder.name}.tar", folder, [*main, *snapshots])]
    groups: list[list[Path]] = []
    for path in snapshots:
        if not groups or _size([*groups[-1], path]) > MOST:
            groups.append([])
        groups[-1].append(path)
    parts = [
        _write(target / f"{folder.name}.snapshots-{n}.tar", folder, group) for n, group in enumerate(groups, 1)
    ]
    return [_write(target / f"{folder.name}.tar", folder, main), *parts]


def unpack(source: Path, runs: Path) -> None:
    """Extract a JOB.tar into `runs`; a damaged one, or one that is not a packed run, is a RunError."""
    try:
        with tarfile.open(source) as tar:
            names = {Path(name).parts[0] for name in tar.getnames()}
            if names != {source.stem}:
                raise RunError(f"{source} must hold the run {source.stem}, got {sorted(names)}")
            runs.mkdir(parents=True, exist_ok=True)
            tar.extractall(runs, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise RunError(f"{source} cannot be unpacked: {error}; copy it again") from None


def newest(source: Path) -> str:
    """Return the newest checkpoint of a run directory or packed run, "" if there is none; names sort by epoch."""
    if not source.exists() or source.is_dir():
        return max((path.name for path in (source / CHECKPOINTS).glob("epoch-*") if path.is_dir()), default="")
    try:
        with tarfile.open(source) as tar:
            parts = [Path(name).parts for name in tar.getnames()]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise RunError(f"{source} cannot be read: {error}; copy it again") from None
    return max((part[2] for part in parts if len(part) > 2 and part[1] == CHECKPOINTS), default="")


def _size(files: Iterable[Path]) -> int:
    """Return the bytes in a tar: a header and padding per file."""
    return sum(path.stat().st_size + 2048 for path in files)


def _write(path: Path, folder: Path, files: Iterable[Path]) -> Path:
    """Write under a temporary name, then rename: a kill never leaves half a tar under the final name."""
    half = path.with_name(f"{path.name}.part")
    with tarfile.open(half, "w") as tar:
        for file in files:
            tar.add(file, arcname=str(Path(folder.name) / file.relative_to(folder)))
    os.replace(half, path)
    return path
