"""The test protocol of the released code, against a plain loop."""

import copy
import math
import weakref
from typing import Any

import pytest
import torch

from banach import Tolerance, data, models
from banach.data import Batches, Crop, paper_cifar10
from banach.train import Scorer
from reproduction import jobs
from reproduction.measure import BATCH, FINE, Measure, released


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


def test_one_batch_of_images_is_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole test set, normalised, was in memory."""
    split, net, held = data.load("digits", "train"), fresh_network(), list[Any]()
    make = Batches.make

    def made(*arguments: Any) -> Any:
        batch = make(*arguments)
        held.append(weakref.ref(batch[0]))
        assert sum(one() is not None for one in held) <= 2, "the last one is in use until the next is made"
        return batch

    monkeypatch.setattr(Batches, "make", made)
    released(net, split, Scorer(net))
    assert len(held) == math.ceil(len(split) / BATCH) > 3


def test_test_images_are_augmented_where_the_released_code_does_so() -> None:
    assert jobs.get("cifar10-jfb-seed0").released_augmentation == paper_cifar10()
    for name in ("resnet56-seed0", "mnist-jfb-seed0", "svhn-jfb-decayed-seed0"):
        assert jobs.get(name).released_augmentation is None


def test_the_second_tolerance_replaces_a_relative_one_too() -> None:
    """A recipe with a relative tolerance of 1e-2 was evaluated at that twice, and the records said 1e-4."""
    split, net = data.load("digits", "train").subset(100), fresh_network().eval()
    net.tolerance = Tolerance(atol=0, rtol=0.1)
    found = Measure(jobs.Job(name="rtol", settings=jobs.settings("digits")), net, split, split).final(1)
    assert found["fine"]["max_residual"] <= FINE < found["clean"]["max_residual"]
