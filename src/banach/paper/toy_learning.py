"""y(d) learned from samples: one small network f, inside a fixed point or used as it is, with equal parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from banach.backward import Mode
from banach.diagnose import measure_contraction
from banach.network import ImplicitNetwork
from banach.paper.toy_equation import BOUND, grid, root
from banach.solve import Tolerance

STEEP = 12.0  # of the first layer: units that bend within |y| < .56 rather than beyond it
TOLERANCE = Tolerance(atol=1e-7, max_steps=100)


@dataclass(frozen=True)
class Lesson:
    """How the networks are trained: full batches of `samples` pairs (d, y), Adam, a cosine schedule."""

    seeds: int
    steps: int
    samples: int = 128
    width: int = 16
    lr: float = 1e-2
    grid: int = 1001  # test points


@dataclass(frozen=True, eq=False)
class Learned:
    """What one way of learning came to: `value` on the test points, one column per seed."""

    name: str
    parameters: int
    value: Tensor
    error: Tensor  # |value - y|
    sigma: float | None  # the largest |dT/dy| on the test points, of the implicit ones

    @property
    def rms(self) -> list[float]:
        """One per seed."""
        return [float(e) for e in self.error.square().mean(0).sqrt()]

    @property
    def worst(self) -> list[float]:
        return [float(e) for e in self.error.amax(0)]


class Curve(nn.Module):
    """f(x) = sum_i b_i tanh(a_i x + c_i) + e, a numbers-to-numbers network, for several seeds side by side.

    x is (batch, seeds), and column s sees the weights of seed s alone: Adam works entry by entry, so training all
    of them at once gives what training each would.
    """

    def __init__(self, seeds: int, width: int) -> None:
        super().__init__()
        drawn = torch.stack([_uniform((3, width), seed) for seed in range(seeds)], 1)
        self.a, self.c = nn.Parameter(STEEP * drawn[0]), nn.Parameter(STEEP * BOUND * drawn[1])
        self.b = nn.Parameter(0.1 * drawn[2] / width**0.5)
        self.e = nn.Parameter(torch.zeros(seeds, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x[..., None] * self.a + self.c) * self.b).sum(-1) + self.e


class Inside(nn.Module):
    """R(u, v) = v + f(u): where f is u^5, the fixed point is y."""

    def __init__(self, f: Curve) -> None:
        super().__init__()
        self.f = f

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return v + self.f(u)


class Outside(nn.Module):
    """N(d) = d + f(d): f has to be the whole tail of the series."""

    def __init__(self, f: Curve) -> None:
        super().__init__()
        self.f = f

    def forward(self, d: Tensor) -> Tensor:
        return d + self.f(d)


def build(lesson: Lesson, backward: Mode | None) -> nn.Module:
    """The implicit network trained by a mode, or, without one, the explicit network; equal initial f."""
    f = Curve(lesson.seeds, lesson.width)
    if backward is None:
        return Outside(f)
    return ImplicitNetwork(_same, Inside(f), _same, tolerance=TOLERANCE, backward=backward)


def learn(name: str, lesson: Lesson, backward: Mode | None) -> Learned:
    net = build(lesson, backward)
    d, y = samples(lesson)
    optimizer = torch.optim.Adam(net.parameters(), lesson.lr, betas=(0.9, 0.99), eps=1e-14)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, lesson.steps)
    for _ in range(lesson.steps):
        optimizer.zero_grad()
        (net(d) - y).square().mean(0).sum().backward()
        optimizer.step()
        schedule.step()
    return _tested(name, lesson, net)


def samples(lesson: Lesson) -> tuple[Tensor, Tensor]:
    """(samples, seeds) twice: d drawn from [-1/2, 1/2], and its y."""
    d = torch.stack([BOUND * _uniform((lesson.samples,), 1000 + seed) for seed in range(lesson.seeds)], 1)
    return d, root(d)


def polynomial_error(degree: int, *, implicit: bool, lesson: Lesson) -> list[float]:
    """RMS test error per seed of the least-squares polynomial p with y = p(d), or, implicit, with y = d + p(y)."""
    d, y = samples(lesson)
    at = grid(lesson.grid)[:, 0]
    true, errors = root(at), []
    for seed in range(lesson.seeds):
        x, target = (y[:, seed], y[:, seed] - d[:, seed]) if implicit else (d[:, seed], y[:, seed])
        c = torch.linalg.lstsq(_powers(x, degree), target[:, None]).solution[:, 0]
        value = _solved(c, at) if implicit else _powers(at, degree) @ c
        errors.append(float((value - true).square().mean().sqrt()))
    return errors


def _tested(name: str, lesson: Lesson, net: nn.Module) -> Learned:
    at = grid(lesson.grid).expand(-1, lesson.seeds).contiguous()
    true = root(at)
    with torch.no_grad():
        value = net(at)
    sigma = float(measure_contraction(net, at).sigma.max()) if isinstance(net, ImplicitNetwork) else None
    parameters = sum(p.numel() for p in net.parameters()) // lesson.seeds
    return Learned(name, parameters, value, (value - true).abs(), sigma)


def _solved(c: Tensor, d: Tensor) -> Tensor:
    y = torch.zeros_like(d)
    for _ in range(100):
        y = d + _powers(y, len(c) - 1) @ c
    return y


def _powers(x: Tensor, degree: int) -> Tensor:
    # 2x lies in [-1.13, 1.13]: its powers are far better conditioned than those of x.
    return torch.stack([(2 * x) ** k for k in range(degree + 1)], 1)


def _uniform(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers from [-1, 1], drawn without touching the global random state."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1


def _same(x: Any) -> Any:
    return x
