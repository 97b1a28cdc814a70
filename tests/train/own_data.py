"""Data, networks and losses of regression and sequences; `own_data.py KIND RUN STEP` is killed at that step."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from banach import ImplicitNetwork, Tolerance
from banach.train import History, Position, Run, fit
from train.parts_train import Contraction, settings

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


if __name__ == "__main__":
    kind, path, step = sys.argv[1:]

    def kill(position: Position) -> None:
        if position.epoch * STEPS + position.step == int(step):
            os.kill(os.getpid(), signal.SIGKILL)

    train(network(kind=kind), Run.create(Path(path), MADE), on_step=kill, kind=kind)
