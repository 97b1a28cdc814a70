"""digits: the 1,797 images of 8x8 inside scikit-learn, which need no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from banach.data.dataset import Arrays, DataSet, Known, Layout
from banach.data.error import need
from banach.data.split import held_out, rest

TEST = 360


def read_digits(part: str, paths: tuple[Path, ...]) -> Arrays:
    """Values 0 to 16 become 0 to 240: a factor of 15 loses nothing. The test part is ours: 360, stratified."""
    whole = need("sklearn.datasets", "digits").load_digits()
    pixels, labels = (whole.images * 15).astype(np.uint8)[:, None], whole.target.astype(np.uint8)
    test = held_out(labels, TEST)
    index = test if part == "test" else rest(len(labels), test)
    return Arrays(pixels[index], labels[index])


DIGITS = DataSet(
    name="digits",
    title="digits (scikit-learn)",
    shape=(1, 8, 8),
    classes=tuple("0123456789"),
    mean=(0.2871,),  # of the train split, as stored
    std=(0.3539,),
    counts={"train": 1_437, "test": TEST},
    validation=180,
    layouts=(Layout(read=read_digits),),
    known=(
        Known(
            "digits (scikit-learn)",
            {
                "train": "52aca2b41aa123dcab3862a834bbd556507087696bc1bba645a0118ee0208e14",
                "test": "dddbb1c6c41dda5d0a05754d76f4e142135ef8b64381136c0892420a638b1906",
            },
        ),
    ),
)
