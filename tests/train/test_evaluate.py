"""evaluate() and Scorer: the same figures by the network itself and by graphs, on a simulated GPU."""

import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from banach import ConvergenceWarning, Picard, Tolerance, Unroll
from banach.data import Images
from banach.fast import CompiledNetwork, plan
from banach.train import Totals, evaluate, fit
from banach.train.evaluate import Scorer
from fast.simulated import simulate_gpu
from train.parts_train import Double, images, network, plain_network, settings

FINE = Tolerance(atol=1e-9, max_steps=200)
Made = list[CompiledNetwork]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Simulate a GPU without kernels; return the networks that were compiled for evaluation."""
    found: Made = []

    def make(*args: Any, **options: Any) -> CompiledNetwork:
        found.append(CompiledNetwork(*args, **options))
        return found[-1]

    simulate_gpu(monkeypatch, kernels=False)
    monkeypatch.setattr(sys.modules["banach.train.evaluate"], "CompiledNetwork", make)
    return found


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU whose kernels know R."""
    simulate_gpu(monkeypatch, kernels=True)


def in_double(tolerance: Tolerance = FINE) -> Any:
    """The digits network in float64, for images in float32."""
    net: Any = network(tolerance=tolerance).double()
    net.Q = nn.Sequential(Double(), net.Q)
    return net


def by_hand(net: Any, split: Images, tolerance: Tolerance) -> Totals:
    """All images at once, T iterated in a loop that looks at every sample after every step."""
    net.eval()
    with torch.no_grad():
        v = net.Q(split.normalise(split.pixels))
        u, steps = torch.zeros_like(v), torch.zeros(len(v), dtype=torch.int64)
        residual, active = torch.zeros(len(v), dtype=v.dtype), torch.ones(len(v), dtype=torch.bool)
        for _ in range(tolerance.max_steps):
            after = net.R(u, v)
            gap = (after - u).flatten(1).square().mean(1).sqrt()
            u = torch.where(active.view(-1, *[1] * (v.dim() - 1)), after, u)
            residual, steps = torch.where(active, gap, residual), steps + active
            active &= gap > tolerance.atol
        output = net.S(net.R(u, v))
    return Totals(
        loss=float(F.cross_entropy(output, split.labels)),
        accuracy=float((output.argmax(1) == split.labels).double().mean()),
        depth=float(steps.double().mean()),
        max_depth=int(steps.max()),
        residual=float(residual.mean()),
        max_residual=float(residual.max()),
        converged=float((~active).double().mean()),
    )


def assert_near(got: Totals, wanted: Totals) -> None:
    figures = [{name: value for name, value in vars(one).items() if value != {}} for one in (got, wanted)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)


@pytest.mark.parametrize("batch_size", [400, 7])
def test_the_figures_are_those_of_a_loop_by_hand(batch_size: int) -> None:
    tolerance = Tolerance(atol=1e-3, max_steps=9)
    net = plain_network(tolerance)
    assert_near(evaluate(net, images(60), batch_size=batch_size), by_hand(net, images(60), tolerance))


def test_on_a_cpu_a_scorer_is_the_network_bit_by_bit() -> None:
    net = network().train()
    assert evaluate(net, images(90), scorer=Scorer(net)) == evaluate(net, images(90))
    assert net.training


def test_a_kernel_gives_the_same_figures(made: Made, kernel: None) -> None:
    net = in_double()
    assert_near(evaluate(net, images(60), scorer=Scorer(net)), by_hand(net, images(60), FINE))
    assert made[0].plan.kernel


@pytest.mark.parametrize("tolerance", [FINE, Tolerance(atol=1e-9, max_steps=10)], ids=["converged", "cut off"])
def test_without_a_kernel_every_sample_takes_its_own_steps(made: Made, tolerance: Tolerance) -> None:
    net = plain_network(tolerance)
    cut_off = pytest.warns(ConvergenceWarning, match="stopped at max_steps above the tolerance; try more")
    with nullcontext() if tolerance is FINE else cut_off:
        got: Any = evaluate(net, images(60), scorer=Scorer(net))
    wanted: Any = by_hand(net, images(60), tolerance)
    assert not made[0].plan.kernel
    assert (got.accuracy, got.converged) == (wanted.accuracy, wanted.converged)
    assert got.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert got.depth == wanted.depth
    assert got.max_residual <= wanted.max_residual * (1 + 1e-9)


def test_the_explicit_twin_has_no_residual(made: Made) -> None:
    net: Any = network(explicit=True)
    got, split = evaluate(net, images(60), scorer=Scorer(net)), images(60)
    assert len(made) == 1
    assert (got.depth, got.residual, got.converged) == (0.0, None, None)
    with torch.no_grad():
        v = net.eval().Q(split.normalise(split.pixels))
        output = net.S(net.R(torch.zeros_like(v), v))
    assert got.loss == pytest.approx(float(F.cross_entropy(output, split.labels)), rel=1e-5)


