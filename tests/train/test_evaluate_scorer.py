"""Scorer: when graphs replace the network, when they are made again, and when not at all."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import Anderson, ConvergenceWarning, Euclidean, ImplicitNetwork, Neumann, Picard, Tolerance, Unroll
from banach.fast import CompiledNetwork, FastNetwork
from banach.train import evaluate
from banach.train.evaluate import Scorer, measure
from train.parts_evaluate import FINE, assert_near, by_hand, digits, in_double
from train.parts_train import images, network, plain_network


def test_one_program_serves_while_weights_change_in_place(made: list[CompiledNetwork]) -> None:
    net = in_double()
    scorer = Scorer(net)
    first = evaluate(net, images(60), scorer=scorer)
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(1.1)
    second = evaluate(net, images(60), scorer=scorer)
    assert len(made) == 1
    assert second.loss != first.loss
    assert second.loss == pytest.approx(by_hand(net, images(60), FINE).loss, rel=1e-6)


def other_r(net: Any) -> None:
    net.R = type(net.R)(24, blocks=1, gamma=0.2).double()


def other_place(net: Any) -> None:
    weight = net.S.linear.weight
    weight.data = weight.data.clone()


def other_s(net: Any) -> None:
    net.S = nn.Sequential(*net.S)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "tolerance", Tolerance(atol=1e-2)),
        lambda net: setattr(net, "solver", Picard(damping=0.1)),
        lambda net: setattr(net, "start", lambda v: v),
        other_r,
        other_place,
        other_s,
    ],
    ids=["tolerance", "solver", "start", "R", "place of a weight", "S"],
)
def test_what_a_capture_would_hold_is_captured_anew(made: list[CompiledNetwork], change: Any) -> None:
    net = digits()
    scorer = Scorer(net.eval())
    x = images(9).normalise(images(9).pixels).double()
    scorer(x)
    scorer(x)
    assert len(made) == 1
    change(net)
    net.eval()
    output = scorer(x)[0]
    assert len(made) == 2
    torch.testing.assert_close(output, net(x), rtol=1e-2, atol=1e-2)


class Doubled(ImplicitNetwork):
    def forward(self, *args: Any, **options: Any) -> Any:
        y, found = super().forward(*args, solution=True)
        return (2 * y, found) if options.get("solution") else 2 * y


def doubled() -> ImplicitNetwork:
    net = plain_network()
    return Doubled(net.Q, net.R, net.S, tolerance=net.tolerance)


def unsettled() -> Any:
    """Batch norm without running statistics: even in eval mode a sample depends on the others."""
    net: Any = network()
    for module in net.R.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    return net


@pytest.mark.parametrize(
    "net",
    [
        plain_network(solver=Anderson()),
        plain_network(backward=Unroll(3)),
        plain_network(coupled=True),
        doubled(),
        unsettled(),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    ],
    ids=["Anderson", "Unroll", "coupled", "a forward of its own", "statistics of the batch", "no fixed point"],
)
def test_other_networks_go_through_themselves(made: list[CompiledNetwork], net: Any) -> None:
    assert evaluate(net, images(60), scorer=Scorer(net)) == evaluate(net, images(60))
    assert not made


class Asking(CompiledNetwork):
    def __call__(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("operation not permitted when\nstream is capturing")


def test_what_cannot_be_captured_warns_once(made: list[CompiledNetwork], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["banach.train.evaluate"], "CompiledNetwork", Asking)
    net = network()
    scorer = Scorer(net)
    with pytest.warns(
        UserWarning, match="runs eagerly: RuntimeError: operation not permitted when stream"
    ) as caught:
        got = evaluate(net, images(60), scorer=scorer)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert scorer.reason is not None
    wanted = evaluate(net, images(60))
    assert (got.loss, got.depth) == (pytest.approx(wanted.loss, rel=1e-6), wanted.depth)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate(net, images(60), scorer=scorer) == wanted


class Slope(nn.Module):
    """T(u) = s u + 1 with a slope of the image's own, its first pixel: that of image 0 is far above 1."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return v * u + 1


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        slope = torch.full((len(x), 10), 0.5, dtype=torch.float64)
        slope[0] = 1e200
        return slope


def test_a_sample_that_diverges_is_left_to_the_network(made: list[CompiledNetwork]) -> None:
    net: Any = ImplicitNetwork(First(), Slope(), nn.Identity(), tolerance=FINE).eval()
    with pytest.warns(ConvergenceWarning, match="T gave NaN or infinity"):
        wanted = evaluate(net, images(60))
    with pytest.warns(ConvergenceWarning, match="T gave NaN or infinity"):
        got = evaluate(net, images(60), scorer=Scorer(net))
    assert len(made) == 1
    assert got == wanted
    assert got.converged == pytest.approx(59 / 60)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("backward", [None, Neumann(1)], ids=["JFB", "Neumann"])
def test_in_training_mode_it_draws_and_updates_as_the_network(backward: Any) -> None:
    figures, buffers = [], []
    for fast in (True, False):
        net = in_double(Tolerance(atol=1e-9, max_steps=200, norm=Euclidean()))
        net.backward = net.backward if backward is None else backward
        scorer = Scorer(net.train(), fast=fast)
        figures.append(measure(scorer, images(90), 40, lambda: torch.manual_seed(5)))
        buffers.append(dict(net.named_buffers()))
        assert (True in scorer._made and scorer._made[True][1] is not None) == fast
    assert_near(figures[0], figures[1])
    for name, value in buffers[0].items():
        torch.testing.assert_close(value, buffers[1][name], msg=name)


@pytest.mark.usefixtures("kernel")
def test_samples_that_diverge_in_a_kernel_are_warned_of() -> None:
    """It hands back the best finite iterates: nothing in the figures tells, but the network itself does."""
    net: Any = network(tolerance=FINE).eval()
    with torch.no_grad():
        for p in net.R.parameters():
            p.mul_(1e3)
    with pytest.warns(ConvergenceWarning, match="T gave NaN or infinity"):
        wanted = evaluate(net, images(60), batch_size=60)
    with pytest.warns(ConvergenceWarning, match="T gave NaN or infinity"):
        assert evaluate(net, images(60), batch_size=60, scorer=Scorer(net)) == wanted


@pytest.mark.usefixtures("kernel")
def test_a_kernel_that_lost_its_way_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves NaN. The network itself then answers, from the same seed, though numbers were drawn meanwhile."""

    def lost(self: FastNetwork, d: Any) -> Any:
        output, found = own(self, d)
        return output * torch.nan, found

    own = FastNetwork.__call__
    net: Any = network()
    wanted = measure(Scorer(net.train(), fast=False), images(90), 40, lambda: torch.manual_seed(5))
    monkeypatch.setattr(FastNetwork, "__call__", lost)
    assert measure(Scorer(net), images(90), 40, lambda: torch.manual_seed(5)) == wanted
