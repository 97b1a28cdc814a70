"""DataSet: which files a data set has; the registry that users extend; load(), verify() and fetch()."""

import hashlib
import importlib
import os
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from banach import checks
from banach.data.images import SPLITS, Images, parted

Folder = str | os.PathLike[str]
PARTS = ("train", "test")


class DataError(ValueError):
    """Data that cannot be used. The message is one sentence: what is wrong, and what to do."""


class NotFound(DataError):
    """No file of a part of a data set is there."""


class Damaged(DataError):
    """A file that is not what its publisher wrote. Readers raise it; `load` adds what to do."""

    def __init__(self, path: Path | str, what: str) -> None:
        super().__init__(f"{path} cannot be used: {printable(what)}")


def printable(text: object) -> str:
    """Return text that a hostile file may have chosen: 400 characters at most, none that control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(text)[:2000].split()))[:400]


class Arrays(NamedTuple):
    """What a reader returns: pixels uint8 (N, C, H, W), labels uint8 (N,) counted from 0."""

    pixels: np.ndarray
    labels: np.ndarray


Reader = Callable[[str, tuple[Path, ...]], Arrays]  # (part, its files) -> arrays; part is "train" or "test"


@dataclass(frozen=True)
class DataSet:
    """A data set. `validation` images of the train part, stratified and fixed, are its validation split.

    `read` gets the files of a part; data without files, such as data inside a package, needs nothing else. `files`
    names those of each part: they are looked for in the `folders` of a data folder, and may have one of `endings`.
    `downloads` are addresses with their published digest, "md5:..." or "sha256:..."; a .tar.gz holds all files.

    `known` is the SHA-256 of each part (bytes of the labels, then of the pixels). Other arrays are refused, except
    from files that have their published digest. `known_title` is the title of the known arrays, if it is another.
    """

    name: str
    title: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    counts: Mapping[str, int]
    validation: int
    read: Reader
    folders: tuple[str, ...] = ()
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    endings: tuple[str, ...] = ("",)
    downloads: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)
    known_title: str | None = None

    def __post_init__(self) -> None:
        if set(self.counts) != {*PARTS}:
            raise ValueError(f"counts must be given for 'train' and 'test', got {sorted(self.counts)}")
        checks.whole("validation", self.validation, 1, self.counts["train"] - 1)

    def images(self, pixels: Tensor, labels: Tensor, *, split: str, title: str | None = None) -> Images:
        """Return tensors as images of this data set."""
        return Images(pixels, labels, self.name, title or self.title, split, self.classes, self.mean, self.std)

    @property
    def remedy(self) -> str:
        """What to do about a damaged or missing file."""
        return f"run `banach data fetch {self.name}`" if self.downloads else f"provide a good copy of {self.name}"


_registry: dict[str, DataSet] = {}


def register(dataset: DataSet, *, replace: bool = False) -> DataSet:
    """Make a data set known by its name, and return it.

    Args:
        dataset: the data set.
        replace: allow a name that is registered already.

    Raises:
        DataError: if the name is taken and `replace` is False.
    """
    if dataset.name in _registry and not replace:
        raise DataError(f"data set {dataset.name!r} is registered; choose another name or pass replace=True")
    _registry[dataset.name] = dataset
    return dataset


def get(name: str) -> DataSet:
    """Return the data set of that name.

    Args:
        name: of a registered data set; "package.module:name", if that module has been imported; or your data:
            "folder:PATH", "folder:PATH@SIZE", "npz:PATH", "PATH.npz".
    Raises:
        DataError: if there is none; the message suggests the closest name.
    """
    from banach.data.own import own

    if found := own(name):
        return found
    try:
        return _registry[checks.nearest("data set", checks.own_name(name), _registry)]
    except ValueError as error:
        raise DataError(f"{error}, folder:PATH or FILE.npz") from None


def names() -> tuple[str, ...]:
    """Return the names of all data sets, in the order of registration."""
    return tuple(_registry)


def need(module: str, purpose: str) -> Any:
    """Import an optional module when it is first needed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        package = {"sklearn": "scikit-learn", "PIL": "pillow"}.get(top, top)
        raise DataError(f"{purpose} needs {package}, which is missing; run: pip install 'banach[app]'") from error


