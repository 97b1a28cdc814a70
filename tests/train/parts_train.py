"""Small data and networks to train in a second."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import ImplicitNetwork, Tolerance, data, models
from banach.data import Images
from banach.train import Epoch, History, Position, Settings
from fast.simulated import simulate_gpu


def images(count: int = 96, split: str = "train") -> Images:
    return data.load("digits", split).subset(count)


def network(seed: int = 0, **options: Any) -> nn.Module:
    """The network for digits: batch norm in Q and R, dropout in S."""
    torch.manual_seed(seed)
    return models.build("digits", **options)


def capture_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture training steps on a simulated GPU: their learning rates are tensors."""
    make = Settings.make_optimizer

    def with_tensors(made: Settings, net: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(made, net)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        return optimizer

    simulate_gpu(monkeypatch, kernels=False)
    monkeypatch.setattr(Settings, "make_optimizer", with_tensors)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


class Contraction(nn.Module):
    """R(u, v) = tanh(W u / 2 + v), W small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.inner(u) + v)


def plain_network(tolerance: Tolerance | None = None, seed: int = 0, **options: Any) -> ImplicitNetwork:
    """In float64, without batch norm or dropout: a batch is the sum of its samples."""
    torch.manual_seed(seed)
    Q = nn.Sequential(Double(), nn.Flatten(), nn.Linear(64, 12)).double()
    R, S = Contraction(12).double(), nn.Linear(12, 10).double()
    return ImplicitNetwork(Q, R, S, tolerance=tolerance or Tolerance(atol=1e-12, max_steps=100), **options)


def expanding_network() -> ImplicitNetwork:
    """T has the slope 5 near u = 0, and v is so small that u is there after one step."""
    net = plain_network(Tolerance(max_steps=1, check_every=0))
    with torch.no_grad():
        net.R.inner.weight.copy_(10 * torch.eye(12))
        net.R.inner.bias.zero_()
        for weight in net.Q.parameters():
            weight.mul_(1e-3)
    return net


def settings(**changes: Any) -> Settings:
    """Everything that a resume must bring back: momentum, averages, a schedule, dropout's numbers."""
    values: dict[str, Any] = {"epochs": 2, "batch_size": 16, "lr": 5e-3, "monitor": False, "device": "cpu"}
    return Settings(**{**values, **changes})


def stop_at(step: int, per_epoch: int) -> Any:
    """An `on_step` that raises KeyboardInterrupt after so many steps."""

    def on_step(position: Position) -> None:
        if position.epoch * per_epoch + position.step == step:
            raise KeyboardInterrupt

    return on_step


# The plain values of a checkpoint before the first epoch is done.
STATE: dict[str, Any] = {
    **dict.fromkeys(("epoch", "step", "products", "rewinds", "tensors"), 0),
    "seconds": 0.0,
    "warned": False,
    "done": [],
    "identity": {},
}


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Bit by bit, buffers too."""
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# The figures of an epoch that a network without a fixed point does not have.
_SOLVE = ("depth", "max_depth", "residual", "max_residual", "converged", "sigma")
NO_FIXED_POINT: dict[str, Any] = dict.fromkeys((*_SOLVE, "validation_depth", "validation_converged"))


def epoch(number: int, **changes: Any) -> Epoch:
    """An epoch in which every figure is another number, most of them exact in float32."""
    values: dict[str, Any] = {
        "epoch": number,
        "loss": 2.0 / number,
        "accuracy": 1 - 0.5 / number,
        "validation_loss": 2.125 / number,
        "validation_accuracy": 1 - 0.625 / number,
        "lr": 0.125,
        "depth": 10.5 + number,
        "max_depth": 20 + number,
        "residual": 1e-5 / number,
        "max_residual": 1e-4 / number,
        "converged": 0.98,
        "validation_depth": 11.25 + number,
        "validation_converged": 0.875,
        "sigma": 0.4567,
        "products": 1000 * number,
        "seconds": 1.5 * number,
        "memory": None,
    }
    return Epoch(**{**values, **changes})


def totals(**changes: Any) -> dict[str, Any]:
    """The figures of a test set, as a run stores them."""
    solve = {"depth": 7.0, "max_depth": 9, "residual": 1e-4, "max_residual": 2e-4, "converged": 1.0}
    return {"loss": 0.1, "accuracy": 0.98765, **solve, **changes}


def figures(history: History) -> list[dict[str, Any]]:
    """The epochs without the time they took."""
    return [
        {k: v for k, v in epoch.to_dict().items() if k not in {"seconds", "warm_up"}} for epoch in history.epochs
    ]
