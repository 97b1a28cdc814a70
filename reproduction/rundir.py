"""Files of a run besides those of `fit`: JSON lines of evaluations and segments, weight snapshots, and tars.

metrics.jsonl       one line per epoch, by `fit`: loss, accuracy, depth, residual, seconds
test.jsonl          one line per evaluated epoch: the test set by the clean and the released protocol
contraction.jsonl   one line per measured epoch: sigma_max(dT/du) and the observed rate, per image
segments.jsonl      one line per process: machine, versions, sources, epochs, seconds
final.json          the test set after the last epoch, in fp32
snapshots/          weights after some epochs, in fp32

A run travels between machines as tar files, each at most 15 MiB unless one checkpoint is larger. JOB.tar holds the
newest checkpoint and all records: it is enough to go on. Snapshots that do not fit are in JOB.snapshots-1.tar,
JOB.snapshots-2.tar and so on, which need not travel back.
"""

import hashlib
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

import banach
from banach.provenance import provenance, whole_file
from banach.train import RunError
from reproduction.study import read_lines, write_lines

TEST, CONTRACTION, SEGMENTS, FINAL = "test.jsonl", "contraction.jsonl", "segments.jsonl", "final.json"
SNAPSHOTS, CHECKPOINTS = "snapshots", "checkpoints"
MOST = 15 * 2**20  # bytes of a tar


def resume(folder: Path, epoch: int, device: torch.device) -> list[dict[str, Any]]:
    """Drop what was recorded after `epoch`, from which the run goes on: those epochs are trained again.

    Returns:
        The lines for segments.jsonl, with a new one for this process.
    """
    made, lines = provenance(device=device), read_lines(folder / SEGMENTS)
    line: dict[str, Any] = {"first_epoch": epoch + 1, "last_epoch": epoch, "stopped": None}
    line |= {"started": made["date"], **made["versions"], "sources": source_hash()}
    line |= {key: made[key] for key in ("device", "platform", "commit")}
    before = lines[-1] if lines else line
    if before["sources"] != line["sources"]:
        raise RunError(
            f"the run was trained by sources {before['sources'][:12]} (commit {before['commit']}), got "
            f"{line['sources'][:12]}; use those sources, or start a new run in another folder (--runs)"
        )
    for name in (TEST, CONTRACTION):
        write_lines(folder / name, [one for one in read_lines(folder / name) if one["epoch"] <= epoch])
    return [*({**one, "last_epoch": min(one["last_epoch"], epoch)} for one in lines), line]


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
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in net.state_dict().items()}
    with whole_file(snapshot(folder, epoch), binary=True) as file:
        file.write(save(tensors, {"run": f"{job} after epoch {epoch}"}))  # two keys come in random order


def pack(folder: Path, target: Path) -> list[Path]:
    """Write the run in `folder` into tar files in the folder `target`; return them, JOB.tar first."""
    # Temporary files and the lock start with a dot.
    main = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    main += sorted((folder / CHECKPOINTS / newest(folder)).glob("*")) if newest(folder) else []
    tars = {target / f"{folder.name}.tar": main}
    for path in sorted((folder / SNAPSHOTS).glob("*.safetensors")):
        *_, last = tars.values()
        if sum(file.stat().st_size + 2048 for file in (*last, path)) > MOST:  # with headers and padding
            last = tars.setdefault(target / f"{folder.name}.snapshots-{len(tars)}.tar", [])
        last.append(path)
    for tar, files in tars.items():
        with whole_file(tar, binary=True) as whole, tarfile.open(fileobj=whole, mode="w") as packed:
            for file in files:
                packed.add(file, arcname=str(file.relative_to(folder.parent)))
    return list(tars)


def unpack(source: Path, runs: Path) -> None:
    """Take the run in a JOB.tar into `runs` if its newest checkpoint is ahead of the one there, or there is none.

    Raises:
        RunError: if the tar is damaged, or does not hold the run of its name.
    """
    runs.mkdir(parents=True, exist_ok=True)
    folder = runs / source.stem
    with tempfile.TemporaryDirectory(dir=runs, prefix=".") as half:
        try:
            with tarfile.open(source) as tar:
                tar.extractall(half, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise RunError(f"{source} cannot be unpacked: {error}; copy it again") from None
        if (held := sorted(os.listdir(half))) != [source.stem]:
            raise RunError(f"{source} must hold the run {source.stem}, got {held}")
        found = Path(half, source.stem)
        if newest(found) <= newest(folder):
            return
        checkpoint, final = found / CHECKPOINTS / newest(found), found / FINAL
        files = (path for path in found.rglob("*") if path.is_file() and found / CHECKPOINTS not in path.parents)
        records = sorted(path for path in files if path != final)
        # The process may be killed after any move. Records ahead of the newest checkpoint are cut when the run
        # opens. Records behind it would stay so, since the tar is then no longer ahead: they come before the
        # checkpoint. A run with final.json counts as finished: that comes last.
        for path in (*records, checkpoint, *([final] if final.exists() else [])):
            target = folder / path.relative_to(found)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)  # a copied folder could be cut off half-way


def newest(folder: Path) -> str:
    """Return the newest checkpoint of a run directory, "" if there is none; names sort by epoch."""
    return max((path.name for path in (folder / CHECKPOINTS).glob("epoch-*") if path.is_dir()), default="")
