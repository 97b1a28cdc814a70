"""Training that diverges: it stops, skips or rewinds, eager and captured, and the last good checkpoint stays."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import ImplicitNetwork, Tolerance
from banach.data import Batches, Images
from banach.models import Steps
from banach.train import DivergenceError, Position, Run, Settings, evaluate, finite, fit
from banach.train.checkpoint import checkpoints, nonfinite, read_checkpoint
from train.parts_train import Contraction, Double, capture_steps, images, plain_network, same_weights, settings

HELD = images(20, "validation")
SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "lr": 0.05}


class _Break(torch.autograd.Function):
    """Returns x; its gradient is NaN for the samples of `bad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: Tensor) -> Tensor:
        ctx.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.where(ctx.saved_tensors[0], math.nan, grads[0]), None


class Marked(nn.Module):
    """Ends Q with batch norm. The image that is all white makes its values or their gradient NaN, in training."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.flat = what, nn.Flatten()
        self.linear, self.norm = nn.Linear(64, 12).double(), nn.BatchNorm1d(12).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.flat(x)
        bad = ((x == x[:, :1]).all(1, keepdim=True)) & self.training
        y = self.linear(x)
        if self.what == "gradient":
            y = _Break.apply(y, bad)
        out: Tensor = self.norm(torch.where(bad, math.nan, y) if self.what == "data" else y)
        return out


def network(what: str = "", tolerance: Tolerance | None = None) -> ImplicitNetwork:
    torch.manual_seed(0)
    Q, S = nn.Sequential(Double(), Marked(what)), nn.Linear(12, 10).double()
    return ImplicitNetwork(Q, Contraction(12).double(), S, tolerance=tolerance or Tolerance(max_steps=60))


def marked() -> Images:
    """96 images, of which one is all white."""
    whole = images()
    pixels = whole.pixels.clone()
    pixels[40] = 255
    return replace(whole, pixels=pixels)


def bad_step(made: Settings, epoch: int = 0) -> int:
    """The step, from 1, whose batch holds the white image."""
    batches = Batches(marked(), made.batch_size, made.seed)
    order = batches.order(epoch).tolist()
    return order.index(40) // made.batch_size + 1


@pytest.fixture(params=[False, True], ids=["eager", "captured"])
def captured(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Take eager steps, then those captured on a simulated GPU, which are read seldom."""
    if request.param:
        capture_steps(monkeypatch)
        monkeypatch.setitem(finite._EVERY, "cpu", 100)
    return bool(request.param)


def quietly(call: Callable[[], Any]) -> Any:
    """Solves warn of NaN before training stops; what `fit` itself says is tested where it matters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def latest(run: Run) -> Any:
    return run.latest()


def poke(part: str, position: Position, net: Any) -> Callable[[Position], None]:
    """Make a weight or a buffer infinite after a step."""

    def on_step(now: Position) -> None:
        if now == position:
            tensor = net.S.weight if part == "weight" else net.Q[1].norm.running_var
            tensor.detach()[0] = math.inf

    return on_step


CAUSES = {
    "data": "the loss",
    "gradient": r"the gradient of Q\.1\.linear\.weight",
    "weight": "the loss",
    "buffer": r"the buffer Q\.1\.norm\.running_var",
    "rate": "the (loss|weight|gradient|buffer)",
}


@pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "explicit"])
@pytest.mark.parametrize("kind", CAUSES)
@pytest.mark.usefixtures("captured")
def test_a_divergence_stops_training_and_names_step_and_cause(
    kind: str, explicit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN trained to the end before, overwrote all checkpoints, and the run exited with 0."""
    late = {"schedule": Steps((1,), 1e300)} if kind == "rate" else {}
    made = settings(**SGD, epochs=4, checkpoint_every=1, **late)
    run = Run.create(tmp_path / "run", made)
    net = network(kind, Tolerance(max_steps=0) if explicit else None)
    data, on_step = (marked(), None) if kind in ("data", "gradient") else (images(), None)
    if kind in ("weight", "buffer"):
        monkeypatch.setattr(fit.__globals__["Run"], "save", _unless(Position(1, 2), Run.save))
        on_step = poke(kind, Position(1, 2), net)
    step, epoch = {"rate": (r"[12]", 2), "weight": ("3", 2), "buffer": ("3", 2)}.get(kind, (bad_step(made), 1))
    expected = rf"(?:{CAUSES[kind]}).* became NaN or infinite in step {step} of epoch {epoch}; .*--lr"
    with pytest.raises(DivergenceError, match=expected) as caught:
        quietly(lambda: fit(net, data, HELD, made, run=run, on_step=on_step))
    assert str(latest(run).path) in str(caught.value)
    assert all(nonfinite(read_checkpoint(path).tensors) is None for path in checkpoints(run.path / "checkpoints"))
    assert len(run.metrics()) == epoch - 1


def _unless(position: Position, save: Any) -> Any:
    """Run.save, but for the position at which the test itself breaks the state."""

    def guarded(run: Run, now: Position, tensors: Any, state: Any) -> None:
        if now != position:
            save(run, now, tensors, state)

    return guarded


def by_hand(net: Any, made: Settings, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Train without the batch that holds the white image, by SGD if no optimizer is given."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=made.lr, momentum=made.momentum)
    for epoch in range(made.epochs):
        for step, (x, y) in enumerate(Batches(marked(), made.batch_size, made.seed).epoch(epoch), 1):
            if step != bad_step(made, epoch):
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()


@pytest.mark.parametrize("kind", ["data", "gradient"])
def test_a_skipped_batch_changes_nothing(kind: str, captured: bool) -> None:
    """Neither weights, momentum, batch norm's statistics nor the loss of the epoch, against a loop by hand."""
    made = settings(**SGD, on_nonfinite="skip")
    reference, net = network(), network(kind)
    by_hand(reference.train(), made)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        history = fit(net, marked(), HELD, made)
    texts = [str(one.message) for one in said if "skipped" in str(one.message)]
    steps = [f"in step {bad_step(made, epoch)} of epoch {epoch + 1}" for epoch in (0, 1)]
    assert [text.startswith("skipped one batch") for text in texts] == [True, True]
    assert [step in text for step, text in zip(steps, texts, strict=True)] == [True, True]
    near: Any = {"rtol": 1e-6, "atol": 1e-8} if captured else {"rtol": 0, "atol": 1e-12}  # captured rates are fp32
    torch.testing.assert_close(net.state_dict(), reference.state_dict(), **near)
    assert all(math.isfinite(epoch.loss) for epoch in history.epochs)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_first_step_can_be_skipped(optimizer: str) -> None:
    """The optimizer has no state before it; Adam counted the step and kept NaN."""
    adam = optimizer == "adam"
    made = settings(epochs=1, on_nonfinite="skip", **({"optimizer": "adam"} if adam else SGD))
    made = replace(made, seed=next(s for s in range(99) if bad_step(replace(made, seed=s)) == 1))
    net, reference = network("data"), network().train()
    by_hand(reference, made, torch.optim.Adam(reference.parameters(), lr=made.lr) if adam else None)
    quietly(lambda: fit(net, marked(), HELD, made))
    torch.testing.assert_close(net.state_dict(), reference.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("captured")
def test_an_epoch_without_a_usable_batch_stops() -> None:
    net = network()
    net.S.weight.detach()[0] = math.nan
    with pytest.raises(
        DivergenceError, match=r"no batch of the epoch could be used: .*the loss became NaN"
    ) as said:
        quietly(lambda: fit(net, images(), HELD, settings(**SGD, on_nonfinite="skip")))
    assert str(said.value).endswith("or choose --on-nonfinite rewind"), "not skip"


class Fuse(nn.Linear):
    """Gives NaN if a weight is larger than 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.where(self.weight.abs().max() > 1, math.nan, 0.0)


def fused() -> ImplicitNetwork:
    net = plain_network(Tolerance(max_steps=60))
    torch.manual_seed(0)
    net.S = Fuse(12, 10).double()
    return net


@pytest.mark.usefixtures("captured")
@pytest.mark.filterwarnings("ignore::banach.ConvergenceWarning")
def test_a_rewind_goes_on_with_a_tenth_of_the_rate(tmp_path: Path) -> None:
    """From the first checkpoint, which is the start: the same as a run with a tenth of the rate."""
    made = settings(optimizer="sgd", lr=4.0, on_nonfinite="rewind")
    slow, reference = replace(made, lr=made.lr * 0.1, on_nonfinite="stop"), fused()
    expected = fit(reference, images(), HELD, slow)
    run, net = Run.create(tmp_path / "run", made), fused()
    with pytest.warns(RuntimeWarning, match="back to epoch-00000-step-0000000 with the learning rate times 0.1"):
        history = fit(net, images(), HELD, made, run=run)
    torch.testing.assert_close(net.state_dict(), reference.state_dict(), rtol=1e-6, atol=1e-8)
    assert history.last.lr == pytest.approx(slow.lr)
    assert [epoch.loss for epoch in history.epochs] == pytest.approx([epoch.loss for epoch in expected.epochs])
    again = fused()
    assert fit(again, images(), HELD, made, run=Run.open(run.path)).last.lr == history.last.lr
    assert same_weights(again, net)


def test_a_rewind_that_does_not_help_stops(tmp_path: Path) -> None:
    made = settings(**SGD, on_nonfinite="rewind", schedule=Steps((1,), 1e300), epochs=3)
    run = Run.create(tmp_path / "run", made)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(DivergenceError, match="of epoch 2; the last good checkpoint is"):
            fit(network(), images(), HELD, made, run=run)
    assert sum("back to epoch-00001" in str(one.message) for one in said) == finite.REWINDS
    assert latest(run).position == Position(1, 0)
    with pytest.raises(ValueError, match="'rewind' needs checkpoints; pass run="):
        fit(network(), images(), HELD, made)


@pytest.mark.usefixtures("captured")
def test_an_epoch_in_which_nothing_converges_warns_once() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(network("", Tolerance(atol=1e-9, max_steps=2)), images(), HELD, settings(epochs=3))
    texts = [str(one.message) for one in said if "of the samples converged" in str(one.message)]
    assert texts == ["in epoch 1 only 0.0% of the samples converged; try more max_steps or a larger tolerance"]


class Wrapped(nn.parallel.DistributedDataParallel):
    """The wrapper without a process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, *d: Any, **options: Any) -> Any:
        return self.module(*d, **options)


@pytest.mark.filterwarnings("ignore:the fixed point was not found")
def test_an_epoch_of_a_network_in_ddp_in_which_nothing_converges_warns_too() -> None:
    """It was an AttributeError: a wrapper has no tolerance."""
    net = Wrapped(plain_network(Tolerance(atol=1e-12, max_steps=2)))
    with pytest.warns(match=r"in epoch 1 only 0.0% of the samples converged"):
        assert fit(net, images(), HELD, settings(epochs=1)).last.validation_converged == 0


def test_a_state_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    """It was broken after the last step of an epoch, which itself was finite."""
    made, net = settings(), network()
    run = Run.create(tmp_path / "run", made)
    with pytest.raises(DivergenceError, match=r"net\.S\.weight is NaN or infinite, so no checkpoint is written"):
        quietly(lambda: fit(net, images(), HELD, made, run=run, on_step=poke("weight", Position(1, 6), net)))
    assert latest(run).position == Position(1, 0)


def test_a_checkpoint_that_is_not_finite_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions wrote some."""
    made, net = settings(), network()
    run = Run.create(tmp_path / "run", made)
    with monkeypatch.context() as older:
        older.setattr("banach.train.checkpoint.nonfinite", lambda tensors: None)
        quietly(lambda: fit(net, images(), HELD, made, run=run, on_step=poke("weight", Position(1, 6), net)))
    with pytest.warns(RuntimeWarning, match=r"NaN or infinity in net\.S\.weight.*the one before it is tried"):
        assert latest(run).position == Position(1, 0)
    with pytest.warns(RuntimeWarning, match="had diverged"):
        assert fit(network(), images(), HELD, made, run=run).finished
    assert run.latest() is not None
    for path in checkpoints(run.path / "checkpoints"):
        path.rename(path.with_name(path.name.replace("epoch-", "other-")))
    assert run.latest() is None


def test_figures_over_nan_do_not_claim_convergence() -> None:
    net = network()
    net.S.weight.detach()[0] = math.nan  # the fixed point is found, and the answer is NaN
    found = evaluate(net, HELD)
    assert math.isnan(found.loss)
    assert math.isnan(float(found.converged or 0))


def test_the_best_checkpoint_on_validation_is_kept(tmp_path: Path) -> None:
    made = settings(epochs=6, keep=1, lr=0.02)
    run = Run.create(tmp_path / "run", made)
    history = fit(network(), images(), images(60, "validation"), made, run=run)
    scores = [epoch.validation_accuracy or 0 for epoch in history.epochs]
    best = Position(scores.index(max(scores)) + 1, 0)
    kept = [path.name for path in checkpoints(run.path / "checkpoints")]
    assert kept == sorted({best.name, Position(6, 0).name})
    found: Any = run.best()
    assert found.position == best


def test_the_policy_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    made = settings(**SGD, checkpoint_every=1)
    run = Run.create(tmp_path / "run", made)
    with pytest.raises(DivergenceError):
        quietly(lambda: fit(network("data"), marked(), HELD, made, run=run))
    skip = replace(made, on_nonfinite="skip")
    assert quietly(lambda: fit(network("data"), marked(), HELD, skip, run=run)).finished


class Mixed(nn.Module):
    """Q(d) = A W d, A sparse, or None for the dense one."""

    def __init__(self, layout: Any, *, persistent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        A = torch.rand(12, 12, dtype=torch.float64).triu(8)
        self.register_buffer("A", A if layout is None else A.to_sparse(layout=layout), persistent=persistent)
        self.linear = nn.Linear(64, 12).double()

    def forward(self, d: Tensor) -> Tensor:
        mixed: Tensor = self.A @ self.linear(d.flatten(1).double()).mT
        return mixed.mT


def sparse_network(layout: Any, **options: Any) -> ImplicitNetwork:
    net = plain_network()
    net.Q = Mixed(layout, **options)
    return net


@pytest.mark.filterwarnings("ignore:Sparse", "ignore::banach.ConvergenceWarning")
@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_the_values_of_a_sparse_buffer_are_watched(layout: Any, policy: str, tmp_path: Path) -> None:
    """No maximum of a sparse tensor is implemented, so that fit failed at its first step."""
    made, nets = settings(epochs=1, on_nonfinite=policy), [sparse_network(one) for one in (layout, None)]
    losses = [fit(net, images(), None, made).last.loss for net in nets]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for got, wanted in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match=r"holds dense tensors, got Q\.A; register it with"):
        fit(sparse_network(layout, persistent=True), images(), None, made, run=Run.create(tmp_path / "run", made))
    values: Any = nets[0].get_buffer("Q.A")
    (values._values() if layout is torch.sparse_coo else values.values())[3] = torch.nan
    with pytest.raises(DivergenceError, match=r"in step 1 of epoch 1"):
        fit(nets[0], images(), None, made)


def test_a_sparse_gradient_is_watched() -> None:
    """Of an embedding with sparse=True, which SGD takes."""
    nets = list[nn.Module]()
    data = [(torch.arange(12).reshape(4, 3), torch.arange(4) % 2), (torch.full((2, 3), 7), torch.arange(2))]
    for sparse in (True, False):
        torch.manual_seed(0)
        Q = nn.Sequential(nn.Embedding(20, 4, sparse=sparse), nn.Flatten())
        nets.append(ImplicitNetwork(Q, Contraction(12), nn.Linear(12, 2)))
        fit(nets[-1], data, None, settings(optimizer="sgd", lr=0.1))
    for got, wanted in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(got, wanted)
