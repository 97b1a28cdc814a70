"""On a GPU: captured steps and evaluations against eager ones, in every precision; a resume; the peak memory."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from banach import JFB, Anderson, Implicit, ImplicitNetwork, Neumann, NormalCG, Picard, Tolerance, Unroll, models
from banach.data import Batches, Chain, Crop, Flip
from banach.models import Cosine
from banach.models.mdeq import Sizes, multiscale
from banach.train import DivergenceError, Run, Scorer, evaluate, fit, words
from banach.train.state import TrainState
from banach.train.steps import Stepper
from train.parts_train import images, network, plain_network, settings
from train.test_divergence import SGD, bad_step, by_hand, fused, marked, quietly
from train.test_divergence import network as broken_network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


HELD = images(20, "validation")


def assert_close(a: nn.Module, b: nn.Module, **near: Any) -> None:
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), **near)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_every_precision_learns(precision: str) -> None:
    switches = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    net = network(batch_norm=False, tolerance=Tolerance(atol=3e-2, max_steps=20))
    made = settings(precision=precision, device="cuda", epochs=4, ema=0.5)
    history = fit(net, images(), HELD, made)
    assert history.last.loss < history.epochs[0].loss
    assert history.last.memory is not None
    assert history.last.memory > 0
    assert next(net.parameters()).dtype == torch.float32
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == switches


def test_the_same_weights_as_on_the_cpu() -> None:
    here, there = plain_network(), plain_network()
    fit(here, images(), HELD, settings())
    fit(there, images(), HELD, settings(device="cuda"))
    assert_close(here, there, rtol=1e-4, atol=1e-4)  # batches are made in float32


def test_a_resume_on_the_gpu(tmp_path: Path) -> None:
    made = settings(device="cuda", checkpoint_every=4, monitor=True)
    run = Run.create(tmp_path / "run", made)
    whole = plain_network()
    fit(whole, images(), HELD, made, run=run)
    shutil.rmtree(sorted((run.path / "checkpoints").iterdir())[-1])
    again = plain_network(seed=9)
    fit(again, images(), HELD, made, run=run)
    assert_close(whole, again, rtol=1e-10, atol=1e-12)


def test_the_gpus_random_numbers_stay() -> None:
    net = network()  # seeds the GPU too
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    fit(net, images(), HELD, settings(device="cuda", epochs=1))
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("fast", [True, False])
def test_the_loop_never_waits_for_the_device(fast: bool) -> None:
    # A solve at a fixed depth has no host sync, so any sync is the loop's own, and raises here.
    made = settings(device="cuda", clip=1.0, ema=0.9, label_smoothing=0.1, fast=fast)
    net = plain_network(Tolerance(max_steps=5, check_every=0)).cuda()
    train = images().to("cuda")
    work = TrainState(net, Batches(train, 16), train, made)
    steps = Stepper(work)
    steps.take()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for work.step in range(1, 6):
            steps.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(steps.step.plan.graph) == fast
    assert work.metrics.read().loss > 0


FIXED = Tolerance(max_steps=3, check_every=0)
MOMENTUM: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "lr": 1e-2}


@pytest.mark.parametrize(
    ("solver", "mode", "more"),
    [
        (Picard(), JFB(), {}),
        (Picard(damping=0.2), Neumann(2), {"optimizer": "adamw"}),
        (Anderson(3), Unroll(2), MOMENTUM),
        (Picard(), Implicit(Picard(), FIXED), MOMENTUM),
        (Anderson(3), Implicit(NormalCG(), FIXED), {}),
        (Picard(), JFB(), {"accumulate": 1, "jacobian_penalty": 0.7}),
        (Picard(), JFB(), {"accumulate": 1, "jacobian_penalty": 0.7, "finite_difference": True}),
        (Picard(), JFB(), {"accumulate": 1, "correction": 0.4, "correction_steps": (1, 2)}),
    ],
)
def test_captured_steps_learn_what_plain_ones_learn(solver: Any, mode: Any, more: dict[str, Any]) -> None:
    """In float64 and at a tight tolerance: the depths differ, the fixed points and so the weights do not."""
    made = settings(**{"device": "cuda", "clip": 1.0, "ema": 0.9, "schedule": Cosine(), "accumulate": 2, **more})
    trained = []
    for fast in (True, False):
        net = plain_network(solver=solver, backward=mode)
        history = fit(net, images(90), HELD, replace(made, fast=fast))
        trained.append((net, history))
    (fast_net, fast_history), (plain_net, plain_history) = trained
    assert_close(fast_net, plain_net, rtol=1e-5, atol=1e-6)
    assert fast_history.last.loss == pytest.approx(plain_history.last.loss, rel=1e-5)
    assert fast_history.last.products == plain_history.last.products
    assert fast_history.last.converged is not None
    assert fast_history.last.converged >= 0.95


def test_captured_steps_draw_what_plain_ones_draw() -> None:
    """Dropout, batch norm and augmentation: the same numbers, and one update of the statistics a step."""
    trained = []
    for fast in (True, False):
        net = network(tolerance=Tolerance(atol=1e-5, max_steps=60))
        # Not Adam, whose first steps make of rounding a whole step.
        made = settings(device="cuda", epochs=1, batch_size=32, fast=fast, optimizer="sgd")
        fit(net, images(96), HELD, made, augment=Chain(Flip(), Crop(1)))
        trained.append(net.state_dict())
    for name, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][name], rtol=2e-3, atol=2e-3)


def rival(name: str) -> ImplicitNetwork:
    """A small one with fresh weights."""
    torch.manual_seed(0)
    if name == "mdeq":
        net = multiscale((1, 8, 8), 10, Sizes((8, 16), (2, 4), 8, 0.0))  # a graph draws other dropout masks
        net.tolerance = Tolerance(max_steps=6, check_every=0)
        return net
    parts = models.mon((1, 8, 8), channels=8, alpha=2.0)
    if name == "mon-tiers":
        parts = models.mon_tiers((1, 8, 8), channels=(4, 8, 8), alpha=2.0)
    return ImplicitNetwork(*parts, tolerance=Tolerance(atol=1e-5, max_steps=300))


@pytest.mark.parametrize(
    ("name", "backward"),
    [(name, mode) for name in ("mon", "mon-tiers") for mode in ("jfb", "neumann:2", "implicit:picard:1e-4")]
    + [("mdeq", "jfb"), ("mdeq", "unroll:3:0.5")],
)
@pytest.mark.parametrize("halved", [False, True])
def test_captured_steps_of_rivals_learn_what_plain_ones_learn(
    name: str, backward: str, halved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inverses and FFTs, nested latents, unrolled first steps, a step size that is tuned.

    A multiscale network takes one step: in two, rounding grows by a factor of 1,000.
    """
    one = name == "mdeq"
    data, recipe = (
        images(16 if one else 96),
        {"epochs": 1 if one else 2, "tune": not one, "pretrain": 0 if one else 4},
    )
    if halved:  # late samples are iterated as a smaller batch
        monkeypatch.setattr("banach.fast.iteration.LARGE", 1)
    trained = []
    for fast in (True, False):
        net, plans = rival(name), list[Any]()
        net.backward = words.backward(backward)
        made = settings(device="cuda", optimizer="sgd", lr=1e-2, fast=fast, **recipe)
        history = fit(net, data, HELD, made, on_plan=plans.append)
        assert bool(plans[0].graph) == fast
        assert (history.last.products > len(data)) == (backward != "jfb")
        trained.append(net)
    assert_close(*trained, rtol=5e-3, atol=5e-4)


