"""The real files: their SHA-256, splits, titles, and a flipped bit. MNIST always, the larger ones when asked."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from banach.data import DataError, get, load
from banach.data.dataset import PARTS, find, verify

SIZES = {
    "mnist": (55_000, 5_000, 10_000),
    "cifar10": (45_000, 5_000, 10_000),
    "svhn": (68_257, 5_000, 26_032),
}
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "svhn": "SVHN re-cropped from the originals"}

every = pytest.mark.parametrize(
    "name", ["mnist", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cifar10", "svhn"))]
)


@every
def test_splits_titles_and_checksums(name: str, real_data: Callable[[str], Path]) -> None:
    root = real_data(name)
    parts = [load(name, split, root) for split in ("train", "validation", "test")]
    assert tuple(len(part) for part in parts) == SIZES[name]
    assert {part.title for part in parts} == {TITLES[name]}
    whole = load(name, "train+validation", root).labels.bincount()
    assert torch.equal(parts[0].labels.bincount() + parts[1].labels.bincount(), whole)
    share = parts[1].labels.bincount() - 5_000 * whole / whole.sum()
    assert share.abs().max() < 1
    assert all(verify(get(name), part, (root,)).startswith(f"{TITLES[name]}, {part}: ") for part in PARTS)


@every
def test_one_flipped_bit_is_refused(name: str, real_data: Callable[[str], Path], tmp_path: Path) -> None:
    found = find(get(name), "test", (real_data(name),))
    (tmp_path / found[0].parent.name).mkdir()
    for path in found:
        data = bytearray(path.read_bytes())
        if path == found[0]:
            data[len(data) // 2] ^= 1
        (tmp_path / path.parent.name / path.name).write_bytes(data)
    with pytest.raises(DataError, match=f"{found[-1].name} cannot be used: the test arrays have SHA-256"):
        load(name, "test", tmp_path)