def load(
    name: str, split: str = "train", data_dir: Folder | None = None, device: torch.device | str = "cpu"
) -> Images:
    """Read a split of a data set.

    Shapes, counts and labels are checked, and arrays that have a known SHA-256 must have it.

    Args:
        name: the data set, see `names()`.
        split: "train", "validation", "test" or "train+validation".
        data_dir: where to look first; then BANACH_DATA and the cache.
        device: where the tensors go.
    Returns:
        The images, as uint8 tensors.
    Raises:
        DataError: if the files are missing or damaged.
    """
    dataset = get(name)
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r}; choose one of {', '.join(SPLITS)}")
    part = "test" if split == "test" else "train"
    (pixels, labels), title, digest = _read(dataset, part, find(dataset, part, roots(dataset, data_dir)))
    if split in ("train", "validation"):
        index = parted(labels, dataset.validation)[split == "validation"]
        pixels, labels = pixels[index], labels[index]
    tensors = torch.from_numpy(pixels).to(device), torch.from_numpy(labels.astype(np.int64)).to(device)
    return replace(dataset.images(*tensors, split=split, title=title), sha256=digest)


def verify(dataset: DataSet, part: str, places: tuple[Path, ...]) -> str:
    """Read a part of a data set and compare it with its known SHA-256; return a sentence about it."""
    arrays, title, digest = _read(dataset, part, find(dataset, part, places))
    verdict = "as expected" if dataset.known else "with no known value to compare it to"
    return f"{title}, {part}: {len(arrays.labels):,} images, SHA-256 {digest}, {verdict}"


def cache_dir() -> Path:
    """Return BANACH_CACHE, or `banach` in XDG_CACHE_HOME or in ~/.cache."""
    own, shared = os.environ.get("BANACH_CACHE"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own or f"{shared}/banach").expanduser()


def roots(dataset: DataSet, data_dir: Folder | None = None) -> tuple[Path, ...]:
    """Return the folders to look in, first to last. `data_dir` and BANACH_DATA must exist; the cache need not."""
    if not dataset.files:
        return (Path(),)  # such data comes inside a package, so a wrong folder does not matter
    named = {"the data folder": data_dir, "BANACH_DATA": os.environ.get("BANACH_DATA")}
    given = {what: Path(folder).expanduser() for what, folder in named.items() if folder}
    for what, folder in given.items():
        if not folder.is_dir():
            raise DataError(f"{what} {folder} is not a folder; pass an existing one")
    return (*given.values(), cache_dir())


