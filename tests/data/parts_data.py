"""Small data sets and MNIST files, refusals, and a server on this machine that offers files for download."""

import gzip
import hashlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from banach.data import DataError, DataSet, load, register


def small(dataset: DataSet, train: int = 40, test: int = 20, **changes: Any) -> DataSet:
    """The same data set with few images and no known SHA-256, registered in its place."""
    options = {"counts": {"train": train, "test": test}, "validation": 10, "known": {}, **changes}
    return register(replace(dataset, **options), replace=True)


def random_arrays(count: int, shape: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images that are all different, and labels in which every class occurs."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (count, *shape), dtype=np.uint8)
    return pixels, generator.permutation(np.arange(count) % 10).astype(np.uint8)


def refusal(name: str, folder: Path, file: str, split: str = "train+validation") -> str:
    """The sentence with which loading is refused; one line, and it names the file and what to do."""
    with pytest.raises(DataError) as caught:
        load(name, split, folder)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert file in sentence
    assert f"banach data fetch {name}" in sentence
    return sentence


def grey(seed: int = 0, shape: tuple[int, ...] = (8, 8)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def written(array: Any, name: str = "image.png", **options: Any) -> Path:
    """Write an image file into the working directory."""
    Image: Any = pytest.importorskip("PIL.Image")
    Image.fromarray(np.asarray(array)).save(name, **options)
    return Path(name)


def idx(array: np.ndarray) -> bytes:
    """The bytes of an IDX file."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def mnist_files(train: int = 40, test: int = 20, *, zipped: bool = True) -> dict[str, bytes]:
    """The four files of an MNIST with few images."""
    made, generator = {}, np.random.default_rng(0)
    for prefix, count in (("train", train), ("t10k", test)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        made[f"{prefix}-images-idx3-ubyte"] = idx(generator.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        made[f"{prefix}-labels-idx1-ubyte"] = idx(labels)
    return {f"{name}.gz": gzip.compress(content) for name, content in made.items()} if zipped else made


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write files by name into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


@dataclass
class Server:
    """Files by name, and the names that were requested."""

    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    address: str = ""

    def offer(self, name: str, content: bytes) -> dict[str, str]:
        """Offer a file, and return its address and digest."""
        self.files[name] = content
        return {f"{self.address}/{name}": f"md5:{hashlib.md5(content).hexdigest()}"}


@contextmanager
def serving() -> Iterator[Server]:
    """A server; files whose name begins with "cut-" break off in the middle, as a lost connection does."""
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            state.asked.append(name)
            content = state.files.get(name)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write((content or b"")[: len(content or b"") // 2 if name.startswith("cut-") else None])

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        state.address = f"http://127.0.0.1:{http.server_address[1]}"
        yield state
        http.shutdown()
        thread.join()
