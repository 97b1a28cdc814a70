"""own(): your data as a data set: a folder of images by class, or arrays in a .npz file."""

import math
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from banach.data.dataset import Arrays, DataError, DataSet, printable
from banach.data.images import parted
from banach.data.pictures import images_in, read_image

LIMIT = 2**31  # bytes of all pixels, checked before they are read
CLASSES = 256  # labels are bytes
TENTH = 10  # one image in ten is held out for validation, and for the test if there is no test part
SPLIT, WHOLE = ("x_train", "y_train", "x_test", "y_test"), ("images", "labels")  # names of arrays
Read = Callable[[int], np.ndarray]  # the pixels of the first or the second part
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def own(name: str) -> DataSet | None:
    """Return the data set of "folder:PATH", "folder:PATH@SIZE", "npz:PATH" or "PATH.npz"; None for other names.

    Its name has the absolute path, so that a run can be resumed from another folder. Pixels are normalised to
    [-1, 1]. A tenth of the training images, stratified and always the same, is the validation split.

    Raises:
        DataError: if there is nothing to read, or more than fits into memory.
    """
    if name.startswith("folder:"):
        return _folder(name.removeprefix("folder:"))
    if name.startswith("npz:") or name.endswith(".npz"):
        return _npz(Path(name.removeprefix("npz:")).expanduser().resolve())
    return None


def _folder(text: str) -> DataSet:
    """Return the images PATH/CLASS/image, or PATH/train/CLASS/image and PATH/test/CLASS/image.

    The first one decides whether all are grey or RGB and, without @SIZE, which size they must have.
    """
    path, _, side = text.rpartition("@") if re.search(r"@[1-9]\d{0,3}$", text) else (text, "", "")
    root = Path(path).expanduser().resolve()
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; pass --data folder:PATH with the folder of your images")
    parts = [part for part in (root / "train", root / "test") if part.is_dir()]
    listed = list[list[Path]]()
    for part in parts if len(parts) == 2 else [root]:
        folders = sorted(one for one in part.iterdir() if one.is_dir() and not one.name.startswith("."))
        found = [images_in(folder) for folder in folders]
        if not any(found) or not (listed or all(found)):  # a class may lack test images
            empty = folders[found.index([])] if any(found) else part
            raise DataError(f"{empty} has no images; put them into one folder per class, as in {part}/cat/1.png")
        listed.append([path for files in found for path in files])
    classes = {name: number for number, name in enumerate(sorted({path.parent.name for path in listed[0]}))}
    labels = [np.array([classes.get(path.parent.name, -1) for path in files]) for files in listed]
    channels, height, width = read_image(listed[0][0]).pixels.shape
    size = (int(side), int(side)) if side else (height, width)

    def read(index: int) -> np.ndarray:
        pixels = np.empty((len(listed[index]), channels, *size), np.uint8)
        for file, place in zip(listed[index], pixels, strict=True):
            picture = read_image(file, (channels, *size))
            if not side and picture.size != (width, height):
                got = f"{picture.size[0]} x {picture.size[1]} pixels, others {width} x {height}"
                raise DataError(f"{file} has {got}; resize all images with --data folder:{path}@{max(size)}")
            place[:] = picture.pixels.numpy()
        return pixels

    name = f"folder:{root}" + (f"@{side}" if side else "")
    return _dataset(name, root.name, (channels, *size), tuple(classes), labels, read)


