"""Recipes of the rivals, and what `fit` does for them: pixels in [0, 1], pretraining, tuning, evaluations."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import Implicit, ImplicitNetwork, Picard, Tolerance, models
from banach.data import Batches
from banach.models import ODENet
from banach.models.registry import get
from banach.train import DivergenceError, Run, Settings, fit, words
from banach.train.distributed import Ranks
from fast.simulated import EagerGraphs
from train.parts_train import capture_steps, figures, images, plain_network, same_weights, settings, stop_at

RIVALS = ("mon", "mon-fc", "mon-tiers", "mon-large", "mdeq-tiny", "mdeq", "node", "anode")
EVERY = [(name, which) for name in RIVALS for which in get(name).recipes]


@pytest.mark.parametrize(("name", "which"), EVERY)
def test_every_recipe_makes_settings_that_build(name: str, which: str) -> None:
    chosen = Settings.choose({"model": name, "recipe": which, "data": "cifar10", "device": "cpu"})
    assert Settings.from_dict(chosen.to_dict()) == chosen
    if name == "mdeq":  # 11 million parameters
        return
    net = chosen.build()
    if isinstance(net, ImplicitNetwork):
        assert net.solver == words.solver(str(chosen.solver))
        assert net.tolerance == models.recipe(name, which).tolerance
    assert chosen.normalise == (which != "own" or name not in ("node", "anode"))


def test_recipes_of_the_authors() -> None:
    mon = Settings.choose({"model": "mon", "data": "mnist"})
    assert (mon.backward, mon.rtol, mon.eps, mon.max_steps) == ("implicit:picard:1e-2:300", 1e-2, 0, 300)
    assert (mon.tune, mon.augment, mon.pretrain) == (True, "none", 0)
    assert models.recipe("mon", "colour").schedule == models.Steps((25,), 0.1)  # with 81 channels
    assert models.recipe("mon-tiers", "cifar10").lr == 1e-2
    tiny = Settings.choose({"model": "mdeq-tiny", "data": "cifar10"})
    assert (tiny.solver, tiny.max_steps, tiny.pretrain, tiny.augment) == ("broyden:22", 22, 3000, "none")
    assert Settings.choose({"model": "mon-large", "data": "cifar10"}).augment == "flip+crop:4"
    assert Settings.choose({"model": "mon-large", "data": "svhn"}).augment == "none"
    twin = Settings.choose({"model": "mon", "data": "mnist", "max_steps": 0})
    assert (twin.backward, twin.tune) == ("jfb", False)
    common = [Settings.choose({"model": name, "recipe": "common", "data": "svhn"}) for name in RIVALS]
    assert len({(one.epochs, one.lr, one.batch_size, one.normalise, one.weight_decay) for one in common}) == 1
    assert {one.backward for one in common} == {"jfb", None}


def test_pixels_without_normalisation() -> None:
    pixels = Settings.choose({"model": "node", "data": "digits"}).load("train")
    x = pixels.normalise(pixels.pixels[:50])
    torch.testing.assert_close(x, pixels.pixels[:50] / 255)


@pytest.mark.parametrize("refused", [{"pretrain": 3}, {"tune": True}])
def test_what_needs_a_fixed_point(refused: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"node has no fixed point; leave out {next(iter(refused))}"):
        Settings.choose({"model": "node", "data": "digits", **refused})
    with pytest.raises(ValueError, match=f"explicit twin, .*; leave out {next(iter(refused))}"):
        Settings.choose({"data": "digits", "max_steps": 0, **refused})


# The first steps unroll R.


def by_hand(net: ImplicitNetwork, how: Settings, steps: int) -> None:
    """Train by plain autograd through ten evaluations of R, written out."""
    optimizer = torch.optim.Adam(net.parameters(), how.lr)
    for d, labels in list(Batches(images(), how.batch_size, how.seed).epoch(0))[:steps]:
        v = net.Q(d)
        u = torch.zeros_like(v)
        for _ in range(10):
            u = net.R(u, v)
        optimizer.zero_grad()
        F.cross_entropy(net.S(u), labels).backward()
        optimizer.step()


def test_the_first_steps_are_plain_backpropagation() -> None:
    how = settings(epochs=1, pretrain=6)
    net, twin = plain_network(), plain_network()
    solver = net.tolerance, net.backward
    history = fit(net, images(), None, how)  # six steps
    assert (net.tolerance, net.backward) == solver
    assert (history.last.depth, history.last.products) == (0.0, 9 * 96)
    by_hand(twin, how, 6)
    torch.testing.assert_close([*net.parameters()], [*twin.parameters()], rtol=1e-9, atol=1e-12)


def test_steps_are_captured_once_for_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch that begins within a phase captures nothing."""
    capture_steps(monkeypatch)
    captures, capture = list[Any](), EagerGraphs.capture

    def counted(*given: Any) -> Any:
        captures.append(given)
        return capture(*given)

    monkeypatch.setattr(EagerGraphs, "capture", counted)
    fit(plain_network(), images(), None, settings(epochs=4, pretrain=14))
    assert len(captures) == 2


