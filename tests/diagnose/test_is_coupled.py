"""is_coupled sees every pair of samples, in either direction."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from banach.diagnose import is_coupled


def mixing(i: int, j: int, batch: int) -> Tensor:
    """z / 2, and sample i takes a fifth of sample j."""
    W = 0.5 * torch.eye(batch)
    W[i, j] += 0.2
    return W


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8, 9])
def test_every_pair(batch: int) -> None:
    z = torch.randn(batch, 3, generator=torch.Generator().manual_seed(batch))
    assert not is_coupled(lambda z: torch.tanh(z) / 2, z)
    for i, j in itertools.permutations(range(batch), 2):
        W = mixing(i, j, batch)
        assert is_coupled(lambda z, W=W: torch.tanh(W @ z), z), (i, j)


@pytest.mark.parametrize("batch", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("seed", range(3))
def test_half_a_batch_apart(batch: int, seed: int) -> None:
    z = torch.randn(batch, 3)
    assert is_coupled(lambda z: 0.5 * z + 0.4 * z.roll(batch // 2, 0), z, seed=seed)


def test_beside_inputs_and_in_a_nest() -> None:
    z, x = {"a": torch.randn(4, 2), "b": torch.randn(4)}, torch.randn(4, 2)

    def alone(z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        return {"a": z["a"] * x, "b": z["b"] / 2}

    def mixed(z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        return {"a": z["a"] * x, "b": z["b"] / 2 + z["a"].roll(2, 0).sum(1)}

    assert not is_coupled(alone, z, (x,))
    assert is_coupled(mixed, z, (x,))


def test_nobody() -> None:
    assert not is_coupled(lambda z: z - z.mean(0), torch.empty(0, 3))
