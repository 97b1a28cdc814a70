"""Which tile a solve for a latent gets, and that it fits."""

from __future__ import annotations

import pytest
import torch

from banach.kernels.latent_tiles import LatentTile, Sizes, tile_for

CIFAR, MNIST, SVHN = Sizes(35, 10, 10), Sizes(32, 9, 9), Sizes(64, 8, 8)
H200, A100, SMALL = 227 * 1024, 163 * 1024, 99 * 1024


def tile(sizes: Sizes, shared: int = H200, dtype: torch.dtype = torch.bfloat16, **how: bool) -> LatentTile:
    return tile_for(sizes, sizes.height * sizes.width, dtype, shared, **how)


def test_weights_are_kept_where_three_products_hold_them() -> None:
    assert tile(CIFAR).keep
    assert tile(MNIST).keep
    assert not tile(MNIST, coupled=False).keep  # pixels on powers of two come as fast without
    assert not tile(Sizes(64, 10, 10)).keep  # nine products
    assert not tile(CIFAR, dtype=torch.float32).keep
    assert not tile(SVHN).keep


def test_many_images_are_two_programs_a_multiprocessor() -> None:
    two = tile(CIFAR, coupled=False, many=True)
    assert (two.rows, two.warps, two.places, two.keep) == (64, 4, 2, True)
    assert tile(CIFAR, coupled=False).places == 1
    assert tile(CIFAR, A100, coupled=False, many=True) == tile(CIFAR, A100, coupled=False)  # no room for two


@pytest.mark.parametrize("sizes", [CIFAR, MNIST, SVHN])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shared", [H200, A100, SMALL])
@pytest.mark.parametrize("many", [False, True])
def test_what_is_chosen_fits(sizes: Sizes, dtype: torch.dtype, shared: int, many: bool) -> None:
    for coupled in (True, False):
        chosen = tile(sizes, shared, dtype, coupled=coupled, many=many and not coupled)
        assert sizes.shared(chosen, dtype) * chosen.places <= shared
