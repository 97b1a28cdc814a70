"""compile(net) where Q(d), the latent or the output is a tuple or a dict of tensors: as for one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import banach
from banach import Anderson, ConvergenceWarning, ImplicitNetwork, Picard, Tolerance, models
from banach.models.mdeq import Sizes, multiscale
from banach.train import Scorer
from fast.simulated import images
from fast.test_inference import BAD, GOOD, RELATIVE, SLOPES, TIGHT, check_same, device, network, slope  # noqa: F401

DIVERGING = torch.tensor([[0.5], [3.0], [0.9], [-2.5], [0.1]]).repeat(1, 3)  # slopes: the second and the fourth


def pair(fine: Tensor, coarse: Tensor) -> Any:
    return fine, coarse


def scales(fine: Tensor, coarse: Tensor) -> Any:
    return {"fine": fine, "coarse": coarse}


def nested(make: Callable[[Tensor, Tensor], Any], **options: Any) -> ImplicitNetwork:
    """Two scales: fine <- s fine + 1 and coarse <- coarse / 2 + mean(fine); the output is fine + coarse."""

    def parts(u: Any) -> Any:
        return (u["fine"], u["coarse"]) if isinstance(u, dict) else u

    def R(u: Any, v: Any) -> Any:
        fine, coarse = parts(u)
        return make(parts(v)[0] * fine + 1, coarse / 2 + fine.mean(1, keepdim=True))

    return network(R, lambda d: make(d, d), lambda u: parts(u)[0] + parts(u)[1], **options)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("make", [pair, scales])
@pytest.mark.parametrize("solver", [Picard(damping=0.1), Anderson(3)])
def test_a_latent_of_several_tensors(make: Any, solver: Any) -> None:
    """In batches of several sizes, the first two in one graph; a start may list its keys in any order."""
    net = nested(make, solver=solver, tolerance=TIGHT)
    fast = banach.compile(net)
    for d in (SLOPES, SLOPES[:5], SLOPES[2:5], SLOPES[:1]):
        y, found = check_same(net, d, fast=fast)
        torch.testing.assert_close(y, 3 / (1 - d), rtol=1e-6, atol=0)
        assert type(found.value) is type(make(d, d))
    kept = fast(SLOPES, solution=True)[1].value
    fast(SLOPES.flip(0))
    torch.testing.assert_close(kept, net(SLOPES, solution=True)[1].value)  # not overwritten by the next call
    warm = check_same(net, SLOPES, kept, fast=fast)[1]
    assert int(warm.steps.max()) <= 2
    if make is scales:
        check_same(net, SLOPES, dict(reversed(kept.items())), fast=fast)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("make", [pair, scales])
def test_diverging_samples_of_such_a_latent_keep_their_best_iterate(make: Any) -> None:
    net = nested(make, tolerance=RELATIVE)
    for z0 in (None, make(0.1 * DIVERGING, torch.ones(5, 3))):
        y, found = check_same(net, DIVERGING, z0)
        assert found.status == (GOOD, BAD, GOOD, BAD, GOOD)
        assert y.isfinite().all()


@pytest.mark.usefixtures("device")
def test_a_nest_may_be_the_latent_alone_or_the_output() -> None:
    def two(v: Tensor) -> Any:
        return {"a": torch.zeros_like(v), "b": v.new_zeros(len(v))}

    def R(u: Any, v: Tensor) -> Any:
        return {"a": slope(u["a"], v), "b": u["b"] / 2 + u["a"].mean(1)}

    y, _ = check_same(network(R, start=two, tolerance=TIGHT), SLOPES)
    torch.testing.assert_close(y, {"a": 1 / (1 - SLOPES), "b": 2 / (1 - SLOPES[:, 0])}, rtol=1e-6, atol=0)


def check_two_scales(name: str, place: str) -> None:
    """A real network with a tuple as latent answers as it does itself, and its evaluation need not run eagerly."""
    torch.manual_seed(0)
    net = multiscale((1, 8, 8), 10, Sizes((8, 16), (2, 4), 8, 0.25))
    net.tolerance = Tolerance(max_steps=6, check_every=0)
    if name == "mon-tiers":
        parts = models.mon_tiers((1, 8, 8), channels=(4, 8, 8), alpha=2.0)
        net = ImplicitNetwork(*parts, tolerance=Tolerance(atol=1e-7, max_steps=500))
    net, d = net.double().eval().to(place), images(5).to(place)
    scorer = Scorer(net)
    for x in (d, d[:3].flip(0)):
        y, found = check_same(net, x)
        torch.testing.assert_close(scorer(x)[0], y)
        check_same(net, x, found.value)
    assert scorer.reason is None
    assert scorer.captures(d.device) == bool(banach.compile(net).plan.graph)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", ["mdeq", "mon-tiers"])
def test_networks_of_several_scales(name: str) -> None:
    check_two_scales(name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mdeq", "mon-tiers"])
def test_captured_networks_of_several_scales(name: str) -> None:
    check_two_scales(name, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("make", [pair, scales])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_captured_latents_of_several_tensors_with_samples_that_diverge(make: Any, dtype: torch.dtype) -> None:
    """By fused steps in float32, without kernels in float64."""
    net = nested(make, tolerance=RELATIVE)
    net.register_parameter("weight", nn.Parameter(torch.zeros(1, dtype=dtype)))  # says where the network is
    fast, d = banach.compile(net.cuda()), DIVERGING.to("cuda", dtype)
    assert fast.plan.graph
    for z0 in (None, make(0.1 * d, torch.ones_like(d))):
        y, found = fast(d, z0=z0, solution=True)
        with pytest.warns(ConvergenceWarning):
            own, wanted = net(d, z0=z0, solution=True)
        torch.testing.assert_close(y, own, rtol=1e-2, atol=1e-2)
        assert found.status == wanted.status
        torch.testing.assert_close(found.value, wanted.value, rtol=1e-2, atol=1e-2)
