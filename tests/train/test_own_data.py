"""fit() on DataLoaders and other iterables, with any loss and metrics: figures, order, resume, captured steps.

As a script, `test_own_data.py KIND RUN STEP`, it begins a run and is killed at that step.
"""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from banach import ImplicitNetwork, Tolerance
from banach.train import CheckpointError, Epoch, History, Position, Run, Settings, evaluate, fit
from banach.train.plot import LEARNING, board, curves, draw
from train.parts_train import Contraction, capture_steps, figures, images, same_weights, settings, stop_at
from train.parts_train import network as classifier

ROOT = Path(__file__).resolve().parents[2]
MADE = settings(checkpoint_every=2, ema=0.9, lr=0.02)
STEPS = 4  # batches an epoch: 30 samples, 8 at a time
SYMBOLS, LENGTH = 5, 6


class Pairs(Dataset[Any]):
    """((a, b), y) with y = sin(a_1 + b_1), and noise from three generators in every sample."""

    def __init__(self, count: int = 30, noise: float = 1e-3) -> None:
        draw = torch.Generator().manual_seed(0)
        self.a, self.b = (torch.randn(count, 3, generator=draw) for _ in range(2))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.a)

    def __getitem__(self, i: int) -> Any:
        noise = self.noise * (torch.randn(1) + random.gauss(0, 1) + float(np.random.randn()))
        return (self.a[i], self.b[i]), torch.sin(self.a[i, :1] + self.b[i, :1]) + noise


