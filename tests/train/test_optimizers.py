"""The optimizers: each learns, and decays the weights as it says."""

import pytest
import torch
from torch import Tensor, nn

from banach.train import fit
from train.parts_train import Double, images, plain_network, settings


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_every_optimizer_learns(optimizer: str) -> None:
    lr, momentum = (0.05, 0.9) if optimizer == "sgd" else (0.01, 0.0)
    made = settings(optimizer=optimizer, lr=lr, momentum=momentum, epochs=3, weight_decay=1e-3)
    history = fit(plain_network(), images(), images(20, "validation"), made)
    assert history.last.loss < 0.8 * history.epochs[0].loss


class Idle(nn.Module):
    """The identity, with a weight whose gradient is zero: only the decay moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.weight


@pytest.mark.parametrize(
    ("optimizer", "count", "left"),
    [
        ("adamw", 96, 2 * (1 - 0.01 * 0.5) ** 6),
        ("sgd", 96, 2 * 0.995**6),
        ("adam", 16, 1.99),  # its decay is in the gradient: it moves by the learning rate
    ],
)
def test_the_decay_alone(optimizer: str, count: int, left: float) -> None:
    idle = Idle()
    net = nn.Sequential(Double(), idle, nn.Flatten(), nn.Linear(64, 10).double())
    made = settings(optimizer=optimizer, lr=0.01, weight_decay=0.5, epochs=1)
    fit(net, images(count), images(20, "validation"), made)
    assert float(idle.weight.detach()) == pytest.approx(left, rel=1e-6 if optimizer == "adam" else 1e-12)
