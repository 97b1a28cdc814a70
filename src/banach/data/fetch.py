"""fetch(): download a data set from its publisher, checked, and never half-written."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from banach.data.check import md5
from banach.data.dataset import DataSet, Download, Layout, get
from banach.data.error import DataError, need
from banach.data.find import Folder, home
from banach.data.verify import Report, verify_in


class _Unreachable(DataError):
    """The address did not answer, or answered with another file: another layout may do."""


def fetch(name: str, data_dir: Folder | None = None, *, progress: Any = False) -> tuple[Report, ...]:
    """Download into `data_dir`, BANACH_DATA or the cache what is not there already, and verify it.

    Files appear under their names only when they are whole and have their published MD5. Where a data set comes in
    several layouts, the next is tried when one cannot be had. `progress` goes to pooch: a tqdm-like object.
    """
    dataset, root = get(name), home(data_dir)
    reports = verify_in(dataset, (root,))
    if all(report.ok for report in reports):
        return reports
    _download_any(dataset, root, progress)
    reports = verify_in(dataset, (root,))
    for report in reports:
        if not report.ok:
            raise DataError(report.message)
    return reports


def _download_any(dataset: DataSet, root: Path, progress: Any) -> None:
    failure: DataError | None = None
    for layout in dataset.layouts:
        try:
            if layout.downloads:
                return _download(dataset, layout, root, progress)
        except _Unreachable as error:
            failure = failure or error
    raise failure or DataError(f"{dataset.name} has no address to download from; {dataset.remedy}")


def _download(dataset: DataSet, layout: Layout, root: Path, progress: Any) -> None:
    """Everything into a folder beside, then each file to its place in one step."""
    folder = root / layout.folders[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as beside:
            for download in layout.downloads:
                if not _is_there(folder, download):
                    _retrieve(download, Path(beside), progress)
            for path in _unpacked(layout, Path(beside)):
                path.chmod(0o644)  # as any file is: temporary ones are for their owner alone
                os.replace(path, folder / path.name)
    except tarfile.TarError as error:
        raise DataError(f"{layout.downloads[0].url} is no archive that can be opened ({error})") from error
    except OSError as error:
        raise DataError(
            f"{dataset.name} cannot be written to {root} ({error}); free or choose another folder"
        ) from error


def _is_there(folder: Path, download: Download) -> bool:
    path = folder / download.file
    return path.is_file() and md5(path) == download.md5


def _retrieve(download: Download, folder: Path, progress: Any) -> None:
    pooch = need("pooch", "a download")
    refused = need("requests", "a download").exceptions.RequestException
    try:
        pooch.retrieve(download.url, f"md5:{download.md5}", fname=download.file, path=folder, progressbar=progress)
    except refused as error:
        if error.response is not None:
            error.response.close()  # pooch leaves a refused answer open
        raise _Unreachable(f"{download.url} cannot be reached ({_short(error)}); check the connection") from error
    except ValueError as error:  # pooch's word for another MD5
        raise _Unreachable(
            f"{download.url} does not have its published MD5 {download.md5}; try again, or get it elsewhere"
        ) from error


def _unpacked(layout: Layout, folder: Path) -> list[Path]:
    """The files that were downloaded; of an archive only those that the layout names, and only plain files."""
    paths = []
    for download in layout.downloads:
        path = folder / download.file
        if path.exists():
            paths += _members(layout, path) if download.archive else [path]
    return paths


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


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
