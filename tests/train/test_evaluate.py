"""evaluate() and Scorer: the same figures, by the network itself and by programs that stand in for it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from banach import ConvergenceWarning, Tolerance
from banach.fast import CompiledNetwork, Plan, plan
from banach.train import evaluate, fit
from banach.train.evaluate import AT_A_TIME, Scorer
from train.parts_evaluate import FINE, assert_near, by_hand, in_double
from train.parts_train import images, network, plain_network, settings


@pytest.mark.parametrize("batch_size", [400, 7])
def test_the_figures_are_those_of_a_loop_by_hand(batch_size: int) -> None:
    tolerance = Tolerance(atol=1e-3, max_steps=9)
    net = plain_network(tolerance)
    assert_near(evaluate(net, images(60), batch_size=batch_size), by_hand(net, images(60), tolerance))


def test_on_a_cpu_a_scorer_is_the_network_bit_by_bit() -> None:
    net = network().train()
    assert evaluate(net, images(90), scorer=Scorer(net)) == evaluate(net, images(90))
    assert net.training
    x = images(20).normalise(images(20).pixels)
    torch.manual_seed(1)
    output, found = Scorer(net)(x)
    torch.manual_seed(1)
    own, wanted = net(x, solution=True)
    assert torch.equal(output, own)
    assert not output.requires_grad
    assert isinstance(found, type(wanted))
    assert torch.equal(found.residual, wanted.residual)


def test_an_r_that_the_kernels_know_gives_the_same_figures(made: list[CompiledNetwork], kernel: None) -> None:
    net = in_double()
    got = evaluate(net, images(60), scorer=Scorer(net))
    assert made[0].plan.kernel
    assert_near(got, by_hand(net, images(60), FINE))


@pytest.mark.parametrize("tolerance", [FINE, Tolerance(atol=1e-9, max_steps=10)], ids=["converged", "cut off"])
def test_an_r_that_they_do_not_know_takes_its_own_steps(
    made: list[CompiledNetwork], tolerance: Tolerance
) -> None:
    net = plain_network(tolerance)
    cut_off = pytest.warns(ConvergenceWarning, match="stopped at max_steps above the tolerance; try more")
    with nullcontext() if tolerance is FINE else cut_off:
        got = evaluate(net, images(60), scorer=Scorer(net))
    wanted = by_hand(net, images(60), tolerance)
    assert not made[0].plan.kernel
    assert got.accuracy == wanted.accuracy
    assert got.converged == wanted.converged
    assert got.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert got.depth is not None
    assert wanted.depth is not None
    assert got.depth == wanted.depth
    assert got.max_residual is not None
    assert wanted.max_residual is not None
    assert got.max_residual <= wanted.max_residual * (1 + 1e-9)


def test_a_network_in_bf16(made: list[CompiledNetwork]) -> None:
    net = network(tolerance=Tolerance(atol=3e-2, max_steps=20))
    got, wanted = (
        evaluate(net, images(60), precision="bf16", scorer=scorer) for scorer in (Scorer(net, "bf16"), None)
    )
    assert made[0].bf16
    assert got.loss == pytest.approx(wanted.loss, rel=2e-2)
    assert got.loss != evaluate(net, images(60)).loss
    assert Scorer(net.eval(), "bf16")(images(4).normalise(images(4).pixels))[0].dtype == torch.float32


def test_the_explicit_twin_has_no_residual(made: list[CompiledNetwork]) -> None:
    net: Any = network(explicit=True)
    got = evaluate(net, images(60), scorer=Scorer(net))
    assert len(made) == 1
    assert (got.depth, got.residual, got.converged) == (0.0, None, None)
    split = images(60)
    with torch.no_grad():
        v = net.eval().Q(split.normalise(split.pixels))
        output = net.S(net.R(torch.zeros_like(v), v))
    assert got.loss == pytest.approx(float(F.cross_entropy(output, split.labels)), rel=1e-5)


def sizes(net: Any, scorer: Scorer | None, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    own = Scorer.__call__

    def spy(self: Scorer, x: Tensor) -> Any:
        seen.append(len(x))
        return own(self, x)

    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "__call__", spy)
        evaluate(net, images(1100), batch_size=batch_size, scorer=scorer)
    return seen


@pytest.mark.usefixtures("made")
def test_programs_take_images_by_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    net = plain_network(Tolerance(atol=1e-2))
    assert sizes(net, Scorer(net), 400, monkeypatch) == [AT_A_TIME, AT_A_TIME, 1100 - 2 * AT_A_TIME]
    assert set(sizes(net, Scorer(net), 20, monkeypatch)[:-1]) == {256}
    assert sizes(net, Scorer(net, fast=False), 400, monkeypatch) == [400, 400, 300]
    assert sizes(net, None, 400, monkeypatch) == [400, 400, 300]


def test_a_scorer_of_something_else_is_refused() -> None:
    net = network()
    with pytest.raises(ValueError, match="another network"):
        evaluate(net, images(9), scorer=Scorer(network()))
    with pytest.raises(ValueError, match=r"in fp32, expected this one in bf16; make a Scorer\(net, 'bf16'\)"):
        evaluate(net, images(9), precision="bf16", scorer=Scorer(net))


@pytest.mark.parametrize("ema", [None, 0.5])
def test_fit_validates_by_one_program(
    made: list[CompiledNetwork], ema: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three epochs: the figures are those of a run whose validation goes through the network."""

    def eagerly(*args: Any, **options: Any) -> Plan:
        return plan(*args, **{**options, "refused": "simulated"})

    monkeypatch.setattr(sys.modules["banach.train.steps"], "plan", eagerly)
    made_so = settings(epochs=3, ema=ema)
    fast, plain = (
        fit(in_double(), images(), images(60, "validation"), replace(made_so, fast=fast)) for fast in (True, False)
    )
    assert len(made) == 1
    assert [epoch.loss for epoch in fast.epochs] == [epoch.loss for epoch in plain.epochs]
    for a, b in zip(fast.epochs, plain.epochs, strict=True):
        assert a.validation_loss == pytest.approx(b.validation_loss, rel=1e-6)
        assert a.validation_accuracy == b.validation_accuracy
        assert a.validation_converged == b.validation_converged == 1.0
