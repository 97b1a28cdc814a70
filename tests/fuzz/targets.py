"""What is fuzzed: every reader of files that may come from elsewhere, and the files to damage.

A target reads bytes and returns; or it refuses them, by the one type of error that the command line turns into a
sentence. Anything else is a bug.
"""

import gzip
import io
import pickle
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

from banach.data import CIFAR10, MNIST, SVHN, DataError, dataset, load
from banach.data.pictures import read_image
from banach.train import Settings, words
from data.parts_data import idx
from fuzz.mutations import damaged, toml, word

COUNT = 4  # images of the test part


@dataclass(frozen=True)
class Target:
    """A reader, the error by which it may refuse, and what it is given."""

    name: str
    read: Callable[[Any], object]
    refuses: type[Exception]
    given: st.SearchStrategy[Any]

    def accepts(self, content: Any) -> bool:
        """Return whether it was read rather than refused. The refusal must be one short sentence."""
        try:
            self.read(content)
        except self.refuses as error:
            if not 0 < len(str(error)) < 2_000:
                raise AssertionError(f"not one sentence: {str(error)[:2_000]}") from error
            return False
        return True


@contextmanager
def all_targets() -> Iterator[dict[str, Target]]:
    """Yield the targets by name. Small data sets are registered, and files written to a temporary folder."""
    kept = dict(dataset._registry)
    with tempfile.TemporaryDirectory() as folder:
        for one in (MNIST, CIFAR10, SVHN):
            small = replace(one, counts={"train": 2, "test": COUNT}, validation=1, known={})
            dataset.register(small, replace=True)
        try:
            here = Path(folder)
            made = (*_data(here), _npz(here / "own.npz"), *_images(here), *_settings(here))
            yield {target.name: target for target in made}
        finally:
            dataset._registry.clear()
            dataset._registry.update(kept)


def _data(folder: Path) -> Iterator[Target]:
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(1, COUNT + 1, dtype=np.uint8)
    images, numbers = idx(np.ascontiguousarray(pixels[:, 0, :28, :28])), idx(labels)
    records = np.concatenate([labels[:, None], pixels.reshape(COUNT, -1)], 1).tobytes()
    batch = {"data": pixels.reshape(COUNT, -1), "labels": labels.tolist(), "filenames": ["a.png"] * COUNT}
    pickles = [pickle.dumps(batch, protocol=protocol) for protocol in range(6)]
    X, y = pixels.transpose(2, 3, 1, 0), labels[:, None]
    plain, packed = (_matlab(X, y, compressed) for compressed in (False, True))
    at = partial(_part, folder)
    yield at(
        "mnist", "mnist/t10k-images-idx3-ubyte", damaged([images]), others={"t10k-labels-idx1-ubyte": numbers}
    )
    yield at(
        "mnist", "mnist/t10k-labels-idx1-ubyte", damaged([numbers]), others={"t10k-images-idx3-ubyte": images}
    )
    zipped = st.one_of(damaged([images]).map(gzip.compress), damaged([gzip.compress(images)]))
    yield at("mnist", "mnist/t10k-images-idx3-ubyte.gz", zipped, others={"t10k-labels-idx1-ubyte": numbers})
    yield at("cifar10", "cifar-10-batches-bin/test_batch.bin", damaged([records, records[:3073]]))
    yield at("cifar10", "cifar-10-batches-py/test_batch", damaged(pickles))
    inside = damaged([plain[128:]]).map(lambda variables: plain[:128] + _repacked(variables))
    yield at("svhn", "svhn/test_32x32.mat", st.one_of(damaged([plain, packed]), inside))


def _part(
    folder: Path, name: str, file: str, given: st.SearchStrategy[bytes], others: dict[str, bytes] | None = None
) -> Target:
    """The test part of a data set, one file of which is damaged."""
    root = folder / Path(file).name
    path = root / file
    path.parent.mkdir(parents=True)
    for other, content in (others or {}).items():
        (path.parent / other).write_bytes(content)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        images = load(name, "test", root)
        assert images.pixels.shape == (COUNT, *images.shape)
        assert int(images.labels.max()) < 10

    return Target(f"{name}: {path.name}", read, DataError, given)


def _npz(path: Path) -> Target:
    """Arrays of the user's own, stored and compressed."""
    seeds, pixels = [], np.random.default_rng(2).integers(0, 256, (20, 4, 4), dtype=np.uint8)
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, images=pixels, labels=np.arange(20) % 3)
        seeds.append(file.getvalue())

    def read(content: bytes) -> None:
        path.write_bytes(content)
        images = load(str(path), "test")
        assert int(images.labels.max()) < len(images.classes)

    return Target("npz", read, DataError, damaged(seeds))


def _matlab(X: np.ndarray, y: np.ndarray, compressed: bool) -> bytes:
    file = io.BytesIO()
    savemat(file, {"X": X, "y": y}, do_compression=compressed)
    return file.getvalue()


def _repacked(variables: bytes) -> bytes:
    """The variables as one compressed element: its checksum is right, whatever is inside."""
    packed = zlib.compress(variables)
    return (15).to_bytes(4, "little") + len(packed).to_bytes(4, "little") + packed


FORMATS = {"PNG": "RGBA", "JPEG": "RGB", "GIF": "P", "BMP": "RGB", "TIFF": "I;16", "WEBP": "RGB", "PPM": "RGB"}


def _images(folder: Path) -> Iterator[Target]:
    for kind, mode in FORMATS.items():
        seeds = []
        for changed in (mode, "L"):
            file, exif = io.BytesIO(), Image.Exif()
            exif[0x0112] = 6
            pixels = np.random.default_rng(1).integers(0, 256, (9, 11), dtype=np.uint8)
            options: dict[str, Any] = {"exif": exif} if kind in ("PNG", "JPEG", "WEBP", "TIFF") else {}
            Image.fromarray(pixels).convert(changed).save(file, kind, **options)
            seeds.append(file.getvalue())
        yield Target(f"image: {kind}", partial(_read_image, folder / f"image.{kind}"), ValueError, damaged(seeds))


def _read_image(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert tuple(read_image(path, CIFAR10.shape).pixels.shape) == CIFAR10.shape


def _settings(folder: Path) -> Iterator[Target]:
    good = b"epochs = 5\nlr = 1e-3\nsolver = 'anderson:5'\n[schedule]\nkind = 'steps'\nat = [1, 2]\nfactor = 0.1\n"
    given = st.one_of(toml, damaged([good]))
    yield Target("settings file", partial(_read_settings, folder / "settings.toml"), ValueError, given)
    for name in ("solver", "backward", "norm", "augment", "schedule"):
        yield Target(f"setting: {name}", getattr(words, name), ValueError, word(*words._MAKERS[name]))


def _read_settings(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    settings = Settings.choose({"data": "digits", "model": "digits"}, path)
    assert Settings.from_dict(settings.to_dict()) == settings
