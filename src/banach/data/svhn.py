"""svhn: cropped street-view digits in MATLAB files, where label 10 is the digit 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from banach.data.dataset import Arrays, DataSet, Download, Known, Layout
from banach.data.error import Damaged, need

ADDRESS = "http://ufldl.stanford.edu/housenumbers/"


def read_svhn(part: str, paths: tuple[Path, ...]) -> Arrays:
    """X uint8 (32, 32, 3, N) and y (N, 1) with values 1 to 10."""
    (path,) = paths
    matlab = need("scipy.io", "svhn")
    _check_header(path, _ask(path, matlab.whosmat))
    content = _ask(path, matlab.loadmat, variable_names=("X", "y"))
    pixels, labels = content["X"], content["y"].reshape(-1)
    if labels.min() < 1 or labels.max() > 10:
        worst = labels.max() if labels.max() > 10 else labels.min()
        raise Damaged(path, f"it has a label of {worst}, expected 1 to 10 (10 is the digit 0)")
    return Arrays(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)), (labels % 10).astype(np.uint8))


def _check_header(path: Path, variables: Any) -> None:
    """Shapes and types, before anything of that size is read."""
    found = {name: (shape, kind) for name, shape, kind in variables}
    if not {"X", "y"} <= set(found):
        raise Damaged(path, f"it holds {', '.join(found) or 'nothing'}, expected X and y")
    (shape, kind), (labels, label_kind) = found["X"], found["y"]
    if kind != "uint8" or len(shape) != 4 or shape[:3] != (32, 32, 3) or shape[3] == 0:
        raise Damaged(path, f"X is {kind} of shape {shape}, expected uint8 (32, 32, 3, N)")
    if labels not in ((shape[3], 1), (1, shape[3])):
        raise Damaged(path, f"y has shape {labels} for {shape[3]:,} images")
    if label_kind not in ("uint8", "int8", "uint16", "int16", "int32"):
        raise Damaged(path, f"y is {label_kind}, expected uint8")


def _ask(path: Path, function: Any, **options: Any) -> Any:
    try:
        return function(str(path), **options)
    except OSError:
        raise
    except Exception as error:  # scipy fails in many ways on a broken file
        raise Damaged(path, f"scipy cannot read it ({type(error).__name__}: {error})") from error


LAYOUT = Layout(
    read=read_svhn,
    folders=("svhn",),
    files={"train": ("train_32x32.mat",), "test": ("test_32x32.mat",)},
    md5={
        "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    },
    downloads=(
        Download(ADDRESS + "train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        Download(ADDRESS + "test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    ),
)

SVHN = DataSet(
    name="svhn",
    title="SVHN",  # of the published files; arrays that were made again have a title of their own, below
    shape=(3, 32, 32),
    classes=tuple("0123456789"),
    mean=(0.4377, 0.4438, 0.4728),
    std=(0.1980, 0.2010, 0.1970),
    counts={"train": 73_257, "test": 26_032},
    validation=5_000,
    layouts=(LAYOUT,),
    known=(
        Known(
            "SVHN re-cropped from the originals",
            {
                "train": "847c5c27e330ee98e8f913482bf91b9a0a3761c8ad3583ad8fc82435a03ef70e",
                "test": "16a1e315de7f3215f1c75780bddd7877b7743c523a1ba8bdfc104f184403ccb0",
            },
        ),
    ),
)
