"""fit(): it learns, in every mode and by every optimizer, as a loop by hand does, and reports what happened."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from banach import GMRES, JFB, ContractionMonitor, Implicit, ImplicitNetwork, Neumann, Tolerance, Unroll
from banach.data import Batches, Flip
from banach.models import Constant, Cosine, OneCycle, Steps
from banach.train import Average, Epoch, Run, Settings, finite, fit
from banach.train.plot import LEARNING, curves, draw
from banach.train.state import TrainState
from banach.train.steps import Feed
from fast.simulated import EagerCalls, EagerGraphs
from train.parts_train import capture_steps, images, network, plain_network, same_weights, settings

HELD = images(20, "validation")


def test_log_and_callbacks_get_the_plan_every_epoch_and_a_resumption(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", "banach")
    made, epochs, plans = settings(epochs=2), list[Any](), list[Any]()
    calls: dict[str, Any] = {"on_epoch": epochs.append, "on_plan": plans.append}
    for run in (Run.create(tmp_path, made), Run(tmp_path, made)):
        history = fit(network(), images(16), HELD, made, run=run, **calls)
    plan, *lines = [record.getMessage() for record in caplog.records]
    last = history.last
    assert tuple(epochs) == history.epochs
    assert [plan] == [str(one) for one in plans]
    assert plan.startswith("training step on cpu")
    assert json.loads((tmp_path / "environment.json").read_text())["plan"] == plans[0].to_dict()
    assert lines[0].startswith("epoch 1 of 2: loss ")
    assert lines[1].startswith(f"epoch 2 of 2: loss {last.loss:.4g}, validation loss {last.validation_loss:.4g}")
    assert lines[1].endswith(f", depth {last.depth:.4g}")
    assert lines[2] == f"resume {tmp_path} at epoch-00002-step-0000000"
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("whole", ["", "net", "parts"])
def test_parts_in_eval_mode_stay_so(whole: str) -> None:
    """A pretrained Q with frozen batch norm was put into train mode, and lost its statistics.

    A network that is in eval mode as a whole, as `fit` leaves it, is trained as a whole. So is a new one that is
    made of the parts of such a network.
    """
    net: Any = network()
    made = settings(epochs=2, accumulate=2, on_nonfinite="skip")
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    frozen = [module for module in net.Q.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) > len(frozen) > 0
    (net if whole else net.Q).eval()
    if whole == "parts":
        net = ImplicitNetwork(net.Q, net.R, net.S, tolerance=net.tolerance)
    modes = list[bool]()
    net.Q.register_forward_hook(lambda *_: modes.append(frozen[0].training) if net.training else None)
    fit(net, images(64), HELD, made)
    assert modes == [bool(whole)] * len(modes) != []
    for norm in norms:
        assert bool(norm.num_batches_tracked) == (bool(whole) or norm not in frozen)


MODES = [JFB(), Neumann(3), Unroll(2), Unroll(2, checkpoint=True), Implicit(), Implicit(GMRES())]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_backward_mode(mode: Any) -> None:
    net = network(batch_norm=False, backward=mode, tolerance=Tolerance(atol=1e-4, max_steps=60))
    history = fit(net, images(64), HELD, settings(epochs=2))
    assert history.last.loss < history.epochs[0].loss
    assert not net.training
    assert net.backward == mode
    counted = {JFB(): 0, Neumann(3): 3 * 64, Unroll(2): 64, Unroll(2, checkpoint=True): 64}
    if mode in counted:
        assert history.last.products == counted[mode]
    else:
        assert history.last.products > 64


def test_implicit_still_calls_the_users_report() -> None:
    reported: list[int] = []
    net = plain_network(backward=Implicit(report=lambda products, *_: reported.append(products)))
    history = fit(net, images(32), HELD, settings(epochs=2))
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


OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def by_hand(net: nn.Module, made: Settings, optimizer: torch.optim.Optimizer) -> None:
    """Two epochs, with label smoothing and clipping written out."""
    for epoch in range(made.epochs):
        for x, y in Batches(images(), made.batch_size, made.seed).epoch(epoch):
            logs = net(x).log_softmax(1)
            loss = -(0.9 * logs.gather(1, y[:, None]).mean() + 0.1 * logs.mean())
            weights = list(net.parameters())
            g = torch.autograd.grad(loss, weights)
            size = torch.sqrt(sum((part**2).sum() for part in g))  # type: ignore[arg-type]
            for w, part in zip(weights, g, strict=True):
                w.grad = part * min(1.0, 0.3 / (float(size) + 1e-6))
            optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_written_by_hand_gives_the_same(name: str) -> None:
    more: Any = {"momentum": 0.9} if name == "sgd" else {}
    made = settings(
        optimizer=name, lr=0.02, weight_decay=0.1, label_smoothing=0.1, clip=0.3, batch_size=20, epochs=2, **more
    )
    net, other = plain_network(), plain_network()
    history = fit(net, images(), HELD, made)
    by_hand(other, made, OPTIMIZERS[name](other.parameters(), lr=0.02, weight_decay=0.1, **more))
    torch.testing.assert_close([*net.parameters()], [*other.parameters()], rtol=1e-9, atol=1e-11)
    assert history.last.loss < history.epochs[0].loss


@pytest.mark.parametrize("parts", [3, 50])
def test_accumulation_is_the_big_batch(parts: int) -> None:
    # 90 images make five batches of 20, the last one half as long.
    whole, cut = plain_network(), plain_network()
    for net, accumulate in ((whole, 1), (cut, parts)):
        fit(net, images(90), HELD, settings(batch_size=20, accumulate=accumulate, clip=0.5))
    torch.testing.assert_close([*cut.parameters()], [*whole.parameters()], rtol=1e-9, atol=1e-11)


def test_a_network_without_a_fixed_point_and_the_explicit_twin() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    epoch = fit(plain, images(), HELD, settings(monitor=True, epochs=1)).last
    assert (epoch.depth, epoch.residual, epoch.converged, epoch.sigma) == (None, None, None, None)
    twin = fit(network(explicit=True), images(), HELD, settings(monitor=True, epochs=1)).last
    assert (twin.depth, twin.max_depth, twin.residual, twin.converged, twin.sigma) == (0.0, 0, None, None, None)


def test_what_the_monitor_cannot_measure_stops_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: Any, **__: Any) -> None:
        raise RuntimeError("derivative for aten::something is not implemented")

    monkeypatch.setattr(ContractionMonitor, "__call__", cannot)
    with pytest.warns(UserWarning, match="cannot be measured, so it is skipped: derivative for aten") as caught:
        history = fit(network(), images(), HELD, settings(monitor=True))
    assert len(caught) == 1
    assert [epoch.sigma for epoch in history.epochs] == [None, None]


def test_the_monitor_changes_no_run_and_reads_what_it_should() -> None:
    on, off = network(), network()
    history = fit(on, images(), HELD, settings(monitor=True))
    fit(off, images(), HELD, settings(monitor=False))
    assert same_weights(on, off)
    monitor = ContractionMonitor(seed=0)
    monitor(on, images().normalise(images().pixels[:8]))
    assert history.last.sigma == pytest.approx(monitor.history[0].sigma)


def test_the_seed_decides_all_and_the_callers_numbers_stay() -> None:
    nets = [network(), network(), network()]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fit(nets[0], images(), HELD, settings(seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    fit(nets[1], images(), HELD, settings(seed=1))
    fit(nets[2], images(), HELD, settings(seed=2))
    assert same_weights(nets[0], nets[1])
    assert not same_weights(nets[0], nets[2])


def test_without_validation_images_nothing_is_validated_and_the_weights_are_the_same(tmp_path: Path) -> None:
    held, bare = network(), network()
    fit(held, images(), HELD, settings(epochs=2))
    last = fit(bare, images(), None, settings(epochs=2)).last
    assert same_weights(held, bare)
    assert last.validation_loss is last.validation_accuracy is last.validation_depth is None
    assert last.validation_converged is None
    assert Epoch.from_dict(last.to_dict()) == last
    assert draw(curves({"": [last]}, LEARNING), tmp_path / "plot.png").exists()


@pytest.mark.parametrize("place", ["train", "validation"])
def test_the_test_split_is_refused(place: str) -> None:
    given = {"train": images(), "validation": HELD, place: images(20, "test")}
    with pytest.raises(ValueError, match=f"{place} is the test split"):
        fit(plain_network(), given["train"], given["validation"], settings())


class Syncs(TorchDispatchMode):
    """Counts host syncs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_there_is_no_host_sync_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(finite._EVERY, "cpu", 100)  # as on a GPU

    def syncs(count: int) -> int:
        net = plain_network(Tolerance(max_steps=5, check_every=0))
        with Syncs() as found:
            fit(net, images(count), HELD, settings(epochs=1, optimizer="sgd", clip=1.0, ema=0.9))
        return found.count

    assert syncs(16) == syncs(96)


