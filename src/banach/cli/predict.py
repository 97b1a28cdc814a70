"""`banach predict`: classify image files with a trained network."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from banach.cli.console import console, table
from banach.cli.opened import Device, Opened, RunDir, open_run
from banach.data import DataSet
from banach.train.evaluate import scores
from banach.train.precision import arithmetic

EPILOG = """\b
Examples:
  banach predict runs/cifar10-1 cat.jpg dog.jpg
  banach predict runs/mnist-1 --invert scan.png     dark strokes on light paper
  banach predict runs/digits-1 seven.png --top 5"""

# Formats of pixels only: Pillow would hand EPS, for example, to another program.
FORMATS = ("PNG", "JPEG", "MPO", "BMP", "GIF", "TIFF", "WEBP", "PPM")
BATCH = 400
# Limits of an image: converting it may take 16 bytes per pixel, resizing it 16 bytes per pixel of a side.
PIXELS, SIDE, BYTES = 2**25, 2**16 - 1, 2**28


def predict(
    run: RunDir,
    image: Annotated[list[Path], typer.Argument(help="Image files.", show_default=False)],
    invert: Annotated[bool, typer.Option("--invert", help="Swap dark and light.")] = False,
    top: Annotated[int, typer.Option(help="How many classes to show.")] = 3,
    device: Device = "auto",
) -> None:
    """Classify image files with a trained network.

    An image is rotated as its EXIF data says, put on white where it is transparent, converted to grey or RGB
    like the data set, and resized to its size.
    """
    opened = open_run(run, device)
    count = len(opened.dataset.classes)
    if not 1 <= top <= count:
        raise ValueError(f"top must be between 1 and {count}, the number of classes, got {top}")
    pixels = torch.stack([read_image(path, opened.dataset, invert=invert) for path in image])
    title = f"{opened.settings.model} trained on {opened.dataset.title}, after {opened.position.epoch} epochs"
    columns = ("file", "class", "probability", "then", "steps", "residual", "converged")
    rows = [(path, *answer) for path, answer in zip(image, classify(opened, pixels, top), strict=True)]
    console.print(table(title, columns, rows))


def classify(opened: Opened, pixels: Tensor, top: int) -> list[list[Any]]:
    """Classify uint8 pixels (N, C, H, W), in the precision of the run.

    Returns:
        Per image its class, the probability, the next classes; then steps, residual and whether it converged, None
        if the network has no fixed point.
    """
    labels = torch.zeros(len(pixels), dtype=torch.int64)  # not used: Images normalises the pixels
    images = opened.settings.scaled(opened.dataset.images(pixels, labels, split="given")).to(opened.device)
    with arithmetic(opened.settings.precision, opened.device), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table says which images did not converge
        parts = [_answers(opened, images.normalise(part), top) for part in images.pixels.split(BATCH)]
    return [answer for part in parts for answer in part]


def _answers(opened: Opened, x: Tensor, top: int) -> list[list[Any]]:
    output, found = scores(opened.net, x, opened.settings.precision)
    best, answers = output.double().softmax(1).topk(top), list[list[Any]]()
    for chances, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        names = [opened.dataset.classes[index] for index in indices]
        first, *others = (f"{100 * chance:.1f}%" for chance in chances)
        then = ", ".join(f"{name} {chance}" for name, chance in zip(names[1:], others, strict=True))
        answers.append([names[0], first, then or None])
    if found is None or not bool(found.steps.any()):  # the explicit twin takes no step
        return [[*answer, None, None, None] for answer in answers]
    ends = zip(found.steps.tolist(), found.residual.tolist(), found.converged.tolist(), strict=True)
    return [
        [*answer, steps, f"{residual:.1e}", "yes" if converged else "no"]
        for answer, (steps, residual, converged) in zip(answers, ends, strict=True)
    ]


def read_image(path: Path, dataset: DataSet, *, invert: bool = False) -> Tensor:
    """Read an image file as uint8 pixels (C, H, W) of the data set's shape.

    Raises:
        ValueError: if the file cannot be read as one picture.
    """
    image_module = _pillow()
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise ValueError(f"{path} {what}; pass image files")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged EXIF data and the like
        warnings.simplefilter("error", image_module.DecompressionBombWarning)
        try:
            pixels = _pixels(image_module, path, dataset.shape)
        except (image_module.DecompressionBombWarning, image_module.DecompressionBombError):
            raise ValueError(f"{path} has too many pixels, more than {PIXELS:,}; scale it down first") from None
        except _Refused as error:
            raise ValueError(f"{path} {error}") from None
        except Exception as error:  # a damaged file makes Pillow raise almost anything
            said = " ".join(str(error).split()).replace(f" {str(path)!r}", "") or type(error).__name__
            raise ValueError(f"{path} is not an image that can be read: {said}") from None
    return 255 - pixels if invert else pixels


class _Refused(ValueError):
    """An image that can be read in more than one way."""


def _pixels(image_module: Any, path: Path, shape: tuple[int, int, int]) -> Tensor:
    from PIL import ImageOps

    channels, height, width = shape
    image_module.init()
    formats = [name for name in FORMATS if name in image_module.OPEN]
    if path.stat().st_size > BYTES:
        raise _Refused(f"has {path.stat().st_size:,} bytes, expected at most {BYTES:,}; scale it down first")
    with image_module.open(path, formats=formats) as image:
        _check_size(*image.size)
        ImageOps.exif_transpose(_still(image), in_place=True)  # a copy would lose the format, and cost memory
        flat = _flattened(image_module, image).convert("L" if channels == 1 else "RGB")
    if flat.size != (width, height):
        # This filter averages all pixels that become one, without ringing at edges.
        flat = flat.resize((width, height), image_module.Resampling.BILINEAR)
    return torch.from_numpy(np.array(flat)).reshape(height, width, channels).movedim(2, 0).contiguous()


def _check_size(width: int, height: int) -> None:
    """Refuse a large image before its pixels are decoded."""
    if width * height > PIXELS or max(width, height) > SIDE:
        limits = f"at most {PIXELS:,} pixels and {SIDE:,} on a side"
        raise _Refused(f"has {width:,} x {height:,} pixels, expected {limits}; scale it down first")


def _still(image: Any) -> Any:
    """Return the image with its pixels loaded. An MPO's second picture shows the same scene."""
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":
        raise _Refused(f"holds {frames} pictures, expected one; save one of them to a file")
    image.load()
    return image


def _flattened(image_module: Any, image: Any) -> Any:
    """Return 8 bits per channel, without alpha: Pillow alone would clip 16 bits at 255 and drop alpha."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        wide = np.array(image).astype(np.int64)
        return image_module.fromarray(((wide.clip(0, 65_535) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise _Refused("has pixels of 32 bits, whose scale is not known; save it with 8 or 16 bits")
    if "transparency" not in image.info and image.mode not in ("RGBA", "LA", "PA", "RGBa", "La"):
        return image
    image = image.convert("RGBA")
    return image_module.alpha_composite(image_module.new("RGBA", image.size, "white"), image).convert("RGB")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("reading images needs Pillow, which is missing; run: pip install pillow") from None
    return Image
