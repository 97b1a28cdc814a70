"""The optimizer in a captured step: its rates, options, state and weights, and those that cannot be captured."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import networks
from banach import ImplicitNetwork
from banach.fast import Extras, TrainStep
from banach.fast.step import GivenBatches
from banach.nn import MonotoneLinear, PeacemanRachford
from fast.simulated import simulate_gpu
from fast.test_train_step import batch, captured, network, two_networks
from networks import conv_network
from train.parts_train import plain_network, same_weights


def test_rates_are_followed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the optimizer's state was loaded, which replaces its groups."""
    net, (d, y) = network(), batch()
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    adam.param_groups[0]["capturable"] = True
    monkeypatch.setattr(adam, "step", lambda: None)  # a CPU has no capturable Adam
    step = captured(net, adam, monkeypatch)
    step(d, y)
    rate = adam.param_groups[0]["lr"]
    assert isinstance(rate, Tensor)
    adam.load_state_dict(adam.state_dict())
    for change in (lambda: adam.param_groups[0].update(lr=1e-4), lambda: rate.fill_(1e-4)):
        rate.fill_(1e-3)
        change()
        step(d, y)
        assert adam.param_groups[0]["lr"] is rate
        assert float(rate) == pytest.approx(1e-4)
    net = network()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    step = captured(net, sgd, monkeypatch)
    for sgd.param_groups[0]["lr"] in (0.1, 0.1):
        step(d, y)
    sgd.param_groups[0]["lr"] = 0.05
    with pytest.raises(
        ValueError, match=r"lr = 0\.1 of the optimizer is part of the captured step, got 0\.05; give SGD lr=torch"
    ):
        step(d, y)


def test_a_rate_on_the_cpu_goes_to_the_device_of_the_weights() -> None:
    """As one of a checkpoint that was loaded there: a graph kept its first value, and schedules had no effect."""
    sgd = torch.optim.SGD(torch.nn.Linear(2, 2, device="meta").parameters(), lr=torch.tensor(0.1), fused=True)
    GivenBatches(sgd).take((torch.ones(2),), captured=True)
    assert sgd.param_groups[0]["lr"].device.type == "meta"


def test_other_options_of_the_optimizer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """OneCycleLR moves the momentum too, which a captured step would not see."""
    net, (d, y) = network(), batch()
    sgd = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.1), momentum=0.9, weight_decay=1e-4)
    step = captured(net, sgd, monkeypatch)
    step(d, y)
    sgd.param_groups[0].update(lr=0.05, initial_lr=0.1, foreach=False)
    step(d, y)
    for name, value in (("momentum", 0.8), ("weight_decay", 0.0)):
        before, sgd.param_groups[0][name] = sgd.param_groups[0][name], value
        with pytest.raises(
            ValueError, match=rf"{name} = {before} of the optimizer is part of the captured step, got"
        ):
            step(d, y)
        sgd.param_groups[0][name] = before