def trained_a_little(name: str) -> Any:
    """So that scores are apart and statistics settled; `own`: an R that no kernel knows."""
    if name == "own":
        return plain_network(Tolerance(atol=1e-9, max_steps=100)).cuda()
    torch.manual_seed(0)
    net: Any = models.build(name, tolerance=Tolerance(atol=1e-3, max_steps=60)).cuda()
    split = images(90).to("cuda")
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(split.normalise(split.pixels)), split.labels).backward()
        optimizer.step()
    return net


def assert_same(got: Any, wanted: Any) -> None:
    assert got.loss == pytest.approx(wanted.loss, rel=1e-3)
    assert got.accuracy == pytest.approx(wanted.accuracy, abs=2 / 90)
    assert got.converged == wanted.converged
    assert got.depth == pytest.approx(wanted.depth, abs=0.2)  # a residual near the tolerance
    assert got.residual == pytest.approx(wanted.residual, rel=0.1)


@pytest.mark.parametrize("name", ["digits", "own"])
def test_in_eval_mode(name: str) -> None:
    net, split = trained_a_little(name), images(90).to("cuda")
    scorer = Scorer(net)
    for _ in range(2):  # captured, then replayed with other weights
        assert_same(evaluate(net, split, scorer=scorer), evaluate(net, split))
        assert scorer.reason is None
        with torch.no_grad():
            for weight in net.S.parameters():
                weight.mul_(1.2)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_other_precisions(precision: str) -> None:
    net, split = trained_a_little("digits"), images(90).to("cuda")
    net.tolerance = Tolerance(atol=3e-2, max_steps=60)
    got = evaluate(net, split, precision=precision, scorer=Scorer(net, precision))
    assert got.loss == pytest.approx(evaluate(net, split, precision=precision).loss, rel=2e-2)


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("kind", ["data", "gradient"])
def test_captured_steps_note_a_divergence_on_the_device(policy: str, kind: str) -> None:
    """The first bad step is kept there; a skipped step leaves weights and statistics as they were."""
    made = settings(**SGD, device="cuda", on_nonfinite=policy)
    net = broken_network(kind)
    state = TrainState(net.to("cuda"), Batches(marked().to("cuda"), made.batch_size, made.seed), None, made)
    assert Stepper(state).step.plan.graph
    if policy == "stop":
        expected = rf"became NaN or infinite in step {bad_step(made)} of epoch 1"
        with pytest.raises(DivergenceError, match=expected):
            quietly(lambda: fit(net, marked(), HELD, made))
        return
    reference = broken_network("")
    by_hand(reference.train(), made)
    quietly(lambda: fit(net, marked(), HELD, made))
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-5)


def test_a_rewind_captures_the_steps_again(tmp_path: Path) -> None:
    made = settings(optimizer="sgd", lr=4.0, on_nonfinite="rewind", device="cuda")
    slow, reference = replace(made, lr=made.lr * 0.1, on_nonfinite="stop"), fused()
    fit(reference, images(), HELD, slow)
    net = fused()
    quietly(lambda: fit(net, images(), HELD, made, run=Run.create(tmp_path / "run", made)))
    assert_close(net, reference, rtol=1e-4, atol=1e-5)
