"""`banach predict`: classify image files with a trained network."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from banach import checks
from banach.cli.console import console, table, wrapped
from banach.cli.opened import Device, Opened, RunDir, argument, number, open_run
from banach.cli.plugins import Imports
from banach.data import DataSet
from banach.data.pictures import ENDINGS, images_in, read_image
from banach.train.evaluate import scores
from banach.train.precision import arithmetic

EPILOG = """\b
Examples:
  banach predict runs/cifar10-1 cat.jpg dog.jpg
  banach predict runs/mnist-1 --invert scan.png   dark strokes on light paper
  banach predict runs/mnist-1 scans               all images of a folder"""

BATCH = 400
NAMED = 3  # files that a hint names
COLUMNS = ("file", "class", "next classes", "solver steps", "residual", "converged")


def predict(
    run: RunDir,
    image: Annotated[list[Path], argument("Image files, or folders of them.")],
    invert: Annotated[bool, typer.Option("--invert", help="Swap dark and light.")] = False,
    top: Annotated[int, number(int, "How many classes to show.", show_default=True)] = 3,
    device: Device = "auto",
    modules: Imports = None,
) -> None:
    """Classify image files with a trained network.

    An image is rotated as its EXIF data says, put on white where it is transparent, converted to grey or RGB
    like the data set, and resized to its size.
    """
    opened = open_run(run, device)
    dataset, top = opened.dataset, checks.whole("top", top, 1, len(opened.dataset.classes))
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
    if inverted := [path for path, one in zip(pictures, pixels, strict=True) if looks_inverted(dataset, one)]:
        means = f"the mean brightness of {dataset.title} is {_brightness(dataset):.0%}, of these more than half"
        console.print(wrapped(f"looks inverted: {_named(inverted)} ({means}); try --invert"))
    if squashed := [path for path, picture in pictures.items() if picture.squashed]:
        said = f"squashed to {dataset.shape[2]} x {dataset.shape[1]} pixels: {_named(squashed)}"
        console.print(wrapped(f"{said} (the sides have another ratio); crop or pad it first"))


def looks_inverted(dataset: DataSet, pixels: Tensor) -> bool:
    """Return True if the negative of an image is clearly closer to the mean brightness of the data set.

    Never for data of medium brightness, such as photos.
    """
    usual, here = _brightness(dataset), float(pixels.float().mean()) / 255
    return abs(here - usual) > abs(1 - here - usual) + 0.2


def _brightness(dataset: DataSet) -> float:
    return sum(dataset.mean) / len(dataset.mean)


def _named(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return ", ".join(map(str, paths[:NAMED])) + more


def classify(opened: Opened, pixels: Tensor, top: int) -> list[list[Any]]:
    """Return classes and end of the solve of uint8 pixels (N, C, H, W), as cells; in the precision of the run."""
    labels = torch.zeros(len(pixels), dtype=torch.int64)  # not used: Images normalises the pixels
    images = opened.settings.scaled(opened.dataset.images(pixels, labels, split="given")).to(opened.device)
    with arithmetic(opened.settings.precision, opened.device), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table says which images did not converge
        parts = images.pixels.split(BATCH)
        return [answer for part in parts for answer in _answers(opened, images.normalise(part), top)]


def _answers(opened: Opened, x: Tensor, top: int) -> Iterator[list[Any]]:
    output, found = scores(opened.net, x, opened.settings.precision)
    best, names, ends = output.double().softmax(1).topk(top), opened.dataset.classes, [(0, 0.0, False)] * len(x)
    if found is not None:
        ends = list(zip(found.steps.tolist(), found.residual.tolist(), found.converged.tolist(), strict=True))
    for indices, chances, end in zip(best.indices.tolist(), best.values.tolist(), ends, strict=True):
        words = [f"{names[index]} ({chance:.1%})" for index, chance in zip(indices, chances, strict=True)]
        steps, residual, converged = end
        solve = [steps, f"{residual:.1e}", "yes" if converged else "no"] if steps else [None] * 3  # no fixed point
        yield [words[0], ", ".join(words[1:]) or None, *solve]
