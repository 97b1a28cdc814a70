"""fetch(): download a data set from its publisher, checked, and never half-written."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from banach.data.dataset import DataError, DataSet, Download, Layout, get, need
from banach.data.files import Folder, Report, cache_dir, verify_in


def fetch(name: str, data_dir: Folder | None = None) -> tuple[Report, ...]:
    """Download the files of a data set that are missing or damaged, and verify them.

    Files appear under their names only when they are complete and have their published digest.

    Args:
        name: the data set.
        data_dir: where the files go; else BANACH_DATA, else the cache. It is created.
    Returns:
        The reports of `verify`.
    Raises:
        DataError: if the data cannot be downloaded, written or verified.
    """
    dataset = get(name)
    root = Path(data_dir or os.environ.get("BANACH_DATA") or cache_dir()).expanduser()
    reports = verify_in(dataset, (root,))
    if not all(report.ok for report in reports):
        _download(dataset, root)
        reports = verify_in(dataset, (root,))
    for report in reports:
        if not report.ok:
            raise DataError(report.message)
    return reports


def _download(dataset: DataSet, root: Path) -> None:
    """Download everything into a temporary folder, then move each file to its place in one step."""
    layout = next((one for one in dataset.layouts if one.downloads), None)
    if layout is None:
        raise DataError(f"{dataset.name} has no address to download from; {dataset.remedy}")
    folder = root / layout.folders[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as temporary:
            for download in layout.downloads:
                if not download.matches(folder / download.file):
                    _retrieve(download, Path(temporary))
            for path in list(_unpacked(layout, Path(temporary))):  # all of them, before the first is moved
                path.chmod(0o644)  # temporary files are readable by their owner only
                os.replace(path, folder / path.name)
    except tarfile.TarError as error:
        raise DataError(f"{layout.downloads[0].url} is not an archive that can be opened ({error})") from error
    except OSError as error:
        raise DataError(
            f"{dataset.name} cannot be written to {root} ({error}); free space or choose another folder"
        ) from error


def _retrieve(download: Download, folder: Path) -> None:
    pooch = need("pooch", "a download")
    refused = need("requests", "a download").exceptions.RequestException
    try:
        pooch.retrieve(download.url, download.digest, fname=download.file, path=folder)
    except refused as error:
        if error.response is not None:
            error.response.close()  # pooch leaves it open
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise DataError(f"{download.url} cannot be reached ({why}); check the connection") from error
    except ValueError as error:  # pooch's error for another digest
        raise DataError(
            f"{download.url} does not have its published {download.digest}; try again, or get it elsewhere"
        ) from error


def _unpacked(layout: Layout, folder: Path) -> Iterator[Path]:
    """Yield the downloaded files; of an archive only plain files that the layout names."""
    for download in layout.downloads:
        path = folder / download.file
        if path.exists():
            yield from _members(layout, path) if download.archive else [path]


def _members(layout: Layout, archive: Path) -> list[Path]:
    paths = []
    with tarfile.open(archive) as tar:
        plain = {member.name for member in tar if member.isreg()}
        for name in (name for part in layout.files.values() for name in part):
            inside = f"{layout.folders[0]}/{name}"
            source = tar.extractfile(inside) if inside in plain else None
            if source is None:
                raise DataError(f"{archive.name} holds no plain file {inside}; get it elsewhere")
            paths.append(archive.parent / name)
            with source, open(paths[-1], "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    return paths
