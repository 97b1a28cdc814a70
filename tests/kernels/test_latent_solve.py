"""latent_solve without a GPU: the paper's networks against banach.solve with the modules, refusals, tiles."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach.kernels.latent import LatentForm, describe, latent_solve, shared_memory, sizes_of, tiled
from banach.models.blocks import LatentResNet
from banach.solve import RMS, Euclidean, Picard, Solution, Tolerance, WorstPixel, solve
from kernels.cases import NETWORKS, distance, network, tiny, tolerance


class OtherNorm(RMS):
    pass


def assert_as_by_modules(R: nn.Module, v: Tensor, z0: Tensor | None, stop: Tolerance) -> Solution:
    """Solve in float64, and by `solve`, where every evaluation is by a copy, so that running statistics stay."""
    R, v = R.double(), v.double()
    start = torch.zeros_like(v) if z0 is None else z0.double()
    before = copy.deepcopy(R.state_dict())
    got = latent_solve(R, v, None if z0 is None else start, tolerance=stop)
    T = lambda z, v: copy.deepcopy(R)(z, v)  # noqa: E731
    wanted = solve(T, start, Picard(), inputs=(v,), tolerance=stop, coupled=R.training)
    for name in ("steps", "converged", "nonfinite", "diverged"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    torch.testing.assert_close(got.value, wanted.value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.residual, wanted.residual, rtol=1e-8, atol=1e-12)
    assert all(torch.equal(value, before[key]) for key, value in R.state_dict().items())
    return got


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_networks_of_the_paper(name: str, train: bool) -> None:
    got = assert_as_by_modules(*network(name, train=train), None, tolerance())
    assert bool(got.converged.all())
    assert int(got.steps.min()) > 3


CASES = {
    **{str(norm): tolerance(norm, atol=1e-4, rtol=1e-3) for norm in (WorstPixel(), RMS(), Euclidean())},
    **{f"{most} steps": tolerance(atol=1e-6, max_steps=most) for most in (0, 1, 4)},
}


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_norms_relative_tolerances_starts_and_small_budgets(name: str, train: bool) -> None:
    R, v = tiny(late=train, train=train, batch=5)
    got = assert_as_by_modules(R, v, torch.randn_like(v), CASES[name])
    assert bool(got.converged.all()) == ("steps" not in name)


def test_where_it_overflows_the_best_iterate_is_kept() -> None:
    R, v = tiny(late=False, train=False)
    with torch.no_grad():
        for parameter in R.double().parameters():
            parameter.mul_(1e30)
    assert bool(assert_as_by_modules(R, v, torch.randn_like(v), tolerance()).nonfinite.all())


def test_images_stop_on_their_own() -> None:
    R, v = tiny(late=False, train=False, batch=4)
    R, v = R.double(), v.double() * torch.tensor([0.1, 1.0, 10.0, 100.0])[:, None, None, None]
    whole = latent_solve(R, v, tolerance=tolerance(atol=1e-4))
    assert len(set(whole.steps.tolist())) > 1
    alone = [latent_solve(R, one[None], tolerance=tolerance(atol=1e-4)).steps for one in v]
    assert torch.equal(torch.cat(alone), whole.steps)


def test_half_precision_is_for_products_alone() -> None:
    R, v = tiny(late=True, train=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = latent_solve(R, v, tolerance=tolerance(atol=1e-2))
    full = latent_solve(R, v, tolerance=tolerance(atol=1e-2))
    assert half.value.dtype == torch.float32
    assert half.value.is_contiguous(memory_format=torch.channels_last)
    assert 1e-4 < distance(half.value, full.value) < 2e-2


def test_what_the_kernel_does_not_know_is_refused() -> None:
    good, mixed, v = LatentResNet(16, 2, 0.5), LatentResNet(16, 2, 0.5), torch.randn(2, 16, 4, 4)
    mixed.blocks[0].eval()
    cases: list[tuple[str, tuple[Any, ...], Tolerance]] = [
        ("BatchNorm2d", (LatentResNet(16, 2, 0.5, batch_norm=False), v), tolerance()),
        ("at most 64 channels", (LatentResNet(80, 1, 0.5), torch.randn(2, 80, 4, 4)), tolerance()),
        ("one mode", (mixed, v), tolerance()),
        ("latent_form", (nn.Conv2d(16, 16, 3), v), tolerance()),
        ("v must be", (good, v[:, :8]), tolerance()),
        ("z0", (good, v, v[:1]), tolerance()),
        ("norm", (good, v), tolerance(OtherNorm())),
    ]
    for message, given, stop in cases:
        with pytest.raises(ValueError, match=message):
            latent_solve(*given, tolerance=stop)


def test_a_network_that_says_what_it_is_needs_no_form() -> None:
    form = LatentForm(outer=0.5, slope_after=0.1**2)
    assert describe(LatentResNet(16, 2, 0.5)) == form
    assert describe(nn.Linear(2, 2)) is None
    unfit: Any = LatentResNet(16, 2, 0.5, batch_norm=False)
    assert unfit.latent_form == form
    assert describe(unfit) is None


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("shared", [227 * 1024, 163 * 1024, 99 * 1024], ids=["H200", "A100", "small"])
def test_the_tile_of_a_solve_fits_into_shared_memory(name: str, shared: int) -> None:
    """And on an H200 it is the one that was fastest there."""
    sizes, pixels = sizes_of(*NETWORKS[name]), NETWORKS[name][1] * NETWORKS[name][2]
    hows: list[dict[str, bool]] = [{"coupled": True}, {"coupled": False}, {"coupled": False, "many": True}]
    tiles = {d: [tiled(sizes, pixels, d, shared, **how) for how in hows] for d in (torch.float32, torch.bfloat16)}
    for dtype, found in tiles.items():
        assert all(shared_memory(tile, dtype) * tile.places <= shared for tile in found)
    if shared == 227 * 1024:
        kept = {"cifar10": [True, True, True], "mnist": [True, False, False], "svhn": [False, False, False]}
        assert [tile.keep for tile in tiles[torch.bfloat16]] == kept[name]
        assert [tile.places for tile in tiles[torch.bfloat16]] == ([1, 1, 2] if name == "cifar10" else [1, 1, 1])
