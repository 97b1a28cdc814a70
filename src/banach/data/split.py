"""Which images are held out: fixed, stratified, and the same on every machine."""

from __future__ import annotations

import numpy as np

# The raw stream of Philox is fixed by NumPy's compatibility policy; Generator.permutation's is not.
KEY = 0x62616E616368  # "banach"

SPLITS = ("train", "validation", "test", "train+validation")


def held_out(labels: np.ndarray, count: int, key: int = KEY) -> np.ndarray:
    """`count` indices, ascending: the first of each class in the order of `Philox(key).random_raw`.

    Every class gives its share of `count`, rounded by largest remainder.
    """
    if not 0 <= count <= len(labels):
        raise ValueError(f"cannot hold out {count} of {len(labels)} images; choose 0 to {len(labels)}")
    order = np.argsort(np.random.Philox(key=key).random_raw(len(labels)), kind="stable")
    classes, sizes = np.unique(labels, return_counts=True)
    quotas = _share(sizes, count)
    chosen = [order[labels[order] == c][:quota] for c, quota in zip(classes, quotas, strict=True)]
    return np.sort(np.concatenate([*chosen, np.empty(0, order.dtype)]))


def rest(total: int, index: np.ndarray) -> np.ndarray:
    """The indices below `total` that are not in `index`, ascending."""
    keep = np.ones(total, bool)
    keep[index] = False
    return np.flatnonzero(keep)


def _share(sizes: np.ndarray, count: int) -> np.ndarray:
    """`count` shared out in proportion to `sizes`, in whole numbers; ties go to the lower class."""
    # Whole numbers throughout: a quotient in floating point could round differently elsewhere.
    total = max(int(sizes.sum()), 1)
    quotas = sizes * count // total
    remainders = sizes * count % total
    quotas[np.argsort(-remainders, kind="stable")[: count - quotas.sum()]] += 1
    return quotas
