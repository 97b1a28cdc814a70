"""The authors' way: their CG by dense algebra, their test protocol by a plain loop."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from banach import Euclidean, Implicit, Tolerance, data, models
from banach.data import Batches, Crop, paper_cifar10
from banach.train import Scorer
from reproduction import jobs
from reproduction.measure import BATCH, released
from reproduction.table2 import ReleasedCG


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