class Words(Dataset[Any]):
    """(tokens, tokens of the reversed sequence)."""

    def __init__(self, count: int = 30) -> None:
        self.tokens = torch.randint(SYMBOLS, (count, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> Any:
        return self.tokens[i], self.tokens[i].flip(0)


class Sum(nn.Module):
    """Q for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 10), nn.Linear(3, 10)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.first(a) + self.second(b)


def network(seed: int = 0, kind: str = "regression") -> ImplicitNetwork:
    torch.manual_seed(seed)
    if kind == "regression":
        return ImplicitNetwork(Sum(), Contraction(10), nn.Linear(10, 1), tolerance=Tolerance(atol=1e-5))
    Q = nn.Sequential(nn.Embedding(SYMBOLS, 8), nn.Flatten(), nn.Linear(8 * LENGTH, 32))
    S = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, LENGTH * SYMBOLS), nn.Unflatten(1, (LENGTH, SYMBOLS)))
    return ImplicitNetwork(Q, Contraction(32), S, tolerance=Tolerance(atol=1e-5))


def error(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).abs()


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, targets)


def token_accuracy(output: Tensor, targets: Tensor) -> Tensor:
    return output.argmax(2) == targets


OBJECTIVE: dict[str, Any] = {"loss": F.mse_loss, "metrics": {"error": error}}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "regression": (Pairs, OBJECTIVE),
    "sequences": (Words, {"loss": token_loss, "metrics": {"accuracy": token_accuracy}}),
}


def loader(kind: str = "regression", **options: Any) -> DataLoader[Any]:
    return DataLoader(KINDS[kind][0](), batch_size=8, **{"shuffle": True, **options})


def train(
    net: nn.Module, run: Run | None = None, on_step: Any = None, *, kind: str = "regression", **options: Any
) -> History:
    """Train with a short last batch, and validate on the first half of it."""
    data, objective = KINDS[kind]
    held = DataLoader(data(16), batch_size=8)
    return fit(net, loader(kind, **options), held, MADE, run=run, on_step=on_step, **objective)


def batches(count: int = 3, size: int = 8) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    made = [torch.randn(size, 3, dtype=torch.float64, generator=draw) for _ in range(2 * count)]
    return [((a, b), (a + b).sum(1, keepdim=True)) for a, b in zip(made[::2], made[1::2], strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_regression_and_sequences_are_learnt(kind: str) -> None:
    data, held = loader(kind), loader(kind, shuffle=False)
    history = fit(network(kind=kind), data, held, Settings(epochs=30, lr=0.03, device="cpu"), **KINDS[kind][1])
    first, last = history.epochs[0], history.last
    assert last.loss < 0.2 * first.loss
    assert (last.converged, last.validation_converged) == (1.0, 1.0)
    assert last.sigma is not None
    if kind == "regression":
        assert (last.accuracy, last.validation_accuracy) == (None, None)
        assert last.validation_metrics["error"] < 0.5 * first.validation_metrics["error"]
    else:
        assert last.validation_accuracy is not None
        assert last.validation_accuracy > 0.95


def test_the_figures_are_those_of_the_data() -> None:
    """Nothing is learnt at lr=0. A metric gives values, or their mean, in batches of different sizes."""
    data, net = [*batches(2), *batches(1, size=3)], network().double()
    metrics: Any = {"error": error, "mean_error": lambda output, targets: error(output, targets).mean()}
    epoch = fit(net, data, data, settings(epochs=1, lr=0.0), loss=F.mse_loss, metrics=metrics).last
    a, b, y = (torch.cat(parts) for parts in zip(*[(*d, targets) for d, targets in data], strict=True))
    with torch.no_grad():
        off = net(a, b) - y
    wanted = dict.fromkeys(metrics, pytest.approx(float(off.abs().mean()), rel=1e-12))
    assert epoch.metrics == epoch.validation_metrics == wanted
    assert epoch.loss == epoch.validation_loss == pytest.approx(float(off.square().mean()), rel=1e-12)
    assert evaluate(net, data, loss=F.mse_loss, metrics=metrics).metrics == epoch.validation_metrics


def test_classes_from_a_loader_need_no_loss() -> None:
    """The same images as tensors, in the same order, give the same network as the image data set."""
    split = images(40)
    made, nets = settings(label_smoothing=0.1), [classifier(), classifier()]
    order = [split.take(index) for index in torch.arange(40).split(made.batch_size)]
    data = [(one.normalise(one.pixels), one.labels) for one in order]
    history = fit(nets[0], data, data, made)
    assert history.last.accuracy is not None
    assert evaluate(nets[0], data).accuracy == history.last.validation_accuracy
    assert evaluate(nets[0], split, batch_size=16) == evaluate(nets[0], data)


def generator() -> dict[str, Any]:
    return {"generator": torch.Generator().manual_seed(int(torch.randint(99, ())))}


# The order by the global generator, by the user's generators, by workers; all make noise.
LOADERS: dict[str, Any] = {
    "shuffled": dict,
    "a generator": generator,
    "a sampler": lambda: {"sampler": RandomSampler(Pairs(), **generator()), "shuffle": False},
    "workers": lambda: {"num_workers": 2},
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_run_ends_bit_by_bit_as_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole = network()
    wanted = train(whole, **LOADERS[name]())
    for step in (3, 7):
        path = tmp_path / str(step)
        with pytest.raises(KeyboardInterrupt):
            train(network(), Run.create(path, MADE), stop_at(step, STEPS), **LOADERS[name]())
        latest: Any = Run.open(path).latest()
        assert latest.position.step == 2  # within an epoch
        again = network(seed=9)
        history = train(again, Run.open(path), **LOADERS[name]())
        assert same_weights(again, whole)
        assert figures(history) == figures(wanted)
        assert Run.open(path).metrics() == history.epochs


@pytest.mark.parametrize(("kind", "step"), [("regression", 3), ("sequences", 7)])
def test_after_kill_9(kind: str, step: int, tmp_path: Path) -> None:
    path, script = tmp_path / "run", str(Path(__file__).resolve())
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    env["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # another number rounds differently
    done = subprocess.run([sys.executable, script, kind, str(path), str(step)], env=env, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    whole, again = network(kind=kind), network(seed=9, kind=kind)
    wanted, history = train(whole, kind=kind), train(again, Run.open(path), kind=kind)
    assert history.finished
    assert same_weights(again, whole)
    assert figures(history) == figures(wanted)


def test_epochs_have_their_own_order_and_the_seed_decides_it() -> None:
    class Seen(Pairs):
        def __getitem__(self, i: int) -> Any:
            seen.append(i)
            return super().__getitem__(i)

        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    orders, epochs = [], list[int]()
    for seed in (0, 0, 1):
        seen: list[int] = []
        torch.manual_seed(seed + 40)  # the caller's numbers do not matter
        data = DataLoader(Seen(), batch_size=8, shuffle=True)
        fit(network(), data, None, settings(seed=seed), loss=F.mse_loss)
        orders.append(seen)
    assert epochs == [0, 1] * 3
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0][:30]) == sorted(orders[0][30:]) == list(range(30))
    assert orders[0][:30] != orders[0][30:]


def test_the_callers_random_numbers_stay() -> None:
    net = network()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]
    train(net)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    np.testing.assert_equal(np.random.get_state(legacy=False)["state"], before[2])


@pytest.mark.parametrize("begin", [0, 3], ids=["from the start", "from the short batch"])
def test_captured_steps_read_the_batches_of_a_loader(
    begin: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a simulated GPU, against eager steps; the last batch is shorter, and a resume may begin with it."""
    made = settings(optimizer="sgd", lr=0.1, ema=0.5, checkpoint_every=1)
    trained = []
    for name in ("eager", "captured"):
        run, net = Run.create(tmp_path / name, made), network().double()
        data = [((a.double(), b.double()), y.double()) for (a, b), y in DataLoader(Pairs(noise=0), batch_size=8)]
        if name == "captured":
            capture_steps(monkeypatch)
        if begin:
            with pytest.raises(KeyboardInterrupt):
                fit(net, data, data, made, run=run, on_step=stop_at(begin + 1, STEPS), **OBJECTIVE)
            assert run.latest().position == Position(0, begin)  # type: ignore[union-attr]
        plans: list[Any] = []
        history = fit(net, data, data, made, run=run, on_plan=plans.append, **OBJECTIVE)
        assert bool(plans[-1].graph) == (name == "captured")
        trained.append((net, history.last))
    (eager, first), (captured, second) = trained
    torch.testing.assert_close([*captured.parameters()], [*eager.parameters()], rtol=1e-4, atol=1e-5)
    assert second.metrics["error"] == pytest.approx(first.metrics["error"], rel=1e-4)


def test_the_best_checkpoint_has_the_lowest_validation_loss(tmp_path: Path) -> None:
    made = settings(epochs=4, lr=5.0, keep=1, clip=None, optimizer="sgd")  # which does not converge
    run = Run.create(tmp_path / "run", made)
    data: Any = [(torch.ones(4, 2), torch.ones(4, 1))]
    history = fit(nn.Linear(2, 1), data, data, made, run=run, loss=F.l1_loss)
    losses: list[Any] = [epoch.validation_loss for epoch in history.epochs]
    best: Any = run.best()
    assert best.position.epoch == 1 + losses.index(min(losses))


def test_metrics_reach_every_file(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", MADE)
    history = train(network(), run)
    assert run.metrics() == history.epochs == tuple(Epoch.from_dict(one.to_dict()) for one in history.epochs)
    assert draw(curves({"": history.epochs}, LEARNING), tmp_path / "plot.png").exists()
    with board(tmp_path / "board") as write:
        write(history.last)
    written = b"".join(path.read_bytes() for path in (tmp_path / "board").iterdir())
    assert b"error/train" in written
    assert b"error/validation" in written


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"loss": F.l1_loss}, "started with loss="),
        ({"metrics": {}}, r"started with metrics=\['error'\], got \[\]"),
        ({"train": loader(drop_last=True)}, "started with train=DataLoader of 4 batches of 8, got"),
    ],
)
def test_a_run_resumes_only_with_its_data_and_objective(change: Any, match: str, tmp_path: Path) -> None:
    given = {"train": loader(), "validation": None, **OBJECTIVE}
    run = Run.create(tmp_path / "run", MADE)
    fit(network(), settings=MADE, run=run, **given)
    with pytest.raises(CheckpointError, match=match):
        fit(network(), settings=MADE, run=run, **{**given, **change})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_captured_steps_on_a_gpu() -> None:
    made = settings(device="cuda", epochs=3, optimizer="sgd", lr=0.05)
    plans: list[Any] = []
    ends = []
    for fast in (True, False):
        net = network().double()
        data = [((a.double(), b.double()), y.double()) for (a, b), y in DataLoader(Pairs(noise=0), batch_size=8)]
        changed = Settings(**{**vars(made), "fast": fast})
        ends.append(fit(net, data, data, changed, loss=F.mse_loss, metrics={"error": error}, on_plan=plans.append))
    assert [bool(plan.graph) for plan in plans] == [True, False]
    assert ends[0].last.loss == pytest.approx(ends[1].last.loss, rel=1e-6)
    assert ends[0].last.metrics["error"] == pytest.approx(ends[1].last.metrics["error"], rel=1e-6)