@pytest.mark.parametrize("captured", [False, True])
def test_then_they_solve_also_after_a_resume(
    captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = settings(epochs=2, pretrain=8, checkpoint_every=1)
    whole, parts = plain_network(), plain_network()
    plans = list[Any]()
    expected = fit(whole, images(), None, how, on_plan=plans.append)
    assert [bool(one.loop) for one in plans] == [False, True]
    assert expected.epochs[0].depth == 0
    assert (expected.last.depth or 0) > 1  # two of its six steps unroll
    if captured:
        capture_steps(monkeypatch)
    run = Run.create(tmp_path / "run", how)
    for stop in (7, 9):
        with pytest.raises(KeyboardInterrupt):
            fit(parts, images(), None, how, run=run, on_step=stop_at(stop, 6))
        parts = plain_network(seed=1)
    found = fit(parts, images(), None, how, run=run)
    if captured:
        near: Any = {"rtol": 1e-5, "atol": 1e-6}  # rates are fp32 on a GPU
        torch.testing.assert_close([*parts.parameters()], [*whole.parameters()], **near)
    else:
        assert same_weights(parts, whole)
        assert figures(found) == figures(expected)


# Modules tune themselves.


class Tuned(nn.Module):
    """R(u, v) = tanh(a W u + v), which tunes a: at every call to half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(12, 12).double(), 0.5
        self.seen: list[Tensor] = []

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(self.factor * self.inner(u) + v)

    def tune(self, net: Any, d: Tensor) -> bool:
        assert not torch.is_grad_enabled()
        self.seen.append(d)
        self.factor /= 2
        return True


@pytest.mark.parametrize("captured", [False, True])
def test_modules_tune_themselves_in_the_middle_of_an_epoch(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if captured:
        capture_steps(monkeypatch)
    net = plain_network()
    net.R = Tuned()
    fit(net, images(), None, settings(epochs=2, tune=True))
    assert net.R.factor == 0.125
    batch = next(Batches(images(), 16, 0).epoch(1, start=3))[0]
    assert torch.equal(net.R.seen[1], batch)


def test_a_monotone_network_tunes_alpha_and_resumes(tmp_path: Path) -> None:
    def network() -> ImplicitNetwork:
        torch.manual_seed(0)
        tolerance = Tolerance(atol=0, rtol=1e-2, max_steps=300)
        return ImplicitNetwork(*models.mon((1, 8, 8), channels=4, alpha=8.0), tolerance=tolerance)

    how = settings(epochs=2, tune=True, checkpoint_every=2)
    whole, parts = network(), network()
    expected = fit(whole, images(), None, how)
    assert whole.R.alpha <= 1
    run = Run.create(tmp_path / "run", how)
    with pytest.raises(KeyboardInterrupt):
        fit(parts, images(), None, how, run=run, on_step=stop_at(5, 6))
    parts = network()
    found = fit(parts, images(), None, how, run=run)
    assert same_weights(parts, whole)
    assert parts.R.alpha == whole.R.alpha
    assert figures(found) == figures(expected)


def test_ranks_do_not_tune() -> None:
    with pytest.raises(ValueError, match="tune needs one process, got 2 ranks; pass --no-tune"):
        Ranks(0, 2).check(plain_network(), 96, settings(tune=True))


# Neural ODEs.


def ode(**options: Any) -> ODENet:
    torch.manual_seed(0)
    return ODENet((1, 8, 8), 10, filters=3, extra=1, **options)


def test_evaluations_are_the_depth_and_the_products() -> None:
    pytest.importorskip("torchdiffeq")
    net, made = ode(), list[Any]()
    history = fit(net, images(64), images(32), settings(epochs=1), on_step=lambda _: made.append(net.evaluations))
    last = history.last
    assert last.depth == sum(one.forward for one in made) / len(made) > 0
    assert last.max_depth == max(one.forward for one in made)
    assert last.products == 16 * sum(one.backward for one in made) > 0
    assert last.validation_depth == net.evaluations.forward
    assert (last.residual, last.converged) == (None, None)


@pytest.mark.parametrize("adjoint", [False, True])
def test_a_solver_that_fails_ends_the_run_or_rewinds(adjoint: bool, tmp_path: Path) -> None:
    pytest.importorskip("torchdiffeq")
    net, how = ode(), settings(epochs=1)

    def break_it(position: Any) -> None:
        if position.step == 2:
            if adjoint:  # only the backward pass fails
                net.linear.register_full_backward_hook(lambda *_: setattr(net.f, "broken", True))
                net.f.register_forward_hook(lambda f, *_: _refuse() if getattr(f, "broken", False) else None)
            else:
                net.max_steps = 0

    said = r"the solver failed \(.*\) in step 3 of epoch 1; .* checkpoint"
    with pytest.raises(DivergenceError, match=said):
        fit(net, images(64), None, how, on_step=break_it)
    net = ode()
    how = settings(epochs=1, on_nonfinite="rewind")
    with (
        pytest.warns(RuntimeWarning, match="the solver failed .* back to epoch-00000"),
        pytest.raises(DivergenceError, match="the solver failed"),
    ):
        fit(net, images(64), None, how, run=Run.create(tmp_path / "run", how), on_step=break_it)


def _refuse() -> None:
    raise AssertionError("underflow in dt 0.0")


# Exact gradients in captured steps.


def test_captured_steps_count_the_products_of_the_exact_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for captured in (False, True):
        torch.manual_seed(0)
        mode = Implicit(Picard(), Tolerance(atol=0, rtol=1e-6, max_steps=300))
        parts = models.mon((1, 8, 8), channels=4)
        net = ImplicitNetwork(*parts, tolerance=Tolerance(atol=1e-6, max_steps=300), backward=mode)
        if captured:
            capture_steps(monkeypatch)
        plans = list[Any]()
        history = fit(net, images(), None, settings(epochs=1), on_plan=plans.append)
        assert bool(plans[0].graph) == captured
        assert net.backward is mode
        trained.append((net, history.last.products))
    (eager, products), (net, captured_products) = trained
    torch.testing.assert_close([*net.parameters()], [*eager.parameters()], rtol=1e-3, atol=1e-5)
    assert captured_products == pytest.approx(products, rel=0.2)
    assert products > 96
