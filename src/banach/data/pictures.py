"""read_image(): an image file as pixels. Its size is checked before it is decoded."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from banach.data.dataset import DataError, need, printable

# Formats of pixels only: Pillow would hand EPS, for example, to another program.
FORMATS = ("PNG", "JPEG", "MPO", "BMP", "GIF", "TIFF", "WEBP", "PPM")
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
# Limits of an image: converting it may take 16 bytes per pixel, resizing it 16 bytes per pixel of a side.
PIXELS, SIDE, BYTES = 2**25, 2**16 - 1, 2**28


@dataclass(frozen=True, eq=False)
class Picture:
    """An image as uint8 pixels (C, H, W), and the width and height that its file has."""

    pixels: Tensor
    size: tuple[int, int]

    @property
    def squashed(self) -> bool:
        """True if its sides were scaled by different factors: by more than 5%, which rounding does not explain."""
        height, width = self.pixels.shape[1:]
        ratio = (self.size[0] * height) / (self.size[1] * width)
        return not 1 / 1.05 < ratio < 1.05


def images_in(folder: Path) -> list[Path]:
    """Return the image files of a folder, in order; hidden ones, such as ._1.png of macOS, are left out."""
    seen = (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    return [path for path in seen if path.suffix.lower() in ENDINGS and path.is_file()]


def read_image(path: Path, shape: tuple[int, int, int] | None = None) -> Picture:
    """Read an image file: rotated as its EXIF data says, on white where it is transparent.

    It is converted and resized to `shape` (channels, height, width); by default it keeps its own, grey or RGB.
    """
    pillow = need("PIL.Image", "reading images")
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise DataError(f"{path} {what}; pass image files")
    with warnings.catch_warnings(action="ignore"):  # damaged EXIF data and the like; the size is checked here
        try:
            return _read(pillow, path, shape)
        except DataError as error:
            raise DataError(f"{path} {error}") from None
        except pillow.DecompressionBombError:  # before the size can be read
            raise DataError(f"{path} has too many pixels, more than {PIXELS:,}; scale it down first") from None
        except Exception as error:  # a damaged file makes Pillow raise almost anything
            said = printable(error).replace(f" {str(path)!r}", "") or type(error).__name__
            raise DataError(f"{path} is not an image that can be read: {said}") from None


def _read(pillow: Any, path: Path, shape: tuple[int, int, int] | None) -> Picture:
    pillow.init()
    if path.stat().st_size > BYTES:
        raise DataError(f"has {path.stat().st_size:,} bytes, expected at most {BYTES:,}; scale it down first")
    with pillow.open(path, formats=[name for name in FORMATS if name in pillow.OPEN]) as image:
        _check(image)
        # In place: a copy would lose the format, and cost memory.
        need("PIL.ImageOps", "reading images").exif_transpose(image, in_place=True)
        flat = _flattened(pillow, image)
    size = flat.size
    channels, height, width = shape or (1 if flat.mode in ("1", "L") else 3, size[1], size[0])
    flat = flat.convert("L" if channels == 1 else "RGB")
    if size != (width, height):
        # This filter averages all pixels that become one, without ringing at edges.
        flat = flat.resize((width, height), pillow.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(flat)).reshape(height, width, channels)
    return Picture(pixels.movedim(2, 0).contiguous(), size)


def _check(image: Any) -> None:
    """Refuse a large image before its pixels are decoded, and several pictures in one file."""
    width, height = image.size
    if width * height > PIXELS or max(width, height) > SIDE:
        limits = f"at most {PIXELS:,} pixels and {SIDE:,} on a side"
        raise DataError(f"has {width:,} x {height:,} pixels, expected {limits}; scale it down first")
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # an MPO's second picture shows the same scene
        raise DataError(f"holds {frames} pictures, expected one; save one of them to a file")
    image.load()


def _flattened(pillow: Any, image: Any) -> Any:
    """Return 8 bits per channel, without alpha: Pillow alone would clip 16 bits at 255 and drop alpha."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        wide = np.array(image).astype(np.int64)
        return pillow.fromarray(((wide.clip(0, 65_535) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError("has pixels of 32 bits, whose scale is not known; save it with 8 or 16 bits")
    if "transparency" not in image.info and image.mode not in ("RGBA", "LA", "PA", "RGBa", "La"):
        return image
    image = image.convert("RGBA")
    return pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image).convert("RGB")
