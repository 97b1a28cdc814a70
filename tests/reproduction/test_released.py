"""The authors' way: CG by dense algebra, R scaled down, batches skipped; their test protocol by a plain loop."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from banach import Euclidean, Implicit, Tolerance, data, models
from banach.data import Batches, Crop, paper_cifar10
from banach.train import Scorer
from reproduction import jobs
from reproduction.measure import BATCH, released
from reproduction.released import SCALED, SKIPPED, Adjoints, ReleasedCG, as_released, scale_down


def released_w(atol: float) -> tuple[Any, Any, Any]:
    """Return A = I - B', g and the released w of A w = g, for three samples with matrices B of their own."""
    torch.manual_seed(0)
    B = 0.4 * torch.randn(3, 5, 5, dtype=torch.float64) / 5**0.5
    c = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    z = torch.linalg.solve(torch.eye(5, dtype=torch.float64) - B, c.detach()[..., None])[..., 0]
    g = torch.randn(3, 5, dtype=torch.float64)
    limits = Tolerance(atol=atol, rtol=0, max_steps=50, norm=Euclidean())
    mode = Implicit(ReleasedCG(), limits, report=lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loose tolerance is missed
        value = mode.attach(lambda z, c: torch.bmm(B, z[..., None])[..., 0] + c, z, (c,))
        w = torch.autograd.grad(value, c, g)[0]  # dT/dc = I, so this is w itself
    return torch.eye(5, dtype=torch.float64) - B.mT, g, w


def test_cg_as_released_by_dense_algebra() -> None:
    A, g, w = released_w(1e-12)
    torch.testing.assert_close(w, torch.linalg.solve(A, g[..., None])[..., 0])
    N, right = A.mT @ A, A.mT @ g[..., None]
    r = right - N @ right
    once = right + r * (r.mT @ r) / (r.mT @ N @ r)
    torch.testing.assert_close(released_w(1e9)[2], once[..., 0])  # one step at any tolerance


def network(name: str = "digits", **limits: Any) -> Any:
    torch.manual_seed(0)
    net: Any = models.build(name, batch_norm=False)
    tolerance = replace(Tolerance(atol=0.1, rtol=0, max_steps=50, norm=Euclidean()), **limits)
    net.backward = Implicit(ReleasedCG(), tolerance, report=Adjoints())
    return net.train()


@pytest.mark.parametrize("name", ["digits", "mnist"])  # one block, two blocks
def test_convolutions_shrink_by_the_gain_of_r_on_noise(name: str) -> None:
    R, fresh = network(name).R, network(name).R
    channels = R.blocks[0].conv1.in_channels
    v = torch.randn(4, channels, 6, 6)
    torch.manual_seed(5)
    assert scale_down(R, v)
    torch.manual_seed(5)
    noise = torch.randn(4, channels, 6, 6)
    there = v + torch.randn(4, channels, 6, 6)
    with torch.no_grad():
        moved = fresh(noise, there) - fresh(0 * noise, there)
    factor = (fresh.gamma * noise.norm(dim=1).mean() / moved.norm(dim=1).mean()) ** (1 / len(R.blocks))
    assert 0 < factor < 1
    for key, value in R.state_dict().items():
        torch.testing.assert_close(value, factor * fresh.state_dict()[key])


def test_an_r_with_a_small_gain_is_kept() -> None:
    """R for CIFAR-10, with initial weights: its activations come last and shrink noise."""
    R = network("cifar10").R
    before = copy.deepcopy(R.state_dict())
    assert not scale_down(R, torch.randn(4, 35, 6, 6))
    assert all(torch.equal(value, before[key]) for key, value in R.state_dict().items())


def step(net: Any, optimizer: torch.optim.Optimizer) -> None:
    draw = torch.Generator().manual_seed(1)
    d, y = torch.randn(8, 1, 8, 8, generator=draw), torch.arange(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        F.cross_entropy(net(d), y).backward()
    optimizer.step()


@pytest.mark.parametrize("enough", [True, False])
def test_a_batch_whose_equations_are_not_solved_is_skipped(enough: bool) -> None:
    net = network(**({"max_steps": 200} if enough else {"atol": 1e-7, "max_steps": 1}))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    before = copy.deepcopy(dict(net.named_parameters()))
    with as_released(net):
        step(net, optimizer)
    moved = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    scaled = {name for name in before if name.startswith("R.") and "conv" in name}
    assert moved == (set(before) if enough else scaled)  # those are scaled before the solve
    assert bool(optimizer.state) == enough
    assert (net.backward.report[SCALED], net.backward.report[SKIPPED]) == (1, 0 if enough else 1)


def test_nothing_is_scaled_in_evaluation_or_with_batch_norm() -> None:
    net, normed = network(), models.build("digits").train()
    normed.backward = net.backward  # type: ignore[union-attr, assignment]
    d = torch.randn(4, 1, 8, 8)
    for one in (net, normed):
        before = copy.deepcopy(dict(one.R.named_parameters()))  # type: ignore[union-attr, arg-type]
        with as_released(one):
            one.train(one is normed)
            one(d)
        assert all(torch.equal(p, before[key]) for key, p in one.R.named_parameters())  # type: ignore[union-attr]
    assert net.backward.report[SCALED] == 0


class Broken(torch.autograd.Function):
    """The identity with a NaN derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * float("nan")


@pytest.mark.parametrize("part", ["R", "S"])  # the Jacobian, or the cotangent
def test_a_batch_with_nan_is_skipped(part: str) -> None:
    net = network()
    before = copy.deepcopy(net.S.state_dict())
    getattr(net, part).register_forward_hook(lambda module, inputs, out: Broken.apply(out))
    with as_released(net):
        step(net, torch.optim.SGD(net.parameters(), lr=1e-2))
    assert net.backward.report[SKIPPED] == 1
    assert all(torch.equal(value, before[key]) for key, value in net.S.state_dict().items())


def test_other_networks_and_later_steps_are_not_touched() -> None:
    net, other = network(atol=1e-7, max_steps=1), torch.nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    before = other.weight.detach().clone()
    net.backward.method.met = False
    with as_released(net):
        torch.optim.SGD(other.parameters(), lr=1.0).step()
    torch.testing.assert_close(other.weight.detach(), before - 1)
    weight = net.R.blocks[0].conv1.weight
    before = weight.detach().clone()
    step(net, torch.optim.SGD(net.parameters(), lr=1e-2))  # outside of the context
    torch.testing.assert_close(weight.detach(), before - 1e-2 * weight.grad)
    assert net.backward.report[SKIPPED] == net.backward.report[SCALED] == 0


def fresh_network() -> Any:
    torch.manual_seed(3)
    return models.build("digits")


@pytest.mark.parametrize("augment", [None, Crop(3)])
def test_the_released_protocol_is_that_of_a_loop_and_leaves_no_trace(augment: Any) -> None:
    split, net = data.load("digits", "train"), fresh_network().eval()
    assert len(split) > 2 * BATCH
    state, before = torch.get_rng_state(), copy.deepcopy(net.state_dict())
    found = released(net, split, Scorer(net), augment=augment, epoch=2).accuracy
    assert torch.equal(torch.get_rng_state(), state)
    assert not net.training
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    hits, again = 0, fresh_network().train()
    torch.manual_seed(0)
    with torch.no_grad():
        for x, y in Batches(split, BATCH, augment=augment, shuffle=False).epoch(2):
            hits += int((again(x).argmax(1) == y).sum())
    assert found == pytest.approx(hits / len(split))


def test_test_images_are_augmented_where_the_released_code_does_so() -> None:
    assert jobs.get("cifar10-jfb-seed0").released_augmentation == paper_cifar10()
    for name in ("resnet56-seed0", "mnist-jfb-seed0", "svhn-jfb-decayed-seed0"):
        assert jobs.get(name).released_augmentation is None