def test_the_time_of_a_callback_is_not_that_of_the_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    real, gone = time.perf_counter, [0.0]
    monkeypatch.setattr("banach.train.state.time.perf_counter", lambda: real() + gone[0])

    def takes_an_hour(epoch: Any) -> None:
        gone[0] += 3600

    history = fit(network(), images(), HELD, settings(epochs=3), on_epoch=takes_an_hour)
    assert max(epoch.seconds for epoch in history.epochs) < 1800


@pytest.mark.parametrize("count", [50, 20])
def test_captured_steps_read_batches_and_rates_from_the_device(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a simulated GPU, over two epochs, against eager steps.

    The last batch is short, or there is only one: then a warm-up is longer than an epoch.
    """
    made = settings(optimizer="sgd", lr=0.1, schedule=Cosine(), ema=0.5, batch_size=20, accumulate=2)
    trained, plans = [], list[Any]()
    for captured in (False, True):
        if captured:
            capture_steps(monkeypatch)
        net = plain_network(Tolerance(atol=1e-9, max_steps=60))
        history = fit(net, images(count), None, made, augment=Flip(), on_plan=plans.append)
        trained.append((*net.parameters(), torch.tensor(history.last.loss)))
    assert [bool(plan.graph) for plan in plans] == [False, True]
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-6)


def test_captured_steps_follow_what_on_epoch_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for captured in (False, True):
        if captured:
            capture_steps(monkeypatch)
        net = plain_network(Tolerance(atol=1e-9, max_steps=60))
        exact = Implicit(tolerance=Tolerance(atol=1e-10, max_steps=100))
        made = settings(optimizer="sgd", lr=0.1)
        fit(net, images(), None, made, on_epoch=lambda epoch: setattr(net, "backward", exact))  # noqa: B023
        trained.append([*net.parameters()])
    torch.testing.assert_close(*trained)


def test_a_capture_that_failed_in_training_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation tried it too, and issued a second warning."""
    tried = []

    def refuse(self: Any, *rest: Any) -> None:
        tried.append(type(self).__name__)
        raise RuntimeError("not permitted when stream is capturing")

    capture_steps(monkeypatch)
    monkeypatch.setattr(EagerGraphs, "capture", refuse)
    monkeypatch.setattr(EagerCalls, "_capture", refuse)
    with pytest.warns(UserWarning, match="the training step could not be captured .*: not permitted") as said:
        fit(plain_network(), images(), HELD, settings(optimizer="sgd"))
    assert (tried, len(said)) == (["EagerGraphs"], 1)


def test_a_batch_far_larger_than_the_data_needs_no_more_memory() -> None:
    made = settings(batch_size=10**6)
    batches = Batches(images(20), made.batch_size)
    feed = Feed(TrainState(plain_network(), batches, None, made))
    assert max(value.numel() for value in feed.next_parts()) == 20


def test_one_cycle_goes_up_and_down() -> None:
    cycle = OneCycle(warm=0.25, start=0.1, end=0.01)
    at_3 = 0.01 + 0.99 * (1 + math.cos(math.pi / 6)) / 2
    for epoch, expected in ((0, 0.1), (1, 0.55), (2, 1.0), (3, at_3), (5, 0.505), (8, 0.01)):
        assert cycle.multiplier(epoch, 8) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Constant(), [1, 1, 1, 1]),
        (Steps((2,), 0.1), [1, 1, 0.1, 0.1]),
        (Cosine(), [(1 + math.cos(math.pi * (e + 5 / 6) / 4)) / 2 for e in range(4)]),
    ],
)
def test_the_rate_of_every_epochs_last_step(schedule: object, expected: list[float]) -> None:
    # Six batches an epoch: the last step of epoch e begins when e + 5/6 epochs are done.
    history = fit(plain_network(), images(), HELD, settings(epochs=4, schedule=schedule, lr=0.01))
    assert [epoch.lr for epoch in history.epochs] == pytest.approx([0.01 * x for x in expected])


def test_the_average_of_a_path() -> None:
    net, decay = nn.Linear(1, 1, bias=False).double(), 0.8
    with torch.no_grad():
        net.weight.fill_(1.0)
        average = Average(net, decay)
        path = [2.0, -1.0, 5.0]
        for value in path:
            net.weight.fill_(value)
            average.update(net)
    expected = decay**3 + sum((1 - decay) * decay ** (2 - i) * value for i, value in enumerate(path))
    with average.inside(net):
        assert float(net.weight.detach()) == pytest.approx(expected, rel=1e-14)
    assert float(net.weight.detach()) == 5.0


def test_the_average_is_validated_and_stays() -> None:
    """A decay near 1 is the start, though training itself goes on."""
    net, start = plain_network(), fit(plain_network(), images(), HELD, settings(lr=0.0, epochs=1)).last
    last = fit(net, images(), HELD, settings(ema=1 - 1e-15)).last
    torch.testing.assert_close(net.state_dict(), plain_network().state_dict(), rtol=0, atol=1e-12)
    assert last.validation_loss == pytest.approx(start.validation_loss, rel=1e-10)
    assert last.loss < start.loss
