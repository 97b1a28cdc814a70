"""Training on a GPU: every precision, the same weights as on the CPU, a resume, the peak memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from banach import JFB, Anderson, Implicit, Mode, Neumann, NormalCG, Picard, Solver, Tolerance, Unroll
from banach.data import Batches, Chain, Crop, Flip
from banach.models import Cosine
from banach.train import Run, fit
from banach.train.state import TrainState
from banach.train.steps import Steps
from train.parts_train import images, network, plain_network, settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_every_precision_learns(precision: str) -> None:
    switches = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    net = network(batch_norm=False, tolerance=Tolerance(atol=3e-2, max_steps=20))
    made = settings(precision=precision, device="cuda", epochs=4, ema=0.5)
    history = fit(net, images(), images(20, "validation"), made)
    assert history.last.loss < history.epochs[0].loss
    assert history.last.memory is not None
    assert history.last.memory > 0
    assert next(net.parameters()).dtype == torch.float32
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == switches


def test_the_same_weights_as_on_the_cpu() -> None:
    here, there = plain_network(), plain_network()
    fit(here, images(), images(20, "validation"), settings())
    fit(there, images(), images(20, "validation"), settings(device="cuda"))
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-4, atol=1e-4)  # batches are made in float32


def test_a_resume_on_the_gpu(tmp_path: Path) -> None:
    made = settings(device="cuda", checkpoint_every=4, monitor=True)
    run = Run.create(tmp_path / "run", made)
    whole = plain_network()
    fit(whole, images(), images(20, "validation"), made, run=run)
    last = sorted((run.path / "checkpoints").iterdir())[-1]
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    again = plain_network(seed=9)
    fit(again, images(), images(20, "validation"), made, run=run)
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_the_gpus_random_numbers_stay() -> None:
    net = network()  # seeds the GPU too
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    fit(net, images(), images(20, "validation"), settings(device="cuda", epochs=1))
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("fast", [True, False])
def test_the_loop_never_waits_for_the_device(fast: bool) -> None:
    # A fixed depth asks for nothing, so any wait is the loop's own, and raises here.
    made = settings(device="cuda", clip=1.0, ema=0.9, label_smoothing=0.1, fast=fast)
    net = plain_network(Tolerance(max_steps=5, check_every=0)).cuda()
    train = images().to("cuda")
    work = TrainState(net, Batches(train, 16), train, made)
    steps = Steps(work)
    steps.take()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for work.step in range(1, 6):
            steps.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(steps.plan.graph) == fast
    assert work.metrics.read().loss > 0


PENALTIES: tuple[dict[str, Any], ...] = (
    {"jacobian_penalty": 0.7},
    {"jacobian_penalty": 0.7, "finite_difference": True},
    {"correction": 0.4, "correction_steps": (1, 2)},
)
FIXED = Tolerance(max_steps=3, check_every=0)
MODES = (JFB(), Neumann(2), Unroll(2), Implicit(Picard(), FIXED), Implicit(NormalCG(), FIXED))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("solver", [Picard(), Picard(damping=0.2), Anderson(3)])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_captured_steps_learn_what_plain_ones_learn(solver: Solver, mode: Mode, optimizer: str) -> None:
    """In float64 and at a tight tolerance: the depths differ, the fixed points and so the weights do not."""
    more = {"momentum": 0.9, "lr": 1e-2} if optimizer == "sgd" else {}
    made = settings(device="cuda", clip=1.0, ema=0.9, optimizer=optimizer, schedule=Cosine(), accumulate=2, **more)
    trained = []
    for fast in (True, False):
        net = plain_network(solver=solver, backward=mode)
        history = fit(net, images(90), images(20, "validation"), replace(made, fast=fast))
        trained.append((net, history))
    (fast_net, fast_history), (plain_net, plain_history) = trained
    for a, b in zip(fast_net.parameters(), plain_net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert fast_history.last.loss == pytest.approx(plain_history.last.loss, rel=1e-5)
    assert fast_history.last.products == plain_history.last.products
    assert fast_history.last.converged is not None
    assert fast_history.last.converged >= 0.95


@pytest.mark.parametrize("penalties", PENALTIES)
def test_captured_steps_have_the_penalties_of_plain_ones(penalties: dict[str, Any]) -> None:
    """The same signs are drawn, so the weights agree; warnings are errors here, so the steps are captured."""
    made = settings(device="cuda", **penalties)
    trained = []
    for fast in (True, False):
        net = plain_network()
        fit(net, images(96), images(20, "validation"), replace(made, fast=fast))
        trained.append(net)
    for a, b in zip(*(net.parameters() for net in trained), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    without = plain_network()
    fit(without, images(96), images(20, "validation"), replace(settings(device="cuda")))
    assert not torch.allclose(without.R.inner.weight, trained[0].R.inner.weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_penalties_with_batch_norm_and_dropout(precision: str) -> None:
    net: Any = network(tolerance=Tolerance(atol=3e-2, max_steps=20))
    made = settings(device="cuda", precision=precision, jacobian_penalty=1.0, correction=0.5)
    history = fit(net, images(96), images(20, "validation"), made)
    assert history.last.loss < history.epochs[0].loss
    assert int(net.R.blocks[0].norm.num_batches_tracked) == 12


def test_captured_steps_draw_what_plain_ones_draw() -> None:
    """Dropout, batch norm and augmentation: the same numbers, and one update of the statistics a step."""
    trained = []
    for fast in (True, False):
        net = network(tolerance=Tolerance(atol=1e-5, max_steps=60))
        # Not Adam, whose first steps make of rounding a whole step.
        made = settings(device="cuda", epochs=1, batch_size=32, fast=fast, optimizer="sgd")
        fit(net, images(96), images(20, "validation"), made, augment=Chain(Flip(), Crop(1)))
        trained.append(net.state_dict())
    for name, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][name], rtol=2e-3, atol=2e-3)


def test_a_network_that_syncs_with_host_is_trained_plainly() -> None:
    class Asking(torch.nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return y * float(y.detach().abs().max().item() < 1e9)

    net = plain_network()
    net.S = torch.nn.Sequential(net.S, Asking())
    with pytest.warns(UserWarning, match="could not be captured as a CUDA graph"):
        history = fit(net, images(), images(20, "validation"), settings(device="cuda", epochs=1))
    reference = plain_network()
    fit(reference, images(), images(20, "validation"), settings(device="cuda", epochs=1, fast=False))
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert history.finished
