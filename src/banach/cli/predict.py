"""`banach predict`: classify image files with a trained network."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from banach import checks
from banach.cli.console import console, table, wrapped
from banach.cli.shared import Device, Imports, Opened, RunDir, argument, number, open_run
from banach.data.pictures import ENDINGS, images_in, read_image

EPILOG = """\b
Examples:
  banach predict runs/cifar10-1 cat.jpg dog.jpg
  banach predict runs/mnist-1 --invert scan.png   dark strokes on light paper
  banach predict runs/mnist-1 scans               all images of a folder"""

NAMED = 3  # files that a hint names
COLUMNS = ("file", "class", "next classes", "solver steps", "residual", "converged")


def predict(
    run: RunDir,
    image: Annotated[list[Path], argument("Image files, or folders of them.")],
    invert: Annotated[bool, typer.Option("--invert", help="Swap dark and light.")] = False,
    top: Annotated[int | None, number(int, "How many classes to show.  [3, or all]")] = None,
    device: Device = "auto",
    modules: Imports = None,
) -> None:
    """Classify image files with a trained network.

    An image is rotated as its EXIF data says, put on white where it is transparent, converted to grey or RGB
    like the data set, and resized to its size.
    """
    opened = open_run(run, device)
    dataset, count = opened.dataset, len(opened.dataset.classes)
    top = min(3, count) if top is None else checks.whole("top", top, 1, count)
    files = {path: images_in(path) if path.is_dir() else [path] for path in image}
    if empty := [path for path, found in files.items() if not found]:
        raise ValueError(f"{empty[0]} has no image files; pass files, or a folder with {', '.join(ENDINGS)}")
    pictures = {file: read_image(file, dataset.shape) for found in files.values() for file in found}
    pixels = torch.stack([picture.pixels for picture in pictures.values()])
    pixels = 255 - pixels if invert else pixels
    title = f"{opened.settings.model} trained on {dataset.title}, after {opened.position.epoch} epochs"
    rows = [(path, *answer) for path, answer in zip(pictures, classify(opened, pixels, top), strict=True)]
    console.print(table(title, COLUMNS, rows))
    # What may be wrong with the images, rather than with the network.
    usual = fmean(dataset.mean)
    if inverted := [path for path, one in zip(pictures, pixels, strict=True) if looks_inverted(one, usual)]:
        means = f"the mean brightness of {dataset.title} is {usual:.0%}, of these more than half"
        console.print(wrapped(f"looks inverted: {_named(inverted)} ({means}); try --invert"))
    if squashed := [path for path, picture in pictures.items() if picture.squashed]:
        said = f"squashed to {dataset.shape[2]} x {dataset.shape[1]} pixels: {_named(squashed)}"
        console.print(wrapped(f"{said} (the sides have another ratio); crop or pad it first"))


def looks_inverted(pixels: Tensor, usual: float) -> bool:
    """Return True if the negative of an image is clearly closer to the usual brightness of the data set.

    Never for data of medium brightness, such as photos.
    """
    here = float(pixels.float().mean()) / 255
    return abs(here - usual) > abs(1 - here - usual) + 0.2


def _named(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return ", ".join(map(str, paths[:NAMED])) + more


def classify(opened: Opened, pixels: Tensor, top: int) -> list[list[Any]]:
    """Return classes and end of the solve of uint8 pixels (N, C, H, W), as cells; in the precision of the run."""
    labels = torch.zeros(len(pixels), dtype=torch.int64)  # not used: Images normalises the pixels
    images = opened.settings.scaled(opened.dataset.images(pixels, labels, split="given"))
    chances, ends = opened.answers(images)
    rows, names = list[list[Any]](), opened.dataset.classes
    for row, (steps, residual, converged) in zip(chances, ends.tolist(), strict=True):
        best = row.topk(top).indices.tolist()
        words = [f"{names[k]} ({row[k]:.1%})" for k in best]
        solve = [int(steps), f"{residual:.1e}", "yes" if converged else "no"] if steps else [None] * 3
        rows.append([words[0], ", ".join(words[1:]) or None, *solve])
    return rows
