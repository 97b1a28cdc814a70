"""Warm starts on a moving scene: restore the frames of a video, each from the answer of the frame before.

A fixed point forgets its start, so starting near the answer saves steps and changes nothing else. The map
restores a blurred, noisy frame: a gradient step on the data, then a little smoothing along the grid.

    python -m examples.cookbook.moving_scene
"""

import matplotlib.pyplot as plt
import torch
from examples.cookbook.recipe import BLUE, GREEN, ORANGE, main
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import conv2d

from banach import Anderson, Picard, Tolerance, solve
from banach.solve import Solver

SIDE, NOISE = 48, 0.02
TOLERANCE = Tolerance(atol=1e-4, max_steps=500)


def frame(time: float) -> Tensor:
    """Return a scene (1, 1, SIDE, SIDE): two discs that move."""
    place = torch.arange(SIDE, dtype=torch.float32)
    image = torch.zeros(SIDE, SIDE)
    for radius, speed, bright in ((7, 0.6, 1.0), (4, -0.9, 0.7)):
        x, y = SIDE / 2 + 12 * torch.cos(torch.tensor([speed * time, speed * time + 1.5]))
        image += bright * torch.sigmoid(2 * (radius - torch.hypot(place[:, None] - y, place - x)))
    return image[None, None]


def blur(image: Tensor) -> Tensor:
    weights = torch.exp(-(torch.linspace(-2, 2, 9) ** 2))
    kernel = (weights[:, None] * weights / weights.sum() ** 2)[None, None]
    return conv2d(image, kernel, padding=4)


def restore(u: Tensor, seen: Tensor) -> Tensor:
    """T(u, seen) = smooth(u - A'(A u - seen)); the blur A is its own transpose."""
    u = u - blur(blur(u) - seen)
    around = conv2d(u, torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]]).float()[None, None] / 4, padding=1)
    return 0.97 * u + 0.03 * around


def steps(frames: list[Tensor], solver: Solver, *, warm: bool) -> tuple[list[int], Tensor]:
    """Return the steps that each frame took, and the last answer."""
    counts, u = [], torch.zeros_like(frames[0])
    for seen in frames:
        found = solve(restore, u if warm else torch.zeros_like(u), solver, inputs=(seen,), tolerance=TOLERANCE)
        counts.append(int(found.steps))
        u = found.value
    return counts, u


def run(quick: bool) -> tuple[dict[str, float], Figure]:
    times = [0.02 * k for k in range(4 if quick else 40)]
    seen = [
        blur(frame(t)) + NOISE * torch.randn(1, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
        for t in times
    ]
    figure, panels = plt.subplots(1, 3, figsize=(8, 2.8), width_ratios=(2, 1, 1), layout="constrained")
    numbers = {}
    for solver, color in ((Picard(), BLUE), (Anderson(), ORANGE)):
        for warm, line in ((False, ":"), (True, "-")):
            counts, u = steps(seen, solver, warm=warm)
            name = f"{type(solver).__name__}, {'previous frame' if warm else 'zeros'}"
            panels[0].plot(counts, line, color=color, label=name)
            numbers[f"mean steps, {name}"] = sum(counts[1:]) / len(counts[1:])
    panels[0].set(xlabel="frame", ylabel="evaluations", yscale="log")
    panels[0].legend(fontsize=7)
    for axes, image, title in ((panels[1], seen[-1], "seen"), (panels[2], u, "restored")):
        axes.imshow(image[0, 0].numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set(title=title, xticks=[], yticks=[])
    panels[2].set_xlabel(f"error {(u - frame(times[-1])).square().mean().sqrt():.3f}", color=GREEN)
    return numbers, figure


if __name__ == "__main__":
    main(run)
