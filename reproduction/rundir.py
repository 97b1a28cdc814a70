"""Files of a run besides those of `fit`: JSON lines of evaluations and segments, and weight snapshots.

metrics.jsonl       one line per epoch, by `fit`: loss, accuracy, depth, residual, seconds
test.jsonl          one line per evaluated epoch: the test set by the clean and the released protocol
contraction.jsonl   one line per measured epoch: sigma_max(dT/du) and the observed rate, per image
segments.jsonl      one line per process: machine, versions, sources, epochs, seconds
final.json          the test set after the last epoch, in fp32
snapshots/          weights after some epochs, in fp32
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import banach
from banach.provenance import device_name, plain, source_commit, whole_file
from banach.train import RunError
from reproduction.codec import read_lines, write_lines

TEST, CONTRACTION, SEGMENTS, FINAL = "test.jsonl", "contraction.jsonl", "segments.jsonl", "final.json"
SNAPSHOTS = "snapshots"


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add one line and flush it to the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain(line), allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def forget_after(folder: Path, epoch: int) -> None:
    """Drop what was recorded after `epoch`, from which the run goes on: those epochs are trained again."""
    for name in (TEST, CONTRACTION):
        write_lines(folder / name, [line for line in read_lines(folder / name) if line["epoch"] <= epoch])
    segments = read_lines(folder / SEGMENTS)
    write_lines(folder / SEGMENTS, [{**s, "last_epoch": min(s["last_epoch"], epoch)} for s in segments])


class Segment:
    """One process's part of a run: a line of segments.jsonl, updated while it runs."""

    def __init__(self, folder: Path, epoch: int, device: torch.device, *, changed_sources: bool = False) -> None:
        self.path = folder / SEGMENTS
        self.earlier = read_lines(self.path)
        self.line: dict[str, Any] = {
            "first_epoch": epoch + 1,
            "last_epoch": epoch,
            "stopped": None,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": device_name(device),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "commit": source_commit()[0],
            "sources": source_hash(),
        }
        before = self.earlier[-1] if self.earlier else self.line
        if before["sources"] != self.line["sources"] and not changed_sources:
            raise RunError(
                f"the run was trained by sources {before['sources'][:12]} (commit {before['commit']}), got "
                f"{self.line['sources'][:12]}; use those sources, or pass --changed-sources"
            )
        self.update()

    def update(self, **values: Any) -> None:
        """Set values and write the file."""
        self.line |= values
        write_lines(self.path, [*self.earlier, self.line])


def source_hash() -> str:
    """Return the SHA-256 over names and contents of all Python files of banach and of this package."""
    digest = hashlib.sha256()
    for package in (Path(banach.__file__).parent, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            name = path.relative_to(package.parent).as_posix()
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def snapshot(folder: Path, epoch: int) -> Path:
    """Return the file of the weights after an epoch, which `safetensors.torch.load_file` reads."""
    return folder / SNAPSHOTS / f"epoch-{epoch:05d}.safetensors"


def write_snapshot(folder: Path, net: nn.Module, job: str, epoch: int) -> None:
    """Store the weights and buffers after an epoch."""
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in net.state_dict().items()}
    with whole_file(snapshot(folder, epoch), binary=True) as file:
        file.write(save(tensors, {"run": f"{job} after epoch {epoch}"}))  # two keys come in random order
