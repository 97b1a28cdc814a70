"""The contenders of the training-step benchmark, tiny on a CPU: they take the same step where they must."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu import points
from benchmarks.gpu.measure import QUICK, trained
from benchmarks.gpu.peers import contenders
from benchmarks.gpu.step import Setting, Step
from torch import Tensor

from gpu_parts import (
    CPU,
    LOOSE,
    TIGHT,
    batch,
    needs_torchdeq,
    one_thread,  # noqa: F401 - a fixture that every test here uses
    still,
)


def gradient(step: Step) -> Tensor:
    parameters = list(step.net.parameters())
    assert all(p.grad is not None for p in parameters)
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


def by_hand(steps: int, *, recorded: int = 1) -> tuple[Tensor, Tensor]:
    """Loss and gradient of S(R(..R(u, v)..)) with so many recorded passes after `steps` that are not."""
    net = still("banach-eager").net
    images, labels = batch()
    v = net.Q(images)
    u = torch.zeros_like(v)
    with torch.no_grad():
        for _ in range(steps):
            u = net.R(u, v)
    for _ in range(recorded):
        u = net.R(u, v)
    loss = F.cross_entropy(net.S(u), labels, label_smoothing=0.1)  # as the digits recipe has it
    return loss.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "banach-eager",
        pytest.param("torchdeq", marks=needs_torchdeq),
        pytest.param("torchdeq-euclidean", marks=needs_torchdeq),
    ],
)
def test_those_that_solve_take_the_same_step(name: str) -> None:
    step = still(name)
    loss = step.gradients(*batch())
    expected, grad = by_hand(100)
    assert float(loss) == pytest.approx(float(expected), abs=1e-9)
    assert torch.allclose(gradient(step), grad, atol=1e-8)
    assert 10 < step.depth() < 100
    assert step.residual() <= TIGHT.eps


@pytest.mark.parametrize("name", ["unroll", "unroll-checkpoint"])
def test_unrolling_is_the_gradient_of_the_whole_loop(name: str) -> None:
    step = still(name, depth=7)
    loss = step.gradients(*batch())
    expected, grad = by_hand(0, recorded=8)
    assert float(loss) == pytest.approx(float(expected), abs=1e-12)
    assert torch.allclose(gradient(step), grad, atol=1e-12)
    assert step.depth() == 7
    assert step.passes(7) == (8, 8)
    assert step.products(7) == 7


def test_the_explicit_twin_solves_nothing() -> None:
    step = still("explicit")
    loss = step.gradients(*batch())
    expected, grad = by_hand(0)
    assert float(loss) == pytest.approx(float(expected), abs=1e-12)
    assert torch.allclose(gradient(step), grad, atol=1e-12)
    assert step.depth() == 0
    assert math.isnan(step.residual())


@pytest.mark.parametrize("name", ["plain", pytest.param("torchdeq", marks=needs_torchdeq)])
def test_the_same_test_stops_at_the_same_step(name: str) -> None:
    for seed in range(3):
        theirs, ours = still(name, LOOSE), still("banach-eager", LOOSE)
        theirs.gradients(*batch(seed))
        ours.gradients(*batch(seed))
        assert theirs.depth() == ours.depth() > 2
        assert theirs.residual() == pytest.approx(ours.residual(), rel=1e-9)


@needs_torchdeq
def test_the_norm_of_a_sample_stops_later_never_earlier() -> None:
    sample, pixel = still("torchdeq-euclidean", LOOSE), still("torchdeq", LOOSE)
    sample.gradients(*batch())
    pixel.gradients(*batch())
    assert sample.depth() > pixel.depth()
    assert sample.residual() < pixel.residual() <= LOOSE.eps


def test_the_plain_loop_computes_Q_twice() -> None:
    step = still("plain", LOOSE)
    calls = []
    step.net.Q.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    step(*batch())
    assert calls == [False, True]


def test_a_step_moves_the_weights_as_adam_with_the_recipes_rates_does() -> None:
    step = still("plain")
    weight = step.net.S.linear.weight
    before = weight.detach().clone()
    step(*batch())
    recipe = TIGHT.recipe
    grad = weight.grad + recipe.weight_decay * before  # the first step of Adam: lr * sign, up to its eps
    assert torch.allclose(weight, before - recipe.lr * grad / (grad.abs() + 1e-8))


def test_contenders_go_on_from_one_network_without_sharing_it() -> None:
    setting = Setting(LOOSE, "fp32", CPU)
    images = points.feed(LOOSE, CPU, many=2)
    start = trained(LOOSE, iter(images), CPU, QUICK)
    weights, optimizer = copy.deepcopy(start.warm)
    first, second = (contenders()["plain"].build(setting, start.warm) for _ in range(2))
    first(*images.batches[0])
    first(*images.batches[1])
    for name, value in second.net.state_dict().items():
        assert torch.equal(value, weights[name])
    moments = second.optimizer.state_dict()["state"]
    assert all(torch.equal(moments[k]["exp_avg"], optimizer["state"][k]["exp_avg"]) for k in moments)
    assert moments[0]["step"] == QUICK.warm_up
    assert first.optimizer.state_dict()["state"][0]["step"] == QUICK.warm_up + 2


def test_in_bf16_no_gradient_is_lost() -> None:
    for name, contender in contenders().items():
        if contender.missing() is not None:
            continue
        step = contender.build(Setting(LOOSE, "bf16", CPU, 3))
        images, labels = batch()
        step(images.float(), labels)
        assert all(p.grad is not None for p in step.net.parameters()), name
