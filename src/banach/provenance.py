"""Where a number comes from: the machine, versions, commit and settings; and JSON files."""

import datetime
import functools
import hashlib
import json
import math
import os
import platform
import re
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PACKAGE = Path(__file__).resolve().parent
CHECKSUM = "sha256"


def provenance(settings: Any = None, *, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return what a reader needs to repeat a run on `device`: plain values, ready for JSON."""
    from banach import __version__

    commit, dirty = source_commit()
    kind = torch.device(device).type
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{kind}: {torch.cuda.get_device_name(device) if kind == 'cuda' else cpu_name()}",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "versions": {
            "banach": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "numpy": np.__version__,
        },
        "commit": commit,
        "dirty": dirty,
        "settings": plain({} if settings is None else settings),
    }


@functools.cache
def cpu_name() -> str:
    """Return the name of the processor."""
    listed = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: *(.+)$", listed.read_text() if listed.exists() else "", re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


@functools.cache
def source_commit(package: Path = _PACKAGE) -> tuple[str | None, bool | None]:
    """Return the commit of the sources, and whether the tree has changes; (None, None) outside a checkout.

    Cached: what counts is the code that was imported, and results that a run writes make the tree dirty. If banach
    is installed inside another repository, that commit is not returned. For a copy without git set BANACH_COMMIT.
    """
    if given := os.environ.get("BANACH_COMMIT"):
        return given, None
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() / "src" / "banach" != package:
        return None, None
    commit, changes = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain")
    return commit, None if changes is None else bool(changes)


def plain(value: Any) -> Any:
    """Return the value as JSON can hold it. NaN and infinity become strings that `float` reads."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(part) for part in value]
    return str(value)  # Path, dtype, device, and settings objects, whose repr is their definition


def from_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that `plain` wrote: strings become the floats they were."""
    return {key: float(value) if isinstance(value, str) else value for key, value in values.items()}


def write_json(path: str | os.PathLike[str], content: Any) -> Path:
    """Write `content` as JSON; an old file is replaced when the new one is complete."""
    with whole_file(path) as file:
        file.write(json.dumps(plain(content), indent=2, allow_nan=False) + "\n")
    return Path(path)


def signed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content as JSON can hold it, with its checksum as the last key."""
    kept: dict[str, Any] = plain(content)
    return {**kept, CHECKSUM: digest(kept)}


def unsigned(content: Any) -> dict[str, Any]:
    """Return what was given to `signed`, or raise a ValueError. Older files have no checksum."""
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, got {type(content).__name__}")
    rest = {key: value for key, value in content.items() if key != CHECKSUM}
    if CHECKSUM in content and content[CHECKSUM] != digest(rest):
        raise ValueError(f"its {CHECKSUM} does not match: the file was damaged or edited")
    return rest


def digest(content: Any) -> str:
    """Return the SHA-256 of plain values; the order of keys does not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def whole_file(path: str | os.PathLike[str], *, binary: bool = False) -> Iterator[Any]:
    """Open a file to write: afterwards `path` is either the old one or the complete new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        half = path.absolute().parent / f".{path.name}.{secrets.token_hex(4)}"
        try:
            with open(half, "xb" if binary else "x", encoding=None if binary else "utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(half, path)
            sync(path.parent)
        finally:
            half.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the wanted file in errors of the system, which name none for a full disk, or a temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or not (error.filename is None or "/." in str(error.filename)):
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from None


def sync(folder: Path) -> None:
    """Write the names in a folder to the disk, where the system lets a folder be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        with naming(folder):
            os.fsync(handle)
    finally:
        os.close(handle)


def _git(folder: Path, *arguments: str) -> str | None:
    # Inside a git hook GIT_DIR points to another tree than the folder's.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
