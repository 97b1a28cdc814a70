"""`banach predict`: a file of any kind becomes the pixels it shows, and those the network's own answer."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from banach import data
from banach.cli.app import main
from banach.cli.console import console
from banach.cli.opened import open_run
from banach.cli.predict import classify, read_image
from banach.data import CIFAR10, DIGITS
from cli.conftest import SMALL

Image: Any = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def wide(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 200)


def written(array: Any, name: str = "image.png", **options: Any) -> Path:
    Image.fromarray(np.asarray(array)).save(name, **options)
    return Path(name)


def grey(seed: int = 0, shape: tuple[int, ...] = (8, 8)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def read(path: Path, dataset: Any = DIGITS, **options: Any) -> np.ndarray:
    pixels = read_image(path, dataset, **options)
    assert pixels.dtype == torch.uint8
    assert tuple(pixels.shape) == dataset.shape
    return pixels.numpy()


def test_the_answers_are_those_of_the_network_run_by_hand(run: Path, capsys: Any) -> None:
    test = data.load("digits", "test")
    files = [written(test.pixels[i, 0].numpy(), f"{i}.png") for i in range(5)]
    assert main(["predict", str(run), *map(str, files), "--top", "2", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    net: Any = open_run(run, "cpu").net
    with torch.no_grad():
        output, found = net((test.pixels[:5].float() / 255 - DIGITS.mean[0]) / DIGITS.std[0], solution=True)
    chances, classes = output.softmax(1).sort(1, descending=True)
    lines = [line for line in out.splitlines() if ".png" in line]
    for i, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split("│")]
        assert cells[:2] == [f"{i}.png", str(int(classes[i, 0]))]
        assert float(cells[2].rstrip("%")) == pytest.approx(100 * float(chances[i, 0]), abs=0.06)
        name, chance = cells[3].split()
        assert int(name) == int(classes[i, 1])
        assert float(chance.rstrip("%")) == pytest.approx(100 * float(chances[i, 1]), abs=0.06)
        assert cells[4] == str(int(found.steps[i]))
        assert float(cells[5]) == pytest.approx(float(found.residual[i]), rel=0.06)
        assert cells[6] == ("yes" if bool(found.converged[i]) else "no")
    assert len(lines) == 5
    assert len(set(classes[:, 0].tolist())) > 1  # a network that says one thing shows nothing


def test_a_solve_that_is_cut_short_says_no(run: Path) -> None:
    opened = open_run(run, "cpu")
    net: Any = opened.net
    net.tolerance = replace(net.tolerance, max_steps=2)
    answer = classify(opened, torch.from_numpy(grey())[None, None], 1)[0]
    assert (answer[3], answer[5]) == (2, "no")


@pytest.mark.parametrize("flags", [["--max-steps", "0"], ["--model", "resnet56"]])
def test_without_a_fixed_point_there_are_no_steps(capsys: Any, flags: list[str]) -> None:
    assert main([*SMALL, "--epochs", "0", "--out", "r", *flags]) == 0
    assert main(["predict", "r", str(written(grey())), "--top", "1"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "image.png" in line)
    assert [cell.strip() for cell in line.split("│")][3:] == ["-", "-", "-", "-"]


def test_pixels_of_the_right_size_are_left_alone_and_inverted_on_request() -> None:
    path = written(grey())
    assert (read(path) == grey()).all()
    assert (read(path, invert=True) == 255 - grey()).all()


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
    wide = np.tile(np.linspace(0, 255, 60).astype(np.uint8), (20, 1))
    assert (np.diff(read(written(wide))[0].astype(int), axis=1) > 0).all()  # left is still left


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
    assert (read(written(rgba), invert=True) == 255 - expected).all()
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
    cmyk = Image.fromarray(grey(shape=(8, 8, 3))).convert("CMYK")
    cmyk.save("c.tif")
    assert read(Path("c.tif")).std() > 0
    # Phones write two pictures of one scene into a JPEG.
    first, second = (Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (40, 200))
    first.save("phone.jpg", format="MPO", save_all=True, append_images=[second])
    assert np.abs(read(Path("phone.jpg")).astype(int) - 40).max() <= 2


def bad_files() -> dict[str, str]:
    """Write files that are not images; return the sentence about each."""
    Path("folder.png").mkdir()
    Path("text.png").write_text("This is no image.\n")
    Path("empty.png").touch()
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
    return {
        "nothing.png": "does not exist; pass image files",
        "folder.png": "is not a file",
        "text.png": f"{unreadable}: cannot identify image file",
        "empty.png": unreadable,
        "cut.png": unreadable,
        "three.gif": "holds 3 pictures, expected one",
        "real.tif": "has pixels of 32 bits",
        "p.eps": f"{unreadable}: cannot identify image file",
        "long.png": "has 70,000 x 1 pixels, expected at most 33,554,432 pixels and 65,535 on a side",
        "large.png": "has 6,000 x 6,000 pixels, expected at most 33,554,432",
        "wide.tif": "has pixels of 32 bits",
        "heavy.png": "has 268,435,457 bytes, expected at most 268,435,456",
    }


def test_bad_files_are_refused_before_anything_is_predicted(run: Path, capsys: Any) -> None:
    good = str(written(grey(), "good.png"))
    for name, said in bad_files().items():
        assert main(["predict", str(run), good, name]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"banach: {name} {said}")
        assert (err.count("\n"), err.count(name)) == (1, 1)


def test_an_image_that_is_too_large_and_other_refusals(
    run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["predict", str(run), str(written(grey()))]
    for limit in (40, 10):  # above the limit Pillow warns, above twice the limit it raises
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert main(command) == 2
        said = "banach: image.png has too many pixels, more than 33,554,432; scale it down first\n"
        assert capsys.readouterr().err == said
    for top in ("0", "11"):
        assert main([*command, "--top", top]) == 2
        said = f"banach: top must be between 1 and 10, the number of classes, got {top}\n"
        assert capsys.readouterr().err == said
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(command) == 2
    assert "reading images needs Pillow, which is missing; run: pip install" in capsys.readouterr().err


def test_a_name_is_printed_as_it_is(run: Path, capsys: Any) -> None:
    """Brackets in a file name are no colours."""
    assert main(["predict", str(run), str(written(grey(), "a[red]b.png"))]) == 0
    assert "a[red]b.png" in capsys.readouterr().out
