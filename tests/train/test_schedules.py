"""The schedule and the averaged weights, against their closed forms."""

import math

import pytest
import torch
from torch import nn

from banach.models import Constant, Cosine, Steps
from banach.train import Average, OneCycle, fit
from train.parts_train import images, plain_network, same_weights, settings


def test_one_cycle_goes_up_and_down() -> None:
    cycle = OneCycle(warm=0.25, start=0.1, end=0.01)
    assert cycle.multiplier(0, 8) == pytest.approx(0.1)
    assert cycle.multiplier(1, 8) == pytest.approx(0.55)
    assert cycle.multiplier(2, 8) == pytest.approx(1.0)
    assert cycle.multiplier(5, 8) == pytest.approx(0.505)
    assert cycle.multiplier(8, 8) == pytest.approx(0.01)
    assert cycle.multiplier(3, 8) == pytest.approx(0.01 + 0.99 * (1 + math.cos(math.pi / 6)) / 2)


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
    made = settings(epochs=4, schedule=schedule, lr=0.01)
    history = fit(plain_network(), images(), images(20, "validation"), made)
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
    # Decay 0 is no average at all; a decay near 1 is the start.
    train, validation = images(), images(20, "validation")
    plain, zero, one = plain_network(), plain_network(), plain_network()
    histories = [
        fit(net, train, validation, settings(ema=ema))
        for net, ema in ((plain, None), (zero, 0.0), (one, 1 - 1e-15))
    ]
    assert same_weights(plain, zero)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, plain_network().state_dict()[name], rtol=0, atol=1e-12)
    assert histories[0].last.validation_loss == histories[1].last.validation_loss
    start = fit(plain_network(), train, validation, settings(lr=0.0, epochs=1)).last
    assert histories[2].last.validation_loss == pytest.approx(start.validation_loss, rel=1e-10)
    assert histories[2].last.loss < start.loss  # training itself went on
