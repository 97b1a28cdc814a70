"""A file of any kind becomes the pixels it shows."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from banach.data import CIFAR10, DIGITS, DataError
from banach.data.pictures import images_in, read_image
from data.parts_data import grey, written

Image: Any = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(path: Path, dataset: Any = DIGITS) -> np.ndarray:
    pixels = read_image(path, dataset.shape).pixels
    assert pixels.dtype == torch.uint8
    assert tuple(pixels.shape) == dataset.shape
    return pixels.numpy()


def test_pixels_of_the_right_size_are_left_alone() -> None:
    assert (read(written(grey())) == grey()).all()
    for array, channels in ((grey(shape=(5, 7)), 1), (grey(shape=(5, 7, 3)), 3)):
        assert read_image(written(array)).pixels.shape == (channels, 5, 7)


def test_what_was_squashed_and_what_is_in_a_folder() -> None:
    sizes = {(80, 80): False, (8, 8): False, (41, 40): False, (80, 90): True, (20, 60): True}
    for size, squashed in sizes.items():
        picture = read_image(written(grey(shape=size[::-1])), DIGITS.shape)
        assert (picture.size, picture.squashed) == (size, squashed)
    for name in ("b.PNG", "a.jpg", "c.txt"):
        Path(name).touch()
    assert [path.name for path in images_in(Path())] == ["a.jpg", "b.PNG", "image.png"]


def test_colours_become_grey_and_grey_becomes_colours() -> None:
    colours = grey(shape=(32, 32, 3))
    assert (read(written(colours), CIFAR10) == colours.transpose(2, 0, 1)).all()
    assert (read(written(grey(shape=(32, 32))), CIFAR10) == grey(shape=(32, 32))).all()
    weights = np.array([0.299, 0.587, 0.114])
    assert np.abs(read(written(colours[:8, :8]))[0] - colours[:8, :8] @ weights).max() <= 1


def test_a_larger_image_is_averaged_not_sampled() -> None:
    large = np.kron(grey(), np.full((10, 10), 1)).astype(np.uint8)
    large[::2] = large[::2] // 2  # stripes that sampling would take or leave whole
    assert np.corrcoef(read(written(large))[0].ravel(), grey().ravel())[0, 1] > 0.9
    assert abs(read(written(large)).mean() - large.mean()) < 3


def test_exif_orientation_is_obeyed() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown a quarter turn clockwise
    assert (read(written(grey(), exif=exif)) == np.rot90(grey(), -1)).all()


def test_transparent_pixels_are_white_paper() -> None:
    rgba = np.zeros((8, 8, 4), np.uint8)
    rgba[:4, :, 3] = 255  # black above, nothing below
    rgba[7, :, 3] = 51
    expected = np.repeat([0, 0, 0, 0, 255, 255, 255, 204], 8).reshape(8, 8)
    assert (read(written(rgba)) == expected).all()
    assert (read(written(rgba[..., 2:], "la.png")) == expected).all()  # grey with alpha
    palette = Image.fromarray((np.arange(64) % 2).astype(np.uint8).reshape(8, 8)).convert("P")
    palette.putpalette([10, 10, 10, 90, 90, 90])
    palette.save("p.png", transparency=1)
    assert (np.unique(read(Path("p.png"))) == [10, 255]).all()


def test_sixteen_bits_are_scaled_and_one_bit_is_black_and_white() -> None:
    assert (read(written(grey().astype(np.uint16) * 257)) == grey()).all()
    assert (read(written(grey().astype(np.uint16) * 257, "t.tif")) == grey()).all()
    assert (read(written(grey() > 127)) == np.where(grey() > 127, 255, 0)).all()


def test_other_kinds_of_files_are_read() -> None:
    for name in ("a.bmp", "a.gif", "a.tif", "a.pgm", "a.webp"):
        options = {"lossless": True} if name.endswith("webp") else {}
        assert (read(written(grey(), name, **options)) == grey()).all(), name
    # Phones write two pictures of one scene into a JPEG.
    first, second = (Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (40, 200))
    first.save("phone.jpg", format="MPO", save_all=True, append_images=[second])
    assert np.abs(read(Path("phone.jpg")).astype(int) - 40).max() <= 2


def test_bad_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("folder.png").mkdir()
    Path("text.png").write_text("This is no image.\n")
    whole = written(grey(shape=(90, 90)), "cut.png").read_bytes()
    Path("cut.png").write_bytes(whole[: len(whole) // 2])
    frames = [Image.fromarray(grey(seed)) for seed in range(3)]
    frames[0].save("three.gif", save_all=True, append_images=frames[1:])
    written(grey().astype(np.float32), "real.tif")
    written(np.full((8, 8), 70_000, np.int32), "wide.tif")  # was clipped to 255
    written(np.zeros((1, 70_000), np.uint8), "long.png")
    Image.new("1", (6_000, 6_000)).save("large.png")
    with open("heavy.png", "wb") as file:
        file.truncate(2**28 + 1)  # a sparse file
    # Pillow would start another program to draw it.
    Path("p.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n")
    unreadable = "is not an image that can be read"
    for name, said in {
        "nothing.png": "does not exist; pass image files",
        "folder.png": "is not a file",
        "text.png": f"{unreadable}: cannot identify image file",
        "cut.png": unreadable,
        "three.gif": "holds 3 pictures, expected one",
        "real.tif": "has pixels of 32 bits",
        "p.eps": f"{unreadable}: cannot identify image file",
        "long.png": "has 70,000 x 1 pixels, expected at most 33,554,432 pixels and 65,535 on a side",
        "large.png": "has 6,000 x 6,000 pixels, expected at most 33,554,432",
        "wide.tif": "has pixels of 32 bits",
        "heavy.png": "has 268,435,457 bytes, expected at most 268,435,456",
    }.items():
        with pytest.raises(DataError) as caught:
            read_image(Path(name), DIGITS.shape)
        assert str(caught.value).startswith(f"{name} {said}")
        assert str(caught.value).count(name) == 1
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # above twice this Pillow raises
    with pytest.raises(DataError, match="has too many pixels, more than 33,554,432; scale it down"):
        read(written(grey()))

    def hostile(*_: Any, **__: Any) -> None:
        raise ValueError("\x1b[2J" + "x" * 5_000)

    monkeypatch.setattr(Image, "open", hostile)  # text of a file in Pillow's error was repeated in full
    with pytest.raises(DataError, match=r"can be read: \?\[2Jx+$") as caught:
        read(Path("image.png"))
    assert len(str(caught.value)) < 500
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match="reading images needs pillow, which is missing; run: pip install"):
        read(Path("image.png"))
