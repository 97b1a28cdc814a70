"""latent_solve without a GPU: what a network says of itself, refusals, tiles."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.kernels.latent import LatentForm, describe, latent_solve, shared_memory, sizes_of, tiled
from banach.models.blocks import LatentResNet
from banach.solve import RMS, Tolerance
from kernels.cases import NETWORKS, network, tolerance


class OtherNorm(RMS):
    pass


def by_form(R: Any, u: Tensor, v: Tensor) -> Tensor:
    """R(u, v) by the formula of `LatentForm`."""
    form = R.latent_form
    x = v + form.inner * u
    for block in R.blocks:
        y = block.conv2(F.leaky_relu(block.conv1(x), form.slope))
        y = F.leaky_relu(x + y, form.slope_after) if form.late else x + F.leaky_relu(y, form.slope_after)
        x = block.norm(y)
    return form.outer * x


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_form_that_a_latent_map_declares_is_what_it_computes(name: str, train: bool) -> None:
    """The kernel that iterates R goes by this form."""
    R, v = network(name, train=train)
    R, v = R.double(), v.double()
    assert describe(R) is not None
    u = torch.randn_like(v)
    torch.testing.assert_close(by_form(R, u, v), R(u, v))


def test_what_the_kernel_does_not_know_is_refused() -> None:
    good, mixed, v = LatentResNet(16, 2, 0.5), LatentResNet(16, 2, 0.5), torch.randn(2, 16, 4, 4)
    mixed.blocks[0].eval()
    cases: list[tuple[str, tuple[Any, ...], Tolerance]] = [
        ("LatentForm", (LatentResNet(16, 2, 0.5, batch_norm=False), v), tolerance()),
        ("LatentForm", (LatentResNet(80, 1, 0.5), torch.randn(2, 80, 4, 4)), tolerance()),
        ("one mode", (mixed, v), tolerance()),
        ("LatentForm", (nn.Conv2d(16, 16, 3), v), tolerance()),
        ("v must be", (good, v[:, :8]), tolerance()),
        ("not empty", (good, v[:0]), tolerance()),
        ("in torch.float64", (good, v.double()), tolerance()),
        ("z0", (good, v, v[:1]), tolerance()),
        ("norm", (good, v), tolerance(OtherNorm())),
    ]
    for message, given, stop in cases:
        with pytest.raises(ValueError, match=message):
            latent_solve(*given, tolerance=stop)


class OtherForward(LatentResNet):
    """Inherits what its parent says of itself, and computes something else."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * super().forward(u, v) + 1


class DoubledConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def altered(how: str) -> Any:
    R: Any = (OtherForward if how == "another forward" else LatentResNet)(16, 2, 0.5, batch_norm=how != "no norm")
    conv1 = R.blocks[0].conv1
    if how == "a hook":
        conv1.register_forward_hook(lambda module, given, out: 2 * out)
    elif how == "another conv":
        R.blocks[0].conv1 = DoubledConv(16, 16, 3, padding=1)
    elif how == "a parametrisation":
        nn.utils.parametrizations.weight_norm(conv1)
    return R


@pytest.mark.parametrize("how", ["no norm", "another forward", "a hook", "another conv", "a parametrisation"])
def test_an_R_that_computes_something_else_than_its_class_says_has_no_form(how: str) -> None:
    assert describe(altered("nothing")) == LatentForm(outer=0.5, slope_after=0.1**2)
    assert describe(altered(how)) is None
    assert describe(nn.Linear(2, 2)) is None


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