if __name__ == "__main__":
    kind, path, step = sys.argv[1:]

    def kill(position: Position) -> None:
        if position.epoch * STEPS + position.step == int(step):
            os.kill(os.getpid(), signal.SIGKILL)

    train(network(kind=kind), Run.create(Path(path), MADE), on_step=kill, kind=kind)


class Tokens(nn.Module):
    """Q: (batch, 5, 4) -> one row of the latent per token."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, d: Tensor) -> Tensor:
        rows: Tensor = self.inner(d.flatten(0, 1))
        return rows


class Means(Tokens):
    """S: the mean over the tokens of a sample, three scores."""

    def forward(self, u: Tensor) -> Tensor:
        return u.view(-1, 5, 6).mean(1)[:, :3]


def test_depths_are_means_over_the_rows_of_the_latent() -> None:
    """With five rows per sample the depth was five times too large, and 500% of the samples converged."""
    torch.manual_seed(0)
    net = ImplicitNetwork(Tokens(), Contraction(6), Means(), tolerance=Tolerance(atol=1e-5, max_steps=60))
    x, y = torch.randn(20, 5, 4), torch.arange(20) % 3
    found = net.eval()(x, solution=True)[1]
    totals = evaluate(net, [(x[:13], y[:13]), (x[13:], y[13:])])
    assert totals.depth == pytest.approx(float(found.steps.double().mean()))
    assert totals.residual == pytest.approx(float(found.residual.double().mean()), rel=1e-2)
    assert (totals.converged, totals.max_depth) == (1.0, int(found.steps.max()))


@pytest.mark.parametrize("count", [4, 3])
def test_soft_targets_have_an_accuracy(count: int) -> None:
    """Batches of probabilities raised an error, or gave a wrong accuracy if there were as many as classes."""
    torch.manual_seed(0)
    net, x = nn.Linear(4, 3), torch.randn(count, 4)
    y = net(x).detach().softmax(1)
    y[0] = y[0].roll(1)
    assert evaluate(net, [(x, y)]).accuracy == pytest.approx(1 - 1 / count)


def test_an_accuracy_of_nan_is_not_the_best(tmp_path: Path) -> None:
    """NaN in the first epoch made its checkpoint the best one for ever."""
    made, calls = settings(epochs=3, keep=1), [0]

    def accuracy(output: Tensor, targets: Tensor) -> Tensor:
        calls[0] += 1
        return torch.tensor(float("nan") if calls[0] <= 2 else 0.5)

    run = Run.create(tmp_path / "run", made)
    data: Any = [(torch.ones(4, 2), torch.ones(4, 1))]
    fit(nn.Linear(2, 1), data, data, made, run=run, loss=F.l1_loss, metrics={"accuracy": accuracy})
    best = run.best()
    assert best is not None
    assert best.position.epoch == 2