def test_a_scorer_of_something_else_is_refused() -> None:
    net = network()
    with pytest.raises(ValueError, match="another network"):
        evaluate(net, images(9), scorer=Scorer(network()))
    with pytest.raises(ValueError, match=r"expected a Scorer\(net, 'bf16'\) .*of this network in fp32"):
        evaluate(net, images(9), precision="bf16", scorer=Scorer(net))


@pytest.mark.parametrize("ema", [None, 0.5])
def test_fit_validates_by_one_graph(made: Made, ema: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs: the figures are those of a run whose validation goes through the network."""
    eagerly: Any = lambda *args, **options: plan(*args, **{**options, "refused": "simulated"})  # noqa: E731
    monkeypatch.setattr(sys.modules["banach.train.steps"], "plan", eagerly)
    made_so = settings(epochs=3, ema=ema)
    fast, plain = (
        fit(in_double(), images(), images(60, "validation"), replace(made_so, fast=fast)) for fast in (True, False)
    )
    assert len(made) == 1
    for a, b in zip(fast.epochs, plain.epochs, strict=True):
        assert a.loss == b.loss
        assert a.validation_loss == pytest.approx(b.validation_loss, rel=1e-6)
        assert (a.validation_accuracy, a.validation_converged) == (b.validation_accuracy, 1.0)


def scale(net: Any) -> None:
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(1.1)


def other_address(net: Any) -> None:
    weight = net.S.linear.weight
    weight.data = weight.data.clone()


CHANGES: dict[str, tuple[Any, int]] = {
    "values of the weights": (scale, 1),
    "tolerance": (lambda net: setattr(net, "tolerance", Tolerance(atol=1e-2)), 2),
    "solver": (lambda net: setattr(net, "solver", Picard(damping=0.1)), 2),
    "S": (lambda net: setattr(net, "S", nn.Sequential(*net.S)), 2),
    "address of a weight": (other_address, 2),
}


@pytest.mark.parametrize(("change", "captures"), CHANGES.values(), ids=CHANGES)
def test_what_a_graph_holds_fixed_is_captured_again(made: Made, change: Any, captures: int) -> None:
    net: Any = network(tolerance=FINE).double().eval()
    scorer, x = Scorer(net), images(9).normalise(images(9).pixels).double()
    scorer(x)
    scorer(x)
    assert len(made) == 1
    change(net)
    net.eval()
    output = scorer(x)[0]
    assert len(made) == captures
    torch.testing.assert_close(output, net(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "net",
    [
        plain_network(backward=Unroll(3)),
        plain_network(coupled=True),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    ],
    ids=["Unroll", "coupled", "no fixed point"],
)
def test_other_networks_are_called_themselves(made: Made, net: Any) -> None:
    assert evaluate(net, images(60), scorer=Scorer(net)) == evaluate(net, images(60))
    assert not made


class Failing(CompiledNetwork):
    def __call__(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("operation not permitted when\nstream is capturing")


def test_what_cannot_be_captured_warns_once(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["banach.train.evaluate"], "CompiledNetwork", Failing)
    net = network()
    scorer = Scorer(net)
    said = "runs eagerly: RuntimeError: operation not permitted when stream"
    with pytest.warns(UserWarning, match=said) as caught:
        got = evaluate(net, images(60), scorer=scorer)
    assert [one.filename for one in caught] == [__file__]
    assert scorer.reason is not None
    wanted = evaluate(net, images(60))
    assert (got.loss, got.depth) == (pytest.approx(wanted.loss, rel=1e-6), wanted.depth)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate(net, images(60), scorer=scorer) == wanted


@pytest.mark.usefixtures("kernel")
def test_samples_that_diverge_in_a_kernel_are_warned_of() -> None:
    """A kernel returns the best finite iterates: nothing in the figures tells, but the network itself does."""
    net: Any = network(tolerance=FINE).eval()
    with torch.no_grad():
        for p in net.R.parameters():
            p.mul_(1e3)
    found = []
    for scorer in (None, Scorer(net)):
        with pytest.warns(ConvergenceWarning, match="T gave NaN or infinity"):
            found.append(evaluate(net, images(60), batch_size=60, scorer=scorer))
    assert found[0] == found[1]


def test_frozen_parts_stay_frozen() -> None:
    """A part in eval mode inside a network in train mode was in train mode afterwards."""
    net: Any = network().train()
    net.S.eval()
    before = [module.training for module in net.modules()]
    evaluate(net, images(16))
    assert [module.training for module in net.modules()] == before
