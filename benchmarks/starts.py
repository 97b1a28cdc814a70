"""Steps to the fixed point from zeros, from a fitted guess, from the frame before and from a neighbour.

Claim: none promised; a start near the answer saves steps. Settings: the digits network after 8 epochs, 256
validation images, frames that drift by .05, worst-pixel residuals of .1, .01 and 1e-4. Result:
results/starts.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import banach
from banach import ImplicitNetwork, Tolerance, WorstPixel, data, models
from banach.fast import LinearStart
from banach.train import Settings as Training
from banach.train import fit
from benchmarks.results import Benchmark, Report, Row


@dataclass(frozen=True)
class Settings:
    epochs: int = 8
    levels: tuple[float, ...] = (1e-1, 1e-2, 1e-4)  # residuals, of the worst pixel
    frames: int = 6
    drift: float = 0.05  # of a pixel from frame to frame, where pixels have deviation 1
    images: int = 256
    seed: int = 0


def run(settings: Settings) -> Report:
    net, known, frames = _trained(settings)
    rows = [row for eps in settings.levels for row in _rows(net, known, frames, eps)]
    notes = [
        f"the digits network after {settings.epochs} epochs, validation images; frames drift by {settings.drift}",
        "mean steps a sample; the first frame counts for none. A neighbour is any sample of the frames before",
    ]
    return Report(rows, notes=notes)


def _trained(settings: Settings) -> tuple[Any, Tensor, list[Tensor]]:
    """Return the network, images to fit a guess to, and the frames: other images, each drifted a little more."""
    torch.manual_seed(settings.seed)
    net: Any = models.build("digits")
    train, held = (data.load("digits", split) for split in ("train", "validation"))
    recipe = Training.of_recipe(models.recipe("digits"), data="digits", epochs=settings.epochs, monitor=False)
    fit(net, train, held, recipe)
    first = held.normalise(held.pixels[: settings.images])
    steps = [settings.drift * torch.randn_like(first) for _ in range(settings.frames - 1)]
    frames = [first + sum(steps[:number], torch.zeros_like(first)) for number in range(settings.frames)]
    return net, train.normalise(train.pixels), frames


def _rows(net: Any, known: Tensor, frames: list[Tensor], eps: float) -> list[Row]:
    net.tolerance = Tolerance(atol=eps, max_steps=500, norm=WorstPixel())
    ways: dict[str, Callable[[], float]] = {
        "zeros": lambda: _mean(net(d, solution=True)[1] for d in frames[1:]),
        "a fitted convolution": lambda: _fitted(net, known, frames),
        "the frame before": lambda: _followed(net, frames),
        "the nearest neighbour": lambda: _near(net, frames),
    }
    with torch.no_grad():
        taken = {name: way() for name, way in ways.items()}
    return [
        {"eps": eps, "start": name, "steps": steps, "of those from zeros": steps / taken["zeros"]}
        for name, steps in taken.items()
    ]


def _fitted(net: Any, known: Tensor, frames: list[Tensor]) -> float:
    start = LinearStart.fit(net, known.split(200))
    fitted = ImplicitNetwork(net.Q, net.R, net.S, tolerance=net.tolerance, start=start).train(net.training)
    return _mean(fitted(d, solution=True)[1] for d in frames[1:])


def _followed(net: Any, frames: list[Tensor]) -> float:
    found = [net(frames[0], solution=True)[1]]
    for d in frames[1:]:
        found.append(net(d, z0=found[-1].value, solution=True)[1])
    return _mean(found[1:])


def _near(net: Any, frames: list[Tensor]) -> float:
    fast = banach.compile(net, neighbours=len(frames) * len(frames[0]))
    return _mean([fast(d, solution=True)[1] for d in frames][1:])


def _mean(found: Any) -> float:
    return float(torch.cat([one.steps for one in found]).double().mean())


QUICK = Settings(epochs=1, frames=2, images=16, levels=(1e-2,))
BENCHMARKS = (Benchmark("starts", "what does a start near the answer save?", run, Settings(), QUICK),)
