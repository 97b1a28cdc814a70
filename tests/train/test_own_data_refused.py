"""Data, losses, outputs and targets that fit(), evaluate() and TrainStep refuse, each in a sentence."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from banach import ImplicitNetwork
from banach.data import Flip
from banach.fast import TrainStep
from banach.fast.plan import plan
from banach.train import evaluate, fit
from banach.train.distributed import Ranks
from banach.train.metrics import cross_entropy
from train.parts_train import Contraction, settings
from train.test_own_data import batches, network


class Short(list[Any]):
    def __len__(self) -> int:
        return 5


X, Y = torch.zeros(4, 3), torch.zeros(4, 1)
BAD: list[tuple[Any, type[Exception], str]] = [
    ((one for one in batches()), TypeError, "with a length, got generator without one; collect the batches"),
    (3, TypeError, "got int"),
    ([], ValueError, "list has no batches"),
    (Short([((X, X), Y)] * 3), ValueError, "the data gave 3 batches, but its length is 5"),
    ([X], TypeError, r"a batch must be \(inputs, targets\).*, got Tensor"),
    (DataLoader(TensorDataset(X, X, Y)), TypeError, "got list of 3"),
    ([(X, 1.0)], TypeError, "got float in it"),
    ([({"a": X}, Y)], TypeError, "got dict in it"),
    (DataLoader(TensorDataset(X, Y[:, 0]), batch_size=None), ValueError, "targets need a batch axis"),
]


@pytest.mark.parametrize(("data", "kind", "match"), BAD)
def test_other_data_are_refused(data: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        fit(network(), data, None, settings(), loss=F.mse_loss)


def test_what_does_not_apply_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    with pytest.raises(ValueError, match="label_smoothing applies to cross entropy"):
        fit(net, batches(), None, settings(label_smoothing=0.1), loss=F.mse_loss)
    with pytest.raises(ValueError, match=r"got one output and torch\.float64 targets; .* pass loss= for"):
        fit(network().double(), batches(), None, settings())
    with pytest.raises(ValueError, match="augment applies to Images, got list of 3 batches"):
        fit(net, batches(), None, settings(), loss=F.mse_loss, augment=Flip())
    metrics: Any = {"size": lambda output, targets: 1.0}
    with pytest.raises(TypeError, match="the metric size must return a tensor, got float"):
        fit(net.double(), batches(), None, settings(), loss=F.mse_loss, metrics=metrics)
    monkeypatch.setattr(Ranks, "here", lambda: Ranks(0, 2))
    with pytest.raises(ValueError, match="2 ranks can train on Images only, got list; start one process"):
        fit(net, batches(), None, settings(), loss=F.mse_loss)


def ways(net: nn.Module, data: list[Any], loss: Any = None) -> list[Any]:
    """Return functions that use a loss: fit, evaluate and a step of one's own."""

    def take_step() -> None:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        step = TrainStep(net, optimizer, loss or cross_entropy, how=plan(net, torch.device("cpu")))
        step(*data[0])

    made = settings(epochs=1)
    return [lambda: fit(net, data, None, made, loss=loss), lambda: evaluate(net, data, loss=loss), take_step]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            lambda y, targets: F.mse_loss(y, targets).item(),
            "into one number, got float; take its mean, as",
        ),
        (lambda y, targets: (y - targets).square(), r"into one number, got \(8, 1\); take its mean"),
    ],
)
def test_a_loss_that_is_not_a_mean_is_refused_in_a_sentence(loss: Any, said: str) -> None:
    """It was an AttributeError, or an error of torch.stack."""
    for use in ways(network().double(), batches(1), loss):
        with pytest.raises(ValueError, match=said):
            use()


def test_a_loss_without_a_gradient_is_refused_in_a_sentence() -> None:
    """Evaluation needs none."""
    learn, score, take_step = ways(
        network().double(), batches(1), lambda y, targets: F.mse_loss(y.detach(), targets)
    )
    for use in (learn, take_step):
        with pytest.raises(ValueError, match="loss must depend on the network's weights, got a constant"):
            use()
    assert score().loss > 0


def test_a_loss_with_an_axis_of_length_one() -> None:
    losses = [F.mse_loss, lambda y, targets: F.mse_loss(y, targets).reshape(1)]
    found = [fit(network().double(), batches(1), None, settings(epochs=1), loss=loss).last.loss for loss in losses]
    assert found[0] == found[1]


def test_an_empty_batch_is_refused_in_a_sentence() -> None:
    """It was a ZeroDivisionError."""
    a, b, targets = torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 1)
    for use in ways(network(), [((a, b), targets)], F.mse_loss):
        with pytest.raises(ValueError, match="need a batch axis of at least one sample, got"):
            use()


class Two(nn.Module):
    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return u, u


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (torch.randn(8), r"got \(8, 3\) and torch.float32 \(8,\) \(.*\); change S, or pass loss="),
        (torch.ones(8).int(), r"got \(8, 3\) and torch.int32 \(8,\)"),
        (torch.ones(8, 5).long(), r"got \(8, 3\) and torch.int64 \(8, 5\)"),
        (torch.arange(8), r"class numbers below their number, got .* \(Target \d is out of bounds"),
    ],
)
def test_targets_that_cross_entropy_does_not_take(targets: Tensor, said: str) -> None:
    for use in ways(classes_of(nn.Linear(10, 3)), [(torch.randn(8, 4), targets)]):
        with pytest.raises(ValueError, match=said):
            use()


def test_targets_that_cross_entropy_takes() -> None:
    chances = torch.rand(8, 3).softmax(1)
    for targets in (torch.arange(8) % 3, (torch.arange(8) % 3).byte(), chances):
        y = torch.randn(8, 3)
        assert torch.equal(cross_entropy(y, targets), F.cross_entropy(y, targets))
    y, targets = torch.randn(8, 3, 5), torch.arange(40).reshape(8, 5) % 3
    assert torch.equal(cross_entropy(y, targets), F.cross_entropy(y, targets))


def classes_of(S: nn.Module) -> ImplicitNetwork:
    return ImplicitNetwork(nn.Linear(4, 10), Contraction(10), S)


def test_an_output_that_cross_entropy_does_not_take() -> None:
    """A tuple has no dim()."""
    for S, said in ((Two(), "got tuple and"), (nn.Flatten(0), r"got \(80,\) and")):
        for use in ways(classes_of(S), [(torch.randn(8, 4), torch.arange(8) % 3)]):
            with pytest.raises(ValueError, match=rf"needs outputs \(batch, classes, \.\.\.\) .*{said}"):
                use()


def test_one_output_is_no_classification() -> None:
    """The cross entropy of one output is 0: labels 0 and 1 raised an IndexError, labels 0 trained nothing."""
    data = [(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64))]
    with pytest.raises(ValueError, match=r"got one output and torch\.int64 targets; give two outputs"):
        fit(nn.Linear(2, 1), data, None, settings())
