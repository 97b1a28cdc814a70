"""load(): a split of a data set as tensors, read from its publisher's files and checked."""

from __future__ import annotations

import numpy as np
import torch

from banach.data.check import identify, read_part, sha256
from banach.data.dataset import Arrays, DataSet, get
from banach.data.find import Folder, find, roots
from banach.data.images import Images
from banach.data.split import held_out, rest


def load(
    name: str,
    split: str = "train",
    data_dir: Folder | None = None,
    device: torch.device | str = "cpu",
    *,
    check: bool = True,
) -> Images:
    """The images of a split: "train", "validation", "test" or "train+validation".

    Shapes, counts and labels are always checked. `check=True` also compares the arrays with their known SHA-256
    (a quarter of a second at most) and refuses others; without it the title says so.
    """
    dataset = get(name)
    part = dataset.part(split)
    found = find(dataset, part, roots(dataset, data_dir))
    arrays = read_part(dataset, part, found)
    title = f"{dataset.title} (not checked)"
    if check:
        title = identify(dataset, part, sha256(arrays), found)
    pixels, labels = _cut(dataset, split, arrays)
    return Images(
        pixels=torch.from_numpy(pixels).to(device),
        labels=torch.from_numpy(labels.astype(np.int64)).to(device),
        name=dataset.name,
        title=title,
        split=split,
        classes=dataset.classes,
        mean=dataset.mean,
        std=dataset.std,
    )


def _cut(dataset: DataSet, split: str, arrays: Arrays) -> Arrays:
    if split in ("test", "train+validation"):
        return arrays
    index = held_out(arrays.labels, dataset.validation)
    if split == "train":
        index = rest(len(arrays.labels), index)
    return Arrays(arrays.pixels[index], arrays.labels[index])
