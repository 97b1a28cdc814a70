"""Jobs: the two protocols by hand, what a callback sees, and programs in the place of the network."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from banach import data, models
from banach.data import Batches, Crop, paper_cifar10
from banach.paper import Options, table1
from banach.paper.jobs import CURVE, RELEASED_BATCH, Continued, Job, carry_out, released_accuracy, settings_for
from banach.solve import Tolerance
from banach.train import Epoch, evaluate
from banach.train.evaluate import Scorer
from fast.simulated import simulate_gpu


def options_in(folder: Path) -> Options:
    return Options(quick=True, device="cpu", out=folder / "out", runs=folder / "runs")


def job(name: str = "tiny", **changes: Any) -> Job:
    settings = settings_for("digits", data="digits", epochs=2, subset=96, monitor=False)
    return Job(name=name, data="digits", model="digits", settings=settings, subset=96, **changes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were a GPU whose kernels know R: their plain twin takes their place."""
    simulate_gpu(monkeypatch, kernels=True)


def network() -> Any:
    torch.manual_seed(3)
    return models.build("digits")


def released_by_hand(net: Any, split: Any) -> float:
    """Training mode, images in their order by 400, dropout from the seed 0."""
    net.train()
    torch.manual_seed(0)
    hits = 0
    with torch.no_grad():
        for first in range(0, len(split), 400):
            few = slice(first, first + 400)
            hits += int((net(split.normalise(split.pixels[few])).argmax(1) == split.labels[few]).sum())
    return hits / len(split)


def test_the_released_protocol_is_that_of_a_loop_by_hand() -> None:
    split = data.load("digits", "train")
    assert len(split) > 2 * RELEASED_BATCH
    assert released_accuracy(network(), split) == released_by_hand(network(), split)


def test_test_images_are_augmented_where_the_released_code_does_so() -> None:
    """On CIFAR-10, like those of the training, and for every epoch anew."""
    cifar, resnet = (replace(s, seeds=1) for s in (table1.CIFAR10, table1.RESNET))
    assert cifar.job("a").released_augment == paper_cifar10()
    assert resnet.job("b").released_augment is table1.MNIST.job("c").released_augment is None
    assert table1._decayed(table1.SVHN).job("d").released_augment is None
    net, split, shift = network(), data.load("digits", "test"), Crop(3)
    found = [released_accuracy(net, split, augment=shift, epoch=epoch) for epoch in (1, 2)]
    assert found[0] != found[1]
    again = network().train()
    torch.manual_seed(0)
    hits = 0
    with torch.no_grad():
        for x, y in Batches(split, RELEASED_BATCH, augment=shift, shuffle=False).epoch(2):
            hits += int((again(x).argmax(1) == y).sum())
    assert found[1] == pytest.approx(hits / len(split))


@pytest.mark.usefixtures("gpu")
def test_a_program_in_its_place_answers_the_same() -> None:
    net, split = network(), data.load("digits", "train")
    scorer = Scorer(net)
    got = [released_accuracy(net, split, scorer) for _ in range(2)]
    assert scorer._made[True][1] is not None
    assert got[0] == got[1] == pytest.approx(released_by_hand(network(), split), abs=2 / len(split))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fast", [True, False])
def test_the_released_protocol_leaves_no_trace(training: bool, fast: bool, request: pytest.FixtureRequest) -> None:
    if fast:
        request.getfixturevalue("gpu")
    net = network().train(training)
    state, before = torch.get_rng_state(), {key: value.clone() for key, value in net.state_dict().items()}
    released_accuracy(net, data.load("digits", "test"), Scorer(net))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert net.training == training


def test_a_callback_sees_every_epoch_that_is_trained(tmp_path: Path) -> None:
    options, seen = options_in(tmp_path), []

    def on_epoch(epoch: Epoch, net: torch.nn.Module) -> None:
        points = json.loads((options.runs / "tiny" / CURVE).read_text())
        accuracy = evaluate(net, data.load("digits", "test")).accuracy
        seen.append((epoch.epoch, net.training, len(points), points[-1]["clean"] == accuracy))

    outcome = carry_out(job(), options, on_epoch)
    assert all(
        point.keys() == {"epoch", "seconds", "warm_up", "clean", "converged"} for point in outcome.curve
    )  # not asked for more
    assert math.isnan(outcome.released)
    assert seen == [(1, False, 1, True), (2, False, 2, True)]
    again = carry_out(job(), options, on_epoch)
    assert len(seen) == 2  # read, not trained
    assert again.curve == outcome.curve
    assert again.clean == outcome.clean


@pytest.mark.usefixtures("gpu")
def test_another_tolerance_is_noticed(tmp_path: Path) -> None:
    outcome = carry_out(job(), options_in(tmp_path))
    test, net = data.load("digits", "test"), outcome.net
    for atol in (1e-2, 1e-5):
        tolerance = Tolerance(atol=atol, max_steps=80)
        got = outcome.at(tolerance, test)
        other = replace(job(), tolerance=tolerance).build()
        other.load_state_dict(net.state_dict())
        wanted = evaluate(other, test)
        assert got.depth == pytest.approx(wanted.depth, abs=0.05)
        assert got.loss == pytest.approx(wanted.loss, rel=1e-4)
        assert got.converged == 1
    assert net.tolerance == models.recipe("digits").tolerance


def test_with_and_without_programs_a_study_has_one_curve(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    plain = carry_out(job("plain"), options_in(tmp_path), released=True)
    request.getfixturevalue("gpu")
    fast = carry_out(job("fast"), options_in(tmp_path), released=True)
    assert fast.scorer._made.keys() == {True, False}
    assert fast.clean.loss == pytest.approx(plain.clean.loss, rel=1e-4)
    for a, b in zip(fast.curve, plain.curve, strict=True):
        assert a["clean"] == pytest.approx(b["clean"], abs=1 / 360)
        assert a["released"] == pytest.approx(b["released"], abs=1 / 360)


def test_a_continued_job_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    options, before = options_in(tmp_path), job("before")
    stay = replace(before.settings, lr=0.0, weight_decay=0.0)
    later = Continued(**vars(job("later")) | {"settings": stay}, after=before)
    found, other = (dict(carry_out(one, options).net.named_parameters()) for one in (later, before))
    assert all(torch.equal(value, other[name]) for name, value in found.items())
    fresh = dict(later.build().named_parameters())
    assert not all(torch.equal(value, other[name]) for name, value in fresh.items())
    assert "after=Job(name='before'" in repr(later)  # which is how a record knows it