def find(dataset: DataSet, part: str, places: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the files of a part, in the first folder that has them all; refuse an incomplete or absent part."""
    incomplete = None
    for folder in (place / name for place in places for name in (*dataset.folders, ".")):
        wanted = {name: [folder / (name + end) for end in dataset.endings] for name in dataset.files.get(part, ())}
        # Reversed: of two files, that with the first of the endings is taken.
        found = {name: path for name, paths in wanted.items() for path in reversed(paths) if path.exists()}
        if len(found) == len(wanted):
            return tuple(found[name] for name in wanted)
        if found and incomplete is None:
            missing = next(paths[0] for name, paths in wanted.items() if name not in found)
            incomplete = DataError(f"{folder} has no {missing.name}; {dataset.remedy}")
    looked, advice = ", ".join(map(str, places)), "or pass its folder (--data-dir, BANACH_DATA)"
    what = f"{dataset.name} ({part} part) was not found in {looked}"
    raise incomplete or NotFound(f"{what}; {dataset.remedy}, {advice}")


def _read(dataset: DataSet, part: str, paths: tuple[Path, ...]) -> tuple[Arrays, str, str]:
    """Return the arrays of a part, their title and SHA-256; refuse wrong ones."""
    known = dataset.known.get(part)
    try:
        arrays = dataset.read(part, paths)
        sha256 = hashlib.sha256(np.ascontiguousarray(arrays.labels).data)
        sha256.update(np.ascontiguousarray(arrays.pixels).data)
        wrong, digest = _fault(dataset, part, arrays), sha256.hexdigest()
        if not wrong and known not in (None, digest) and not _published(dataset, paths):
            wrong = f"the {part} arrays have SHA-256 {digest}, expected {known}"
        if wrong:
            first, *others = paths or (dataset.name,)
            one_of = "one of " if others else ""
            raise Damaged(one_of + ", ".join([str(first), *(path.name for path in others)]), wrong)
    except Damaged as error:
        raise DataError(f"{error}; delete it and {dataset.remedy}") from error
    except OSError as error:
        where = error.filename or dataset.name
        raise DataError(f"{where} cannot be read ({error.strerror or error}); {dataset.remedy}") from error
    return arrays, (digest == known and dataset.known_title) or dataset.title, digest


def _published(dataset: DataSet, paths: tuple[Path, ...]) -> bool:
    """Return True if every file is one that is downloaded as it is, with its published digest."""
    digests = {url.rsplit("/", 1)[-1]: digest for url, digest in dataset.downloads.items()}
    return bool(paths) and all(path.name in digests and matches(path, digests[path.name]) for path in paths)


def matches(path: Path, digest: str) -> bool:
    """Return True if `path` is a file with this digest, "md5:..." or "sha256:..."."""
    if not path.is_file():
        return False
    name, _, expected = digest.partition(":")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(name, usedforsecurity=False))
    return found.hexdigest() == expected


def _fault(dataset: DataSet, part: str, arrays: Arrays) -> str | None:
    """Return what is wrong with the arrays: types, shapes, the count or the labels."""
    pixels, labels = arrays
    if pixels.dtype != np.uint8 or labels.dtype != np.uint8 or pixels.shape[1:] != dataset.shape:
        got = f"{pixels.dtype} images of shape {pixels.shape[1:]} and {labels.dtype} labels"
        return f"it holds {got}, expected uint8 and {dataset.shape}"
    count, classes = dataset.counts[part], len(dataset.classes)
    if len(pixels) != count or labels.shape != (count,):
        return f"the {part} part has {len(pixels):,} images and {labels.size:,} labels, expected {count:,} of each"
    if count and labels.max() >= classes:
        return f"it has a label of {labels.max()}, expected 0 to {classes - 1}"
    return None


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
    """Download each file to a temporary folder, and move it to its place in one step.

    An archive that is already in the folder is unpacked without a download.
    """
    if not dataset.downloads:
        raise DataError(f"{dataset.name} has no address to download from; {dataset.remedy}")
    folder = root / dataset.folders[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as temporary:
            for url, digest in dataset.downloads.items():
                path = Path(temporary) / url.rsplit("/", 1)[-1]
                packed = path.name.endswith(".tar.gz")
                places = (folder / path.name, root / path.name) if packed else (folder / path.name,)
                here = next((place for place in places if matches(place, digest)), None)
                if here is None:
                    _retrieve(url, digest, path)
                elif not packed:
                    continue
                files = _members(dataset, here or path, path.parent) if packed else [path]
                for file in files:
                    file.chmod(0o644)  # temporary files are readable by their owner only
                    os.replace(file, folder / file.name)
    except OSError as error:
        said = f"{dataset.name} cannot be written to {root} ({error})"
        raise DataError(f"{said}; free space or choose another folder") from error


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


def _members(dataset: DataSet, archive: Path, folder: Path) -> list[Path]:
    """Extract the files that the data set names, if they are plain files; return them when all are there."""
    paths = [folder / (name + dataset.endings[0]) for part in dataset.files.values() for name in part]
    try:
        with tarfile.open(archive) as tar:
            plain = {member.name: member for member in tar if member.isreg()}
            for path in paths:
                inside = f"{dataset.folders[0]}/{path.name}"
                if inside not in plain:
                    raise DataError(f"{archive.name} holds no plain file {inside}; get it elsewhere")
                content: Any = tar.extractfile(plain[inside])
                path.write_bytes(content.read())
    except tarfile.TarError as error:
        raise DataError(f"{archive.name} is not an archive that can be opened ({error})") from error
    return paths
