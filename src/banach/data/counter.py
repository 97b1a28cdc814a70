"""Random numbers as a function of a key: no state, so a resumed run draws what it would have drawn.

SplitMix64 (Steele, Lea and Flood, 2014): the n-th output for a key is mix(key + n * golden), in integer tensor
operations. So the numbers are the same on every device and need no host sync. With the key in a tensor a captured
graph draws new numbers at every replay, which a seeded torch.Generator cannot do.
"""

from typing import Any

import torch
from torch import Tensor

WORD = 1 << 64
# As signed numbers, since torch has no arithmetic of unsigned ones.
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15 - WORD, 0xBF58476D1CE4E5B9 - WORD, 0x94D049BB133111EB - WORD
# Streams, the second number of every key: the order of images, their augmentation, what a network draws (dropout),
# what samplers and data sets of a DataLoader draw.
ORDER, AUGMENT, NETWORK, LOADER = range(4)


def key(*numbers: int) -> int:
    """Return one signed 64-bit key for several integers, such as a seed, an epoch and a batch."""
    word = 0
    for number in numbers:
        word = _mix(word + (number + 1) * GOLDEN)
    return (word + WORD // 2) % WORD - WORD // 2


def bits(key: int | Tensor, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return (count,) int64, every bit random. `key`: an int, or a 0-d int64 tensor on the device."""
    return _mix(torch.arange(1, count + 1, device=device) * GOLDEN + key)


def uniform(key: int | Tensor, rows: int, columns: int, device: torch.device | str = "cpu") -> Tensor:
    """Return (rows, columns) float32, multiples of 2^-24 in [0, 1)."""
    return (_shift(bits(key, rows * columns, device), 40).to(torch.float32) * 2.0**-24).view(rows, columns)


def _mix(z: Any) -> Any:
    """Return the mixed bits of a tensor or an int; of an int only the lower 64 bits count, in and out."""
    z = (z ^ _shift(z, 30)) * FIRST
    z = (z ^ _shift(z, 27)) * SECOND
    return z ^ _shift(z, 31)


def _shift(z: Any, by: int) -> Any:
    """Return z >> by with zeros shifted in: Python's and torch's shift repeats the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)