def _npz(path: Path) -> DataSet:
    """Return the arrays x_train, y_train, x_test and y_test, or images and labels."""
    with _opened(path) as file:
        there = {name.removesuffix(".npy") for name in file.namelist()}
        names = SPLIT if set(SPLIT) <= there else WHOLE
        if not set(names) <= there:
            raise ValueError(f"expected arrays {', '.join(SPLIT)}, or {', '.join(WHOLE)}, got {sorted(there)[:9]}")
        shapes = [_shape(file, name, np.uint8) for name in names[::2]]
        labels = [_member(file, name, np.integer).reshape(-1) for name in names[1::2]]
        most = max(int(one.max(initial=0)) for one in labels)
        if most >= CLASSES:
            raise ValueError(f"it has a label of {most}, expected 0 to {CLASSES - 1}")
        for given, numbers in zip(shapes, labels, strict=True):
            wanted = (len(numbers), *shapes[0][1:])
            if given != wanted:
                raise ValueError(f"{len(numbers):,} labels for images {given}, expected {wanted}; make them match")
        shape = _planes(np.broadcast_to(np.uint8(), shapes[0])).shape[1:]  # np.broadcast_to allocates nothing

    def read(index: int) -> np.ndarray:
        with _opened(path) as file:
            return np.ascontiguousarray(_planes(_member(file, names[2 * index], np.uint8)))

    return _dataset(f"npz:{path}", path.name, shape, tuple(map(str, range(1 + most))), labels, read)


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a .npz file; whatever is wrong with it becomes one sentence."""
    try:
        with zipfile.ZipFile(path) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); pass a .npz file") from None
    except Exception as error:  # a damaged file makes zipfile and NumPy raise almost anything
        raise DataError(f"{path} is not a .npz file that can be used: {printable(error)}") from None


def _shape(file: zipfile.ZipFile, name: str, kind: type) -> tuple[int, ...]:
    """Return the shape of an array, from its header; refuse other types and arrays that are too large."""
    with file.open(f"{name}.npy") as stream:
        shape, _, dtype = HEADERS[np.lib.format.read_magic(stream)](stream)
    if not np.issubdtype(dtype, kind):
        advice = "pixels from 0 to 255" if kind is np.uint8 else "class numbers from 0"
        raise ValueError(f"{name} has the type {dtype}, expected {kind.__name__}: {advice}")
    if math.prod(shape) * dtype.itemsize > LIMIT:
        raise ValueError(f"{name} has the shape {shape}, expected at most {LIMIT:,} bytes")
    return shape


def _member(file: zipfile.ZipFile, name: str, kind: type) -> np.ndarray:
    _shape(file, name, kind)
    with file.open(f"{name}.npy") as stream:
        return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))


def _planes(pixels: np.ndarray) -> np.ndarray:
    """Return images as (N, C, H, W); they may be (N, H, W), or have their 1 or 3 channels last."""
    if pixels.ndim == 3:
        return pixels[:, None]
    if pixels.ndim != 4 or not {1, 3} & {pixels.shape[1], pixels.shape[3]}:
        raise ValueError(f"images must be (N, H, W), (N, C, H, W) or (N, H, W, C), C 1 or 3, got {pixels.shape}")
    return pixels if pixels.shape[1] in (1, 3) else pixels.transpose(0, 3, 1, 2)


def _dataset(
    name: str, title: str, shape: Any, classes: tuple[str, ...], labels: Sequence[np.ndarray], read: Read
) -> DataSet:
    """Return the data set of one array of labels, a tenth of which is the test part, or of two."""
    chosen: Any = parted(labels[0], len(labels[0]) // TENTH) if len(labels) == 1 else (slice(None), slice(None))
    train, test = len(labels[0][chosen[0]]), len(labels[-1][chosen[1]])
    if train < TENTH or test < 1 or not 2 <= len(classes) <= CLASSES:
        got = f"{train:,} training images, {test:,} test images and {len(classes)} classes"
        raise DataError(f"{name} has {got}, expected at least {TENTH} and 1, and 2 to {CLASSES} classes")
    if not 0 < (train + test) * math.prod(shape) <= LIMIT:
        got = f"{train + test:,} images {shape}"
        raise DataError(f"{name} has {got}, expected 1 to {LIMIT:,} bytes; choose a size, as in folder:PATH@32")
    if labels[0].min() < 0 or not np.isin(labels[-1], labels[0]).all():
        raise DataError(f"{name} has labels below 0, or test images of a class without training images; fix them")

    def read_part(part: str, paths: tuple[Path, ...]) -> Arrays:
        array, index = (-1 if part == "test" else 0), chosen[part == "test"]
        return Arrays(read(array)[index], labels[array][index].astype(np.uint8))

    half, counts = (0.5,) * shape[0], {"train": train, "test": test}
    return DataSet(name, title, shape, classes, half, half, counts, max(1, train // TENTH), read_part)
