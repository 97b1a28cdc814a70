"""Counter-based random numbers: SplitMix64, on any device, with no state."""

import numpy as np
import pytest
import torch

from banach.data import counter

# Outputs of the reference C implementation by Vigna, for the seed 1234567.
REFERENCE = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]


def test_the_published_sequence() -> None:
    assert [word % 2**64 for word in counter.bits(1234567, 4).tolist()] == REFERENCE


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_whole_number_arithmetic_wraps(key: int) -> None:
    def splitmix(n: int) -> int:
        z = (key + n * 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    words = counter.bits(key, 300)
    assert [word % 2**64 for word in words.tolist()] == [splitmix(n) for n in range(1, 301)]
    assert torch.equal(counter.bits(torch.tensor(key), 300), words)  # a key in a tensor is the same key


def test_numbers_are_uniform_and_orders_random() -> None:
    u = counter.uniform(counter.key(5), 2_000, 50).double()
    assert u.shape == (2_000, 50)
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    assert torch.equal(u * 2**24, (u * 2**24).round())
    counts = np.histogram(u.numpy(), 100, (0, 1))[0]
    assert ((counts - 1_000) ** 2 / 1_000).sum() < 150  # chi-squared, 99 degrees of freedom: p = .0007
    orders = [counter.bits(counter.key(0, e), 1_000).argsort().tolist() for e in range(3)]
    assert all(sorted(order) == list(range(1_000)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_keys_differ_and_never_change() -> None:
    """Pinned: a change here would give a resumed run other batches than it began with."""
    keys = {counter.key(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(keys) == 8_000
    assert counter.key(0, 1, 2, 3) == -8464824030585761673
    assert counter.bits(counter.key(1), 8).argsort().tolist() == [5, 2, 3, 1, 7, 0, 6, 4]
