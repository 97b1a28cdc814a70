"""latent_solve without a GPU: the paper's networks against banach.solve with the modules, refusals, tiles."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach.kernels.latent import LatentForm, describe, latent_map, latent_solve, shared_memory, sizes_of, tile_for
from banach.models.blocks import LatentResNet
from banach.solve import RMS, Euclidean, Norm, Picard, Solution, Tolerance, WorstPixel, solve
from kernels.latent_networks import network, tiny, tolerance


class OtherNorm(RMS):
    pass


def by_modules(R: nn.Module, v: Tensor, z0: Tensor | None, stop: Tolerance) -> Solution:
    """Every evaluation by a copy, so that running statistics stay."""
    z0 = torch.zeros_like(v) if z0 is None else z0
    return solve(
        lambda z, v: copy.deepcopy(R)(z, v), z0, Picard(), inputs=(v,), tolerance=stop, coupled=R.training
    )


def assert_same(got: Solution, wanted: Solution) -> None:
    for name in ("steps", "converged", "nonfinite", "diverged"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    torch.testing.assert_close(got.value, wanted.value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.residual, wanted.residual, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["mnist", "svhn", "cifar10"])
def test_the_networks_of_the_paper(name: str, train: bool) -> None:
    R, v = network(name, train=train)
    R, v = R.double(), v.double()
    before = copy.deepcopy(R.state_dict())
    got = latent_solve(R, v, tolerance=tolerance())
    assert_same(got, by_modules(R, v, None, tolerance()))
    assert bool(got.converged.all())
    assert int(got.steps.min()) > 3
    for key, value in R.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm", [WorstPixel(), RMS(), Euclidean()], ids=str)
def test_norms_relative_tolerances_and_starts(norm: Norm, train: bool) -> None:
    R, v = tiny(late=train, train=train, batch=5)
    R, v = R.double(), v.double()
    z0 = torch.randn_like(v)
    stop = tolerance(norm, atol=1e-4, rtol=1e-3)
    got = latent_solve(R, v, z0, tolerance=stop)
    assert_same(got, by_modules(R, v, z0, stop))
    assert bool(got.converged.all())


@pytest.mark.parametrize("max_steps", [0, 1, 4])
def test_a_budget_that_is_too_small(max_steps: int) -> None:
    R, v = tiny(late=False, train=False)
    R, v = R.double(), v.double()
    stop = tolerance(max_steps=max_steps, atol=1e-6)
    got = latent_solve(R, v, tolerance=stop)
    assert_same(got, by_modules(R, v, None, stop))
    assert not bool(got.converged.any())


def test_images_stop_on_their_own() -> None:
    R, v = tiny(late=False, train=False, batch=4)
    R, v = R.double(), v.double() * torch.tensor([0.1, 1.0, 10.0, 100.0])[:, None, None, None]
    whole = latent_solve(R, v, tolerance=tolerance(atol=1e-4))
    assert len(set(whole.steps.tolist())) > 1
    for number in range(4):
        alone = latent_solve(R, v[number : number + 1], tolerance=tolerance(atol=1e-4))
        assert int(alone.steps) == int(whole.steps[number])


def test_where_it_overflows_the_best_iterate_is_kept() -> None:
    R, v = tiny(late=False, train=False)
    R, v = R.double(), v.double()
    with torch.no_grad():
        for parameter in R.parameters():
            parameter.mul_(1e30)
    z0 = torch.randn_like(v)
    got = latent_solve(R, v, z0, tolerance=tolerance())
    assert_same(got, by_modules(R, v, z0, tolerance()))
    assert bool(got.nonfinite.all())


def test_half_precision_is_for_products_alone() -> None:
    R, v = tiny(late=True, train=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = latent_solve(R, v, tolerance=tolerance(atol=1e-2))
    full = latent_solve(R, v, tolerance=tolerance(atol=1e-2))
    assert half.value.dtype == torch.float32
    assert half.value.is_contiguous(memory_format=torch.channels_last)
    error = float((half.value - full.value).norm() / full.value.norm())
    assert 1e-4 < error < 2e-2


def test_what_the_kernel_does_not_know_is_refused() -> None:
    plain = LatentResNet(16, 2, 0.5, batch_norm=False)
    v = torch.randn(2, 16, 4, 4)
    with pytest.raises(ValueError, match="BatchNorm2d"):
        latent_solve(plain, v)
    wide = LatentResNet(80, 1, 0.5)
    with pytest.raises(ValueError, match="at most 64 channels"):
        latent_map(wide)
    mixed = LatentResNet(16, 2, 0.5)
    mixed.blocks[0].eval()
    with pytest.raises(ValueError, match="one mode"):
        latent_map(mixed)
    with pytest.raises(ValueError, match="latent_form"):
        latent_solve(nn.Conv2d(16, 16, 3), v)
    good = LatentResNet(16, 2, 0.5)
    with pytest.raises(ValueError, match="v must be"):
        latent_solve(good, v[:, :8])
    with pytest.raises(ValueError, match="z0"):
        latent_solve(good, v, v[:1])
    with pytest.raises(ValueError, match="norm"):
        latent_solve(good, v, tolerance=Tolerance(norm=OtherNorm()))


def test_a_network_that_says_what_it_is_needs_no_form() -> None:
    R: Any = LatentResNet(16, 2, 0.5)
    form = LatentForm(outer=0.5, slope_after=0.1**2)
    assert describe(R) == form
    assert describe(nn.Linear(2, 2)) is None
    unfit: Any = LatentResNet(16, 2, 0.5, batch_norm=False)
    assert unfit.latent_form == form
    assert describe(unfit) is None


CIFAR, MNIST, SVHN = sizes_of(35, 10, 10), sizes_of(32, 9, 9), sizes_of(64, 8, 8)


@pytest.mark.parametrize("sizes", [CIFAR, MNIST, SVHN], ids=["cifar10", "mnist", "svhn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shared", [227 * 1024, 163 * 1024, 99 * 1024], ids=["H200", "A100", "small"])
def test_the_tile_of_a_solve_fits_into_shared_memory(sizes: Any, dtype: torch.dtype, shared: int) -> None:
    for how in ({"coupled": True}, {"coupled": False}, {"coupled": False, "many": True}):
        tile = tile_for(sizes, sizes.height * sizes.width, dtype, shared, **how)
        assert shared_memory(sizes, tile, dtype) * tile.places <= shared


def test_tiles_that_were_fastest_on_an_h200() -> None:
    def tile(sizes: Any, **how: bool) -> Any:
        return tile_for(sizes, sizes.height * sizes.width, torch.bfloat16, 227 * 1024, **how)

    assert tile(CIFAR).keep
    assert tile(MNIST).keep
    assert not tile(MNIST, coupled=False).keep
    assert not tile(SVHN).keep
    two = tile(CIFAR, coupled=False, many=True)
    assert (two.rows, two.warps, two.places, two.keep) == (64, 4, 2, True)
