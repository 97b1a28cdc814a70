"""Steps to the fixed point from zeros, from a fitted guess, from the frame before and from a neighbour.

Claim: none promised; a start near the answer saves steps. Settings: the digits network after 8 epochs, 256
validation images, frames that drift by .05, worst-pixel residuals of .1, .01 and 1e-4. Result:
results/starts.json.
"""

from __future__ import annotations

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
    frames = [held.normalise(held.pixels[: settings.images])]
    for _ in range(settings.frames - 1):
        frames.append(frames[-1] + settings.drift * torch.randn_like(frames[0]))
    return net, train.normalise(train.pixels), frames


@torch.no_grad()
def _rows(net: Any, known: Tensor, frames: list[Tensor], eps: float) -> list[Row]:
    """Return the mean steps of all frames but the first, from each start."""
    net.tolerance = Tolerance(atol=eps, max_steps=500, norm=WorstPixel())
    guess = LinearStart.fit(net, known.split(200))
    fitted = ImplicitNetwork(net.Q, net.R, net.S, tolerance=net.tolerance, start=guess).train(net.training)
    near = banach.compile(net, neighbours=len(frames) * len(frames[0]))
    found: dict[str, list[Any]] = {
        "zeros": [net(d, solution=True)[1] for d in frames],
        "a fitted convolution": [fitted(d, solution=True)[1] for d in frames],
        "the frame before": [net(frames[0], solution=True)[1]],
        "the nearest neighbour": [near(d, solution=True)[1] for d in frames],
    }
    for d in frames[1:]:
        found["the frame before"].append(net(d, z0=found["the frame before"][-1].value, solution=True)[1])
    mean = {
        name: float(torch.cat([one.steps for one in some[1:]]).double().mean()) for name, some in found.items()
    }
    return [
        {"eps": eps, "start": name, "steps": steps, "of those from zeros": steps / mean["zeros"]}
        for name, steps in mean.items()
    ]


QUICK = Settings(epochs=1, frames=2, images=16, levels=(1e-2,))
BENCHMARKS = (Benchmark("starts", "what does a start near the answer save?", run, Settings(), QUICK),)
