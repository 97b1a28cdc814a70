"""fit(): it learns, in every mode, and what it reports and does is what a hand-written loop gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from banach import (
    GMRES,
    JFB,
    ContractionMonitor,
    Implicit,
    Neumann,
    Tolerance,
    Unroll,
    data,
    models,
)
from banach.data import Batches, Flip
from banach.models import Cosine
from banach.train import Epoch, Run, Settings, fit
from banach.train.plot import plot_history
from banach.train.state import TrainState
from banach.train.steps import Steps
from fast.simulated import simulate_gpu
from train.parts_train import images, network, plain_network, same_weights, settings


def test_digits_are_learnt() -> None:
    net = network()
    made = Settings.of_recipe(models.recipe("digits"), epochs=3, device="cpu")
    history = fit(net, data.load("digits"), data.load("digits", "validation"), made)
    first, last = history.epochs[0], history.last
    assert history.finished
    assert [epoch.epoch for epoch in history.epochs] == [1, 2, 3]
    assert last.loss < 0.7 * first.loss
    assert last.validation_accuracy is not None
    assert last.validation_accuracy > 0.95
    assert last.converged == 1.0
    assert last.sigma is not None
    assert 0 < last.sigma < 1
    assert not net.training


MODES = [JFB(), Neumann(3), Unroll(2), Unroll(2, checkpoint=True), Implicit(), Implicit(GMRES())]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_backward_mode(mode: Any) -> None:
    net = network(batch_norm=False, backward=mode, tolerance=Tolerance(atol=1e-4, max_steps=60))
    history = fit(net, images(64), images(20, "validation"), settings(epochs=2))
    assert history.last.loss < history.epochs[0].loss
    assert net.backward == mode
    counted = {JFB(): 0, Neumann(3): 3 * 64, Unroll(2): 64, Unroll(2, checkpoint=True): 64}
    if mode in counted:
        assert history.last.products == counted[mode]
    else:
        assert history.last.products > 64


def test_implicit_still_reports_to_whom_it_did() -> None:
    reported: list[int] = []
    mode = Implicit(report=lambda products, residual, status: reported.append(products))
    net = plain_network(backward=mode)
    history = fit(net, images(32), images(20, "validation"), settings(epochs=2))
    assert len(reported) == 4
    assert sum(reported) == sum(epoch.products for epoch in history.epochs)


def test_the_figures_are_those_of_the_data() -> None:
    # Nothing is learnt at lr=0, so one pass over all images says what the epoch must have seen.
    train, validation, net = images(90), images(30, "validation"), plain_network(Tolerance(atol=1e-3, max_steps=6))
    epoch = fit(net, train, validation, settings(epochs=1, lr=0.0)).last
    for split, loss, accuracy in (
        (train, epoch.loss, epoch.accuracy),
        (validation, epoch.validation_loss, epoch.validation_accuracy),
    ):
        with torch.no_grad():
            output, found = net(split.normalise(split.pixels), solution=True)
        assert loss == pytest.approx(float(F.cross_entropy(output, split.labels)), rel=1e-9)
        assert accuracy == pytest.approx(float((output.argmax(1) == split.labels).double().mean()))
        if split is train:
            assert epoch.depth == pytest.approx(float(found.steps.double().mean()))
            assert epoch.max_depth == int(found.steps.max())
            assert epoch.residual == pytest.approx(float(found.residual.mean()))
            assert epoch.max_residual == pytest.approx(float(found.residual.max()))
            assert epoch.converged == pytest.approx(float(found.converged.double().mean()))


def by_hand(net: nn.Module, made: Settings, clip: float) -> None:
    """Two epochs of plain gradient descent with decay in the gradient."""
    batches = Batches(images(), made.batch_size, made.seed)
    for epoch in range(made.epochs):
        for x, y in batches.epoch(epoch):
            output = net(x)
            logs = output.log_softmax(1)
            right, all_ = logs.gather(1, y[:, None]).mean(), logs.mean()
            loss = -(0.9 * right + 0.1 * all_)
            weights = list(net.parameters())
            g = torch.autograd.grad(loss, weights)
            size = torch.sqrt(sum((part**2).sum() for part in g))  # type: ignore[arg-type]
            with torch.no_grad():
                for w, part in zip(weights, g, strict=True):
                    w.sub_(0.05 * (part * min(1.0, clip / (float(size) + 1e-6)) + 0.01 * w))


def test_a_loop_written_by_hand_gives_the_same() -> None:
    made = settings(optimizer="sgd", lr=0.05, weight_decay=0.01, label_smoothing=0.1, clip=0.3, batch_size=20)
    net, other = plain_network(), plain_network()
    fit(net, images(), images(20, "validation"), made)
    by_hand(other, made, clip=0.3)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert not same_weights(net, plain_network())


@pytest.mark.parametrize("parts", [2, 3, 50])
def test_accumulation_is_the_big_batch(parts: int) -> None:
    # 90 images make five batches of 20, the last one half as long.
    whole, cut = plain_network(), plain_network()
    for net, accumulate in ((whole, 1), (cut, parts)):
        fit(net, images(90), images(20, "validation"), settings(batch_size=20, accumulate=accumulate, clip=0.5))
    for a, b in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_bf16_trains_float32_weights() -> None:
    net = network(batch_norm=False, tolerance=Tolerance(atol=3e-2, max_steps=20))
    history = fit(net, images(), images(20, "validation"), settings(precision="bf16", epochs=3))
    assert history.last.loss < history.epochs[0].loss
    assert all(p.dtype == torch.float32 for p in net.parameters())
    other = network(batch_norm=False, tolerance=Tolerance(atol=3e-2, max_steps=20))
    fit(other, images(), images(20, "validation"), settings(epochs=3))
    assert not same_weights(net, other)


def test_a_network_without_a_fixed_point_and_the_explicit_twin() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    epoch = fit(plain, images(), images(20, "validation"), settings(monitor=True)).last
    assert (epoch.depth, epoch.residual, epoch.converged, epoch.sigma) == (None, None, None, None)
    twin = fit(network(explicit=True), images(), images(20, "validation"), settings(monitor=True)).last
    assert (twin.depth, twin.max_depth, twin.residual, twin.converged, twin.sigma) == (0.0, 0, None, None, None)


def test_what_the_monitor_cannot_measure_stops_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: Any, **__: Any) -> None:
        raise RuntimeError("derivative for aten::something is not implemented")

    monkeypatch.setattr(ContractionMonitor, "__call__", cannot)
    with pytest.warns(UserWarning, match="cannot be measured, so it is skipped: derivative for aten") as caught:
        history = fit(network(), images(), images(20, "validation"), settings(monitor=True))
    assert len(caught) == 1
    assert [epoch.sigma for epoch in history.epochs] == [None, None]


def test_the_monitor_changes_no_run_and_reads_what_it_should() -> None:
    on, off = network(), network()
    history = fit(on, images(), images(20, "validation"), settings(monitor=True))
    fit(off, images(), images(20, "validation"), settings(monitor=False))
    assert same_weights(on, off)
    monitor = ContractionMonitor(seed=0)
    monitor(on, images().normalise(images().pixels[:8]))
    assert history.last.sigma == pytest.approx(monitor.history[0].sigma)


def test_the_seed_decides_all_and_the_callers_numbers_stay() -> None:
    nets = [network(), network(), network()]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fit(nets[0], images(), images(20, "validation"), settings(seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    fit(nets[1], images(), images(20, "validation"), settings(seed=1))
    fit(nets[2], images(), images(20, "validation"), settings(seed=2))
    assert same_weights(nets[0], nets[1])
    assert not same_weights(nets[0], nets[2])


def test_without_validation_images_nothing_is_validated_and_the_weights_are_the_same(tmp_path: Path) -> None:
    held, bare = network(), network()
    fit(held, images(), images(20, "validation"), settings(epochs=2))
    last = fit(bare, images(), None, settings(epochs=2)).last
    assert same_weights(held, bare)
    assert last.validation_loss is last.validation_accuracy is last.validation_depth is None
    assert last.validation_converged is None
    assert Epoch.from_dict(last.to_dict()) == last
    assert plot_history([last], tmp_path / "plot.png").exists()


@pytest.mark.parametrize("place", ["train", "validation"])
def test_the_test_split_is_refused(place: str) -> None:
    given = {"train": images(), "validation": images(20, "validation"), place: images(20, "test")}
    with pytest.raises(ValueError, match=f"{place} is the test split"):
        fit(plain_network(), given["train"], given["validation"], settings())


class Questions(TorchDispatchMode):
    """Counts how often the host asks a tensor for its value."""

    asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_asks_nothing_between_steps() -> None:
    def asked(count: int) -> int:
        net = plain_network(Tolerance(max_steps=5, check_every=0))
        made = settings(epochs=1, optimizer="sgd", clip=1.0, ema=0.9)
        with Questions() as questions:
            fit(net, images(count), images(20, "validation"), made)
        return questions.asked

    assert asked(16) == asked(96)


def test_callbacks_get_every_epoch_and_the_plan_once(tmp_path: Path) -> None:
    epochs: list[Any] = []
    plans: list[Any] = []
    run = Run.create(tmp_path / "run", settings())
    calls: dict[str, Any] = {"on_epoch": epochs.append, "on_plan": plans.append}
    history = fit(plain_network(), images(32), images(20, "validation"), settings(), run=run, **calls)
    assert tuple(epochs) == history.epochs
    assert [str(plan.graph) for plan in plans] == ["no, the weights are on the CPU"]
    assert json.loads((run.path / "environment.json").read_text())["plan"] == plans[0].to_dict()


def test_what_is_told_after_an_epoch_is_not_the_next_ones_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback that takes long (a study that evaluates the test set, say) must not make epochs look slow."""
    import time

    real, gone = time.perf_counter, [0.0]
    monkeypatch.setattr("banach.train.state.time.perf_counter", lambda: real() + gone[0])

    def takes_an_hour(epoch: Any) -> None:
        gone[0] += 3600

    history = fit(network(), images(), images(20, "validation"), settings(epochs=3), on_epoch=takes_an_hour)
    assert max(epoch.seconds for epoch in history.epochs) < 1800


def test_captured_steps_read_batches_and_rates_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated GPU, over two epochs with a short last batch, against eager steps."""
    trained = []
    for fast in (False, True):
        made = settings(optimizer="sgd", lr=0.1, schedule=Cosine(), ema=0.5, batch_size=20, accumulate=2)
        net = plain_network(Tolerance(atol=1e-9, max_steps=60))
        work = TrainState(net, Batches(images(50), 20, augment=Flip()), None, made)
        if fast:
            simulate_gpu(monkeypatch, kernels=False)
            for group in work.optimizer.param_groups:
                group["lr"] = torch.tensor(group["lr"])
        steps = Steps(work)
        for index in range(6):
            work.epoch, work.step = divmod(index, 3)
            steps.take()
        assert bool(steps.plan.graph) == fast
        assert work.average is not None
        trained.append((*net.parameters(), *work.average.weights.values(), work.metrics.sums[:3]))
    for a, b in zip(*trained, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