class Trained:
    """A network whose weights of Q are frozen, its optimizer, and a loss with a weight of its own."""

    def __init__(self) -> None:
        self.net, _, self.d = two_networks()
        self.net.Q.requires_grad_(False)
        self.extra = torch.nn.Parameter(torch.zeros(10, dtype=torch.float64))
        self.optimizer: Any = torch.optim.Adam([*self.net.parameters(), self.extra], lr=0.01)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output * self.extra.exp(), targets)

    def load(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def load_another_rate(self) -> None:
        saved = copy.deepcopy(self.optimizer.state_dict())
        saved["param_groups"][0].update(lr=0.003, weight_decay=0.1)
        self.optimizer.load_state_dict(saved)

    def add(self) -> None:
        self.net.S.register_parameter("added", torch.nn.Parameter(torch.zeros_like(self.extra)))
        self.optimizer.add_param_group({"params": [self.net.S.added], "lr": 0.1})

    def thaw(self) -> None:
        self.net.Q.requires_grad_(True)

    def keep(self) -> None:
        pass

    def step(self, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.net(self.d), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("change", ["keep", "load", "load_another_rate", "add", "thaw"])
def test_a_captured_step_follows_its_optimizer(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays wrote to the state from before it was loaded, warm-ups moved weights of the loss and left moments to
    weights that were thawed. Another group, and a rate or option that came with the state, were errors."""
    mine, by_hand, y = Trained(), Trained(), torch.arange(6)
    step = captured(mine.net, mine.optimizer, monkeypatch)
    step.loss = mine.loss
    for turn in range(4):
        if turn == 2:
            getattr(mine, change)()
            getattr(by_hand, change)()
            assert step.outdated is (change != "keep")
        torch.testing.assert_close(step(mine.d, y), by_hand.step(y))
    assert step.plan.graph
    torch.testing.assert_close(mine.net.state_dict(), by_hand.net.state_dict())
    torch.testing.assert_close(mine.extra, by_hand.extra)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_capture_keeps_no_gradient_of_its_warm_up(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays added to those of weights that the optimizer lacks: in memory that `net.zero_grad()` frees and, with
    weights in bf16, that the capture itself had freed."""
    simulate_gpu(monkeypatch, kernels=False)
    net, d, y = conv_network(gamma=0.15), networks.images(6), torch.arange(6)
    step = TrainStep(net, torch.optim.SGD(net.S.parameters(), lr=0.0), F.cross_entropy, bf16=bf16)
    for _ in range(3):
        step(d, y)
    got = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = net(d)
    F.cross_entropy(output.float(), y).backward()
    for one, p in zip(got, net.parameters(), strict=True):
        assert p.grad is not None
        assert float((one - p.grad).norm()) <= (3e-2 if bf16 else 1e-5) * float(p.grad.norm())


def test_a_replay_counts_as_a_change_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch does not see what a CUDA graph writes to: a monotone network used the inverse of before the replay
    for the same v, and autograd took saved weights for unchanged. Both were silent."""
    simulate_gpu(monkeypatch, kernels=False)
    R, d, y = PeacemanRachford(MonotoneLinear(4), 1.0), torch.randn(6, 4), torch.arange(6) % 3
    net = ImplicitNetwork(lambda d: d, R, torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 3)))
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.0), F.cross_entropy)
    step(d, y)

    def replay() -> Any:
        for p in net.parameters():
            p.data.mul_(1.5)  # unseen, as by a graph
        return torch.zeros(()), None

    loss = net(d).sum()
    step._recording = SimpleNamespace(replay=replay)
    step(d, y)
    torch.testing.assert_close(net(d), copy.deepcopy(net)(d))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_that_the_optimizer_does_not_use_are_not_clipped() -> None:
    """They add up from step to step, since nothing sets them to zero, and made the others smaller and smaller."""
    net = plain_network()
    reference, (d, y) = copy.deepcopy(net), batch()
    sgds = [torch.optim.SGD(one.S.parameters(), lr=0.1) for one in (net, reference)]
    with pytest.warns(UserWarning, match="runs eagerly"):
        step = TrainStep(net, sgds[0], F.cross_entropy, extras=Extras(clip=0.01))
    for _ in range(3):
        step(d, y)
        reference.zero_grad()
        F.cross_entropy(reference(d), y).backward()
        torch.nn.utils.clip_grad_norm_(reference.S.parameters(), 0.01)
        sgds[1].step()
    assert same_weights(net, reference)


class Counts(torch.optim.Optimizer):
    """w <- w - lr g / k at step k, which is a number: in the group and in the state of a weight."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                self.state[p]["k"] = self.state[p].get("k", 0) + 1
                p.data.sub_(p.grad, alpha=group["lr"] * 2 / (group["k"] + self.state[p]["k"]))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (torch.optim.Rprop, "the state of Rprop does not start at zero; take its first step eagerly"),
        (lambda weights, lr: Counts(weights, {"lr": lr}), "Counts counts its steps by a number, which replays"),
    ],
)
@pytest.mark.parametrize("taken", [0, 1])
def test_an_optimizer_that_a_replay_does_not_know_is_not_captured(
    kind: Any, said: str, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up would leave Rprop with step sizes of zero. One that counts stayed at its third step."""
    net = plain_network()
    reference, (d, y) = copy.deepcopy(net), batch()
    ours, plain = kind(net.parameters(), lr=0.01), kind(reference.parameters(), lr=0.01)
    step = captured(net, ours, monkeypatch)
    for _ in range(taken):
        F.cross_entropy(net(d), y).backward()
        ours.step()
    with pytest.warns(UserWarning, match=said) if "number" in said or not taken else nullcontext():
        step(d, y)
    for _ in range(taken + 1):
        plain.zero_grad()
        F.cross_entropy(reference(d), y).backward()
        plain.step()
    assert same_weights(net, reference)


def test_such_an_optimizer_is_captured_after_its_first_step_also_if_it_has_a_weight_without_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That weight never has a state, so the advice to take the first step eagerly did not help."""
    mine, by_hand, y = Trained(), Trained(), torch.arange(6)
    for one in (mine, by_hand):
        unused = torch.nn.Parameter(torch.zeros_like(one.extra))
        one.optimizer = torch.optim.NAdam([*one.net.parameters(), one.extra, unused], lr=0.01)
        one.step(y)
    step = captured(mine.net, mine.optimizer, monkeypatch)
    step.loss = mine.loss
    for _ in range(2):
        torch.testing.assert_close(step(mine.d, y), by_hand.step(y))
    assert step.plan.graph
