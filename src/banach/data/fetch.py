"""fetch(): download a data set from its publisher, checked, and never half-written."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from banach.data.dataset import DataError, DataSet, get, need
from banach.data.files import PARTS, Folder, cache_dir, matches, verify


def fetch(name: str, data_dir: Folder | None = None) -> list[str]:
    """Download the files of a data set that are missing or damaged, and verify them.

    Files appear under their names only when they are complete and have their published digest.

    Args:
        name: the data set.
        data_dir: where the files go; else BANACH_DATA, else the cache. It is created.
    Returns:
        A sentence about each part.
    Raises:
        DataError: if the data cannot be downloaded, written or verified.
    """
    dataset = get(name)
    root = Path(data_dir or os.environ.get("BANACH_DATA") or cache_dir()).expanduser()
    try:
        return [verify(dataset, part, (root,)) for part in PARTS]
    except DataError:
        _download(dataset, root)
    return [verify(dataset, part, (root,)) for part in PARTS]


def _download(dataset: DataSet, root: Path) -> None:
    """Download each file to a temporary folder, and move it to its place in one step."""
    if not dataset.downloads:
        raise DataError(f"{dataset.name} has no address to download from; {dataset.remedy}")
    folder = root / dataset.folders[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as temporary:
            for url, digest in dataset.downloads.items():
                path = Path(temporary) / url.rsplit("/", 1)[-1]
                if matches(folder / path.name, digest):
                    continue
                _retrieve(url, digest, path)
                for file in _members(dataset, path) if path.name.endswith(".tar.gz") else [path]:
                    file.chmod(0o644)  # temporary files are readable by their owner only
                    os.replace(file, folder / file.name)
    except OSError as error:
        raise DataError(
            f"{dataset.name} cannot be written to {root} ({error}); free space or choose another folder"
        ) from error


def _retrieve(url: str, digest: str, path: Path) -> None:
    pooch = need("pooch", "a download")
    refused = need("requests", "a download").exceptions.RequestException
    try:
        pooch.retrieve(url, digest, fname=path.name, path=path.parent)
    except refused as error:
        if error.response is not None:
            error.response.close()  # pooch leaves it open
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise DataError(f"{url} cannot be reached ({why}); check the connection") from error
    except ValueError as error:  # pooch's error for another digest
        raise DataError(f"{url} does not have its published {digest}; try again, or get it elsewhere") from error


def _members(dataset: DataSet, archive: Path) -> list[Path]:
    """Extract the files that the data set names, if they are plain files; return them when all are there."""
    paths = []
    try:
        with tarfile.open(archive) as tar:
            plain = {member.name for member in tar if member.isreg()}
            for name in (name + dataset.endings[0] for part in dataset.files.values() for name in part):
                inside = f"{dataset.folders[0]}/{name}"
                source = tar.extractfile(inside) if inside in plain else None
                if source is None:
                    raise DataError(f"{archive.name} holds no plain file {inside}; get it elsewhere")
                paths.append(archive.parent / name)
                with source, open(paths[-1], "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
    except tarfile.TarError as error:
        raise DataError(f"{archive.name} is not an archive that can be opened ({error})") from error
    return paths
