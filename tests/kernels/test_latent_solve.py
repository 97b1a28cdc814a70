"""latent_solve in plain torch, for the networks of the paper, against banach.solve with the modules themselves."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach.kernels.latent import latent_solve
from banach.kernels.latent_form import LatentForm, Solved, Stop, describe, latent_map
from banach.models.blocks import LatentResNet
from banach.solve import Picard, Solution, Tolerance, solve
from kernels.latent_networks import NORMS, form_of, network, stop_of, tiny


def by_modules(R: nn.Module, v: Tensor, z0: Tensor | None, norm: str, **settings: Any) -> Solution:
    """Every evaluation by a copy, so that running statistics stay."""
    return solve(
        lambda z, v: copy.deepcopy(R)(z, v),
        torch.zeros_like(v) if z0 is None else z0,
        Picard(),
        inputs=(v,),
        tolerance=Tolerance(norm=NORMS[norm][0], check_every=1, **settings),
        coupled=R.training,
    )


def assert_same(got: Solved, wanted: Solution) -> None:
    assert torch.equal(got.steps, wanted.steps)
    assert torch.equal(got.converged, wanted.converged)
    assert torch.equal(got.nonfinite, wanted.nonfinite)
    torch.testing.assert_close(got.value, wanted.value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.residual, wanted.residual, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["mnist", "svhn", "cifar10"])
def test_the_networks_of_the_paper(name: str, train: bool) -> None:
    R, v = network(name, train=train)
    R, v = R.double(), v.double()
    before = copy.deepcopy(R.state_dict())
    got = latent_solve(R, v, stop=stop_of(atol=1e-3), form=form_of(R))
    assert_same(got, by_modules(R, v, None, "worst pixel", atol=1e-3, max_steps=60))
    assert bool(got.converged.all())
    assert int(got.steps.min()) > 3
    for key, value in R.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm", list(NORMS))
def test_norms_relative_tolerances_and_starts(norm: str, train: bool) -> None:
    R, v = tiny(late=train, train=train, batch=5)
    R, v = R.double(), v.double()
    z0 = torch.randn_like(v)
    settings = {"atol": 1e-4, "rtol": 1e-3, "max_steps": 60}
    got = latent_solve(R, v, z0, stop=stop_of(norm, **settings), form=form_of(R))
    assert_same(got, by_modules(R, v, z0, norm, **settings))
    assert bool(got.converged.all())


@pytest.mark.parametrize("max_steps", [0, 1, 4])
def test_a_budget_that_is_too_small(max_steps: int) -> None:
    R, v = tiny(late=False, train=False)
    R, v = R.double(), v.double()
    got = latent_solve(R, v, stop=stop_of(max_steps=max_steps, atol=1e-6), form=form_of(R))
    assert_same(got, by_modules(R, v, None, "worst pixel", max_steps=max_steps, atol=1e-6))
    assert not bool(got.converged.any())


def test_images_stop_on_their_own() -> None:
    R, v = tiny(late=False, train=False, batch=4)
    R, v = R.double(), v.double() * torch.tensor([0.1, 1.0, 10.0, 100.0])[:, None, None, None]
    whole = latent_solve(R, v, stop=stop_of(atol=1e-4), form=form_of(R))
    assert len(set(whole.steps.tolist())) > 1
    for number in range(4):
        alone = latent_solve(R, v[number : number + 1], stop=stop_of(atol=1e-4), form=form_of(R))
        assert int(alone.steps) == int(whole.steps[number])


def test_where_it_overflows_the_best_iterate_is_kept() -> None:
    R, v = tiny(late=False, train=False)
    R, v = R.double(), v.double()
    with torch.no_grad():
        for parameter in R.parameters():
            parameter.mul_(1e30)
    z0 = torch.randn_like(v)
    got = latent_solve(R, v, z0, stop=stop_of(), form=form_of(R))
    assert_same(got, by_modules(R, v, z0, "worst pixel", atol=1e-3, max_steps=60))
    assert bool(got.nonfinite.all())


def test_half_precision_is_for_products_alone() -> None:
    R, v = tiny(late=True, train=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = latent_solve(R, v, stop=stop_of(atol=1e-2), form=form_of(R))
    full = latent_solve(R, v, stop=stop_of(atol=1e-2), form=form_of(R))
    assert half.value.dtype == torch.float32
    assert half.value.is_contiguous(memory_format=torch.channels_last)
    error = float((half.value - full.value).norm() / full.value.norm())
    assert 1e-4 < error < 2e-2


def test_what_the_kernel_does_not_know_is_refused() -> None:
    plain = LatentResNet(16, 2, 0.5, batch_norm=False)
    v = torch.randn(2, 16, 4, 4)
    with pytest.raises(ValueError, match="BatchNorm2d"):
        latent_solve(plain, v, stop=stop_of(), form=form_of(plain))
    wide = LatentResNet(80, 1, 0.5)
    with pytest.raises(ValueError, match="at most 64 channels"):
        latent_map(wide, form_of(wide))
    mixed = LatentResNet(16, 2, 0.5)
    mixed.blocks[0].eval()
    with pytest.raises(ValueError, match="alike"):
        latent_map(mixed, form_of(mixed))
    with pytest.raises(ValueError, match="latent_form"):
        latent_solve(nn.Conv2d(16, 16, 3), v, stop=stop_of())
    good = LatentResNet(16, 2, 0.5)
    with pytest.raises(ValueError, match="v is"):
        latent_solve(good, v[:, :8], stop=stop_of(), form=form_of(good))
    with pytest.raises(ValueError, match="z0"):
        latent_solve(good, v, v[:1], stop=stop_of(), form=form_of(good))
    with pytest.raises(ValueError, match="choose one"):
        Stop(1e-3, worst_pixel=True, mean=True)


def test_a_network_that_says_what_it_is_needs_no_form() -> None:
    R: Any = LatentResNet(16, 2, 0.5)
    form = LatentForm(outer=0.5, slope_after=0.1**2)
    assert describe(R) == form
    assert describe(nn.Linear(2, 2)) is None
    unfit: Any = LatentResNet(16, 2, 0.5, batch_norm=False)
    assert unfit.latent_form == form
    assert describe(unfit) is None
