"""On a GPU: captured evaluations against those of the network itself, in both modes."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import Tolerance, data, models
from banach.data import Images
from banach.fast import plan
from banach.train import Totals, evaluate, fit
from banach.train.evaluate import Scorer, measure
from train.parts_train import images, network, plain_network, settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
NAMES = ["mnist", "digits", "own"]


def trained_a_little(name: str) -> Any:
    """So that scores are apart and statistics settled; `own`: an R that no kernel knows."""
    if name == "own":
        return plain_network(Tolerance(atol=1e-9, max_steps=100)).cuda()
    torch.manual_seed(0)
    net: Any = models.build(name, tolerance=Tolerance(atol=1e-3, max_steps=60)).cuda()
    split = some(name)
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(split.normalise(split.pixels)), split.labels).backward()
        optimizer.step()
    return net


def some(name: str, count: int = 90) -> Images:
    """Images of the network's size: digits, enlarged where it wants larger ones."""
    few = images(count).to("cuda")
    if name != "mnist":
        return few
    large = nn.functional.interpolate(few.pixels.float(), size=(28, 28))
    return replace(few, pixels=large.to(few.pixels.dtype))


def in_stages(net: Any) -> bool:
    return not plan(net.eval(), training=False).kernel


def assert_same(got: Totals, wanted: Totals, *, stages: bool) -> None:
    assert got.loss == pytest.approx(wanted.loss, rel=1e-3)
    assert got.accuracy == pytest.approx(wanted.accuracy, abs=2 / 90)
    assert got.converged == wanted.converged
    assert got.depth is not None
    assert wanted.depth is not None
    assert got.residual is not None
    assert wanted.residual is not None
    if stages:
        assert wanted.depth <= got.depth <= max(wanted.depth + 4, 8)
        assert got.residual <= wanted.residual * 1.01
    else:
        assert got.depth == pytest.approx(wanted.depth, abs=0.2)  # a residual near the tolerance
        assert got.residual == pytest.approx(wanted.residual, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_in_eval_mode(name: str) -> None:
    net, split = trained_a_little(name), some(name)
    scorer = Scorer(net)
    for _ in range(2):  # captured, then replayed with other weights
        assert_same(evaluate(net, split, scorer=scorer), evaluate(net, split), stages=in_stages(net))
        assert scorer.reason is None
        with torch.no_grad():
            for weight in net.S.parameters():
                weight.mul_(1.2)


@pytest.mark.parametrize("name", NAMES)
def test_in_training_mode(name: str) -> None:
    """The same masks by the same seed, one update of the statistics a batch, nothing from the capture itself."""
    net, split = trained_a_little(name).train(), some(name)
    other = copy.deepcopy(net)
    scorer, plain = Scorer(net), Scorer(other, fast=False)
    for seed in (3, 4):
        got, wanted = (measure(one, split, 40, partial(torch.manual_seed, seed)) for one in (scorer, plain))
        assert got.loss == pytest.approx(wanted.loss, rel=2e-3)
        assert got.accuracy == pytest.approx(wanted.accuracy, abs=2 / 90)
        assert got.converged == wanted.converged == 1
        assert got.depth == pytest.approx(wanted.depth, abs=1)  # a batch stops as one
        for (key, value), own in zip(net.named_buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(value, own, rtol=5e-3, atol=5e-3, msg=key)
    assert scorer.reason is None
    assert (scorer._made[True][1] is not None) == bool(plan(net).kernel)


def test_a_changed_tolerance_is_captured_anew() -> None:
    net, split = trained_a_little("digits"), some("digits")
    scorer, depths = Scorer(net), []
    for atol in (1e-1, 1e-3, 1e-1):
        net.tolerance = Tolerance(atol=atol, max_steps=60)
        totals = evaluate(net, split, scorer=scorer)
        assert_same(totals, evaluate(net, split), stages=in_stages(net))
        depths.append(totals.max_depth or 0)
    assert depths[0] == depths[2]
    assert depths[0] < depths[1]


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_other_precisions(precision: str) -> None:
    net, split = trained_a_little("digits"), some("digits")
    net.tolerance = Tolerance(atol=3e-2, max_steps=60)
    got = evaluate(net, split, precision=precision, scorer=Scorer(net, precision))
    assert got.loss == pytest.approx(evaluate(net, split, precision=precision).loss, rel=2e-2)


@pytest.mark.parametrize("ema", [None, 0.5])
def test_fit_validates_as_without_captures(ema: float | None) -> None:
    net = network(tolerance=Tolerance(atol=1e-4, max_steps=60))
    held = images(80, "validation")
    history = fit(net, images(), held, settings(device="cuda", epochs=3, ema=ema))
    wanted = evaluate(net, held.to("cuda"))
    assert history.last.validation_loss == pytest.approx(wanted.loss, rel=1e-3)
    assert history.last.validation_converged == wanted.converged


class Asks(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y * float(y.abs().max().item() < 1e9)


def test_a_network_that_syncs_with_host_is_evaluated_plainly() -> None:
    net = trained_a_little("own")
    net.S = nn.Sequential(net.S, Asks())
    split, scorer = some("own"), Scorer(net)
    with pytest.warns(UserWarning, match="evaluation could not be captured"):
        got = evaluate(net, split, scorer=scorer)
    wanted = evaluate(net, split)
    assert got.loss == pytest.approx(wanted.loss)
    assert got.depth == evaluate(net, split, scorer=scorer).depth == wanted.depth


def test_the_released_protocol_repeats() -> None:
    from reproduction.measure import released

    net, split = trained_a_little("digits"), data.load("digits", "train").to("cuda")
    scorer = Scorer(net)
    before = torch.cuda.get_rng_state(), [buffer.clone() for buffer in net.buffers()]
    found = {released(net, split, scorer).accuracy for _ in range(3)}
    assert len(found) == 1
    assert found.pop() == pytest.approx(released(net, split, Scorer(net, fast=False)).accuracy, abs=3 / len(split))
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), before[1], strict=True))
