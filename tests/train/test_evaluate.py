"""evaluate() and Scorer: the same figures by the network itself and by graphs, on a simulated GPU."""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import ConvergenceWarning, Euclidean, ImplicitNetwork, Neumann, Picard, Tolerance, Unroll
from banach.data import Images
from banach.fast import CompiledNetwork, FastNetwork, plan
from banach.train import Totals, evaluate, fit
from banach.train.evaluate import AT_A_TIME, Scorer, measure
from fast.simulated import simulate_gpu
from train.parts_train import images, network, plain_network, settings

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


class Double(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.double())
        return y


def in_double(tolerance: Tolerance = FINE) -> Any:
    """The digits network in float64, for images in float32."""
    net: Any = network(tolerance=tolerance).double()
    net.Q = Double(net.Q)
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
    x = images(20).normalise(images(20).pixels)
    torch.manual_seed(1)
    output, found = Scorer(net)(x)
    torch.manual_seed(1)
    own, wanted = net(x, solution=True)
    assert torch.equal(output, own)
    assert not output.requires_grad
    assert found is not None
    assert torch.equal(found.residual, wanted.residual)


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


def test_a_network_in_bf16(made: Made) -> None:
    net = network(tolerance=Tolerance(atol=3e-2, max_steps=20))
    scorers = (Scorer(net, "bf16"), None)
    got, wanted = (evaluate(net, images(60), precision="bf16", scorer=scorer) for scorer in scorers)
    assert made[0].bf16
    assert got.loss == pytest.approx(wanted.loss, rel=2e-2)
    assert got.loss != evaluate(net, images(60)).loss
    assert Scorer(net.eval(), "bf16")(images(4).normalise(images(4).pixels))[0].dtype == torch.float32


def test_the_explicit_twin_has_no_residual(made: Made) -> None:
    net: Any = network(explicit=True)
    got, split = evaluate(net, images(60), scorer=Scorer(net)), images(60)
    assert len(made) == 1
    assert (got.depth, got.residual, got.converged) == (0.0, None, None)
    with torch.no_grad():
        v = net.eval().Q(split.normalise(split.pixels))
        output = net.S(net.R(torch.zeros_like(v), v))
    assert got.loss == pytest.approx(float(F.cross_entropy(output, split.labels)), rel=1e-5)


@pytest.mark.parametrize(
    ("fast", "asked", "sizes"),
    [
        (True, 400, [AT_A_TIME, AT_A_TIME, 1100 - 2 * AT_A_TIME]),
        (True, 20, [256, 256, 256, 256, 76]),
        (False, 400, [400, 400, 300]),
    ],
)
@pytest.mark.usefixtures("made")
def test_graphs_take_images_by_a_power_of_two(
    fast: bool, asked: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    own = Scorer.__call__

    def spy(self: Scorer, x: Tensor) -> Any:
        seen.append(len(x))
        return own(self, x)

    monkeypatch.setattr(Scorer, "__call__", spy)
    net = plain_network(Tolerance(atol=1e-2))
    evaluate(net, images(1100), batch_size=asked, scorer=Scorer(net, fast=fast))
    assert seen == sizes


def test_a_scorer_of_something_else_is_refused() -> None:
    net = network()
    with pytest.raises(ValueError, match="another network"):
        evaluate(net, images(9), scorer=Scorer(network()))
    with pytest.raises(ValueError, match=r"in fp32, expected this one in bf16; make a Scorer\(net, 'bf16'\)"):
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


def other_r(net: Any) -> None:
    net.R = type(net.R)(24, blocks=1, gamma=0.2).double()


def other_address(net: Any) -> None:
    weight = net.S.linear.weight
    weight.data = weight.data.clone()


CHANGES: dict[str, tuple[Any, int]] = {
    "values of the weights": (scale, 1),
    "tolerance": (lambda net: setattr(net, "tolerance", Tolerance(atol=1e-2)), 2),
    "solver": (lambda net: setattr(net, "solver", Picard(damping=0.1)), 2),
    "start": (lambda net: setattr(net, "start", lambda v: v), 2),
    "R": (other_r, 2),
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


class Doubled(ImplicitNetwork):
    def forward(self, *args: Any, **options: Any) -> Any:
        y, found = super().forward(*args, solution=True)
        return (2 * y, found) if options.get("solution") else 2 * y


def doubled() -> ImplicitNetwork:
    net = plain_network()
    return Doubled(net.Q, net.R, net.S, tolerance=net.tolerance)


def batch_statistics() -> Any:
    """Batch norm without running statistics: even in eval mode a sample depends on the others."""
    net: Any = network()
    for module in net.R.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    return net


@pytest.mark.parametrize(
    "net",
    [
        plain_network(backward=Unroll(3)),
        plain_network(coupled=True),
        doubled(),
        batch_statistics(),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    ],
    ids=["Unroll", "coupled", "overridden forward", "statistics of the batch", "no fixed point"],
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


class Slope(nn.Module):
    """T(u) = s u + 1."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return v * u + 1


class First(nn.Module):
    """A slope of 1/2, but for the first image far above 1."""

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.full((len(x), 10), 0.5, dtype=torch.float64)
        slope[0] = 1e200
        return slope


def test_a_sample_that_diverges_is_left_to_the_network(made: Made) -> None:
    net: Any = ImplicitNetwork(First(), Slope(), nn.Identity(), tolerance=FINE).eval()
    found = []
    for scorer in (None, Scorer(net)):
        with pytest.warns(ConvergenceWarning, match="T gave NaN or infinity"):
            found.append(evaluate(net, images(60), scorer=scorer))
    assert len(made) == 1
    assert found[0] == found[1]
    assert found[0].converged == pytest.approx(59 / 60)


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
        assert scorer.captures(torch.device("cpu")) == fast
    assert_near(figures[0], figures[1])
    for name, value in buffers[0].items():
        torch.testing.assert_close(value, buffers[1][name], msg=name)


@pytest.mark.usefixtures("kernel")
def test_if_a_kernel_gives_nan_the_network_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same seed, though numbers were drawn meanwhile."""

    def lost(self: FastNetwork, d: Any) -> Any:
        output, found = own(self, d)
        return output * torch.nan, found

    own = FastNetwork.__call__
    net: Any = network()
    wanted = measure(Scorer(net.train(), fast=False), images(90), 40, lambda: torch.manual_seed(5))
    monkeypatch.setattr(FastNetwork, "__call__", lost)
    assert measure(Scorer(net), images(90), 40, lambda: torch.manual_seed(5)) == wanted
