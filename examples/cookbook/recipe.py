"""What every recipe shares: its command line, its figure, a plain training loop."""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

BLUE, ORANGE, GREEN, GRAY = "#3366cc", "#dd7722", "#228855", "#777777"
IMAGES = Path(__file__).parents[2] / "docs" / "images" / "cookbook"
Recipe = Callable[[bool], tuple[dict[str, float], Figure]]


def main(run: Recipe) -> None:
    """Run one recipe: print its numbers, write its figure."""
    script = Path(sys.argv[0])
    parser = argparse.ArgumentParser(description=f"Run the recipe {script.stem}.")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the figure (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    numbers, figure = run(options.quick)
    for name, value in numbers.items():
        print(f"{name}: {value:.4g}")
    print(f"figure: {save(figure, options.out / f'{script.stem}.svg')}")


def save(figure: Figure, path: Path) -> Path:
    """Write an SVG that has the same bytes at every run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.hashsalt": "banach", "svg.fonttype": "none"}):
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return path


def train(parameters: Iterable[Tensor], loss: Callable[[], Tensor], steps: int, lr: float) -> list[float]:
    """Take Adam steps on `loss()`, which may draw a new batch at every call, and return the losses."""
    optimizer = torch.optim.Adam(parameters, lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses
