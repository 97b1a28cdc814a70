"""Backward modes compared: how near the exact gradient, at what time and memory, on a digits network.

Claim: none; the table is for choosing a mode. Settings: a network of the paper's MNIST form on 64 digits, after
200 steps of JFB training; time is the processor time of a step relative to JFB's, in turn. Result:
results/modes.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import GMRES, JFB, Anderson, Implicit, ImplicitNetwork, Mode, Neumann, NormalCG, Tolerance, Unroll
from banach.diagnose import descent_check, measure_contraction, verdict
from benchmarks.results import Benchmark, Report, Row
from benchmarks.timer import interleaved, peak_bytes, ratio


@dataclass(frozen=True)
class Settings:
    batch: int = 64
    train_steps: int = 200
    repeats: int = 15
    seed: int = 0


EXACT = Tolerance(atol=0, rtol=1e-4, max_steps=200)
MODES: dict[str, Mode] = {
    "JFB": JFB(),
    "Neumann(1)": Neumann(1),
    "Neumann(5)": Neumann(5),
    "Unroll(3)": Unroll(3),
    "Unroll(3), checkpointed": Unroll(3, checkpoint=True),
    "Unroll(5, damping .5)": Unroll(5, 0.5),
    "Implicit, NormalCG, 1e-4": Implicit(NormalCG(), EXACT),
    "Implicit, GMRES, 1e-4": Implicit(GMRES(), EXACT),
    "Implicit, Anderson, 1e-4": Implicit(Anderson(), EXACT),
}


class R(nn.Module):
    """Half a residual block with batch norm, as in the paper's MNIST network, on 16x8x8."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16, affine=False)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        x = u + v
        return 0.5 * self.norm(x + F.leaky_relu(self.two(F.leaky_relu(self.one(x), 0.1)), 0.1))


def run(settings: Settings) -> Report:
    from sklearn.datasets import load_digits

    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 8 - 1
    net = _trained(images, labels, settings)
    images, labels = images[: settings.batch], labels[: settings.batch]
    steps = {name: partial(_step, net, mode, images, labels) for name, mode in MODES.items()}
    seconds = interleaved(steps, settings.repeats)
    check = partial(descent_check, net, images, lambda y: F.cross_entropy(y, labels))
    rows: list[Row] = []
    for name, mode in MODES.items():
        found, peak = check(backward=mode), peak_bytes(steps[name], torch.device("cpu"))
        row: Row = {"mode": name, "cosine": found.cosine, "norm ratio": found.ratio, "peak MB": peak / 2**20}
        rows.append(row | {"time / JFB": ratio(seconds[name], seconds["JFB"])})
    return Report(rows, notes=[verdict(measure_contraction(net, images), check(backward=JFB()))])


def _step(net: ImplicitNetwork, mode: Mode, images: Tensor, labels: Tensor) -> None:
    net.backward = mode
    net.zero_grad()
    F.cross_entropy(net(images), labels).backward()


def _trained(images: Tensor, labels: Tensor, settings: Settings) -> ImplicitNetwork:
    torch.manual_seed(settings.seed)
    Q = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU(0.1))
    S = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))
    net = ImplicitNetwork(Q, R(), S, tolerance=Tolerance(max_steps=60))
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(settings.train_steps):
        pick = torch.randint(len(images), (64,))
        _step(net, JFB(), images[pick], labels[pick])
        optimizer.step()
    return net.eval()


QUICK = Settings(batch=4, train_steps=2, repeats=1)
BENCHMARKS = (Benchmark("modes", "what does a better gradient cost?", run, Settings(), QUICK),)
