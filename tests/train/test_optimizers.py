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


@pytest.mark.parametrize(("optimizer", "left"), [("adamw", 2 * (1 - 0.01 * 0.5) ** 6), ("sgd", 2 * 0.995**6)])
def test_the_decay_alone(optimizer: str, left: float) -> None:
    idle = Idle()
    net = nn.Sequential(Double(), idle, nn.Flatten(), nn.Linear(64, 10).double())
    made = settings(optimizer=optimizer, lr=0.01, weight_decay=0.5, epochs=1)
    fit(net, images(), images(20, "validation"), made)
    assert float(idle.weight.detach()) == pytest.approx(left, rel=1e-12)


def test_adam_has_its_decay_in_the_gradient() -> None:
    # So it moves by the learning rate, as for any gradient of one sign, and not in proportion to the weight.
    idle = Idle()
    net = nn.Sequential(Double(), idle, nn.Flatten(), nn.Linear(64, 10).double())
    fit(net, images(16), images(20, "validation"), settings(lr=0.01, weight_decay=0.5, epochs=1))
    assert float(idle.weight.detach()) == pytest.approx(1.99, rel=1e-6)
