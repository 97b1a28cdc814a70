"""Your data: folders of images and .npz files become data sets; wrong ones are refused in one sentence."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from banach.data import DataError, get, load
from banach.data import dataset as registry

Image: Any = pytest.importorskip("PIL.Image")
PIXELS = np.random.default_rng(0).integers(0, 256, (60, 6, 5), dtype=np.uint8)
LABELS = np.arange(60) % 3


def folder(root: Path, index: Any = slice(None), colours: bool = False) -> Path:
    for number in np.arange(60)[index]:
        place = root / "abc"[LABELS[number]]
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(PIXELS[number])
        (image.convert("RGB") if colours else image).save(place / f"{number:02}.png")
    (root / "a" / "notes.txt").write_text("not an image")
    return root


def npz(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


SPLIT = {"x_train": PIXELS[:40], "y_train": LABELS[:40], "x_test": PIXELS[40:], "y_test": LABELS[40:]}
WHOLE = {"images": PIXELS, "labels": LABELS}


def everything(name: str) -> list[tuple[bytes, int]]:
    """All images and labels, sorted; each must be in one split only."""
    parts = [load(name, split) for split in ("train", "validation", "test")]
    return sorted(
        (p.numpy().tobytes(), int(l)) for part in parts for p, l in zip(part.pixels, part.labels, strict=True)
    )


def test_every_image_is_in_one_split_and_the_split_is_fixed(tmp_path: Path) -> None:
    wanted = sorted((PIXELS[i].tobytes(), int(LABELS[i])) for i in range(60))
    folder(tmp_path / "split" / "train", slice(40))
    folder(tmp_path / "split" / "test", slice(40, 60))
    npz(tmp_path / "split.npz", **SPLIT)
    names = [f"folder:{folder(tmp_path / 'whole')}", f"folder:{tmp_path / 'split'}"]
    names += [f"npz:{npz(tmp_path / 'whole.npz', **WHOLE)}", str(tmp_path / "split.npz")]
    for name in names:
        assert everything(name) == wanted
        assert get(name).counts == ({"train": 40, "test": 20} if "split" in name else {"train": 54, "test": 6})
        assert get(name).classes == (tuple("abc") if name.startswith("folder") else tuple("012"))
        test, again = load(name, "test"), load(name, "test")
        assert torch.equal(test.pixels, again.pixels)
        assert np.bincount(test.labels).tolist() == ([6, 7, 7] if "split" in name else [2, 2, 2])
        x = test.normalise(test.pixels)
        torch.testing.assert_close(x, test.pixels / 127.5 - 1)


def test_sizes_and_channels(tmp_path: Path) -> None:
    folder(tmp_path / "x", colours=True)
    assert load(f"folder:{tmp_path / 'x'}", "test").pixels.shape == (6, 3, 6, 5)
    Image.fromarray(PIXELS[0].T).save(tmp_path / "x" / "c" / "99.png")
    with pytest.raises(DataError, match=r"99.png has 6 x 5 pixels, others 5 x 6; resize all .*x@6"):
        load(f"folder:{tmp_path / 'x'}", "train")
    assert load(f"folder:{tmp_path / 'x'}@4", "train").pixels.shape[1:] == (3, 4, 4)
    colours = np.repeat(PIXELS[..., None], 3, 3)
    for name, images in (("last", colours), ("first", colours.transpose(0, 3, 1, 2))):
        found = load(str(npz(tmp_path / f"{name}.npz", images=images, labels=LABELS[:, None])), "test")
        assert found.pixels.shape == (6, 3, 6, 5)
        assert torch.equal(found.pixels[:, 0], found.pixels[:, 2])


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    """.ipynb_checkpoints became a class, and the ._ files of macOS were refused as damaged images."""
    root = folder(tmp_path)
    wanted = get(f"folder:{root}").counts
    (root / ".ipynb_checkpoints").mkdir()
    (root / ".ipynb_checkpoints" / "1.png").write_bytes(next((root / "a").glob("*.png")).read_bytes())
    (root / "a" / "._1.png").write_bytes(b"not an image")
    found = get(f"folder:{root}")
    assert (found.classes, found.counts) == (tuple("abc"), wanted)
    assert len(load(f"folder:{root}")) == 49


def test_the_name_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "x")
    monkeypatch.chdir(tmp_path)
    assert get("folder:x@8").name == f"folder:{tmp_path / 'x'}@8"
    assert get(str(npz(Path("y.npz"), **WHOLE))).name == f"npz:{tmp_path / 'y.npz'}"
    assert "folder:x@8" not in registry.names()


def header(shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return stream.getvalue()


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": PIXELS}, "expected arrays x_train, y_train, x_test, y_test, or images, labels, got"),
        ({**WHOLE, "images": PIXELS / 2}, "images has the type float64, expected uint8: pixels from 0 to 255"),
        ({**WHOLE, "labels": np.array([{"a": 1}] * 60)}, "labels has the type object, expected integer: class"),
        ({**WHOLE, "labels": LABELS[:9]}, "9 labels for images"),
        ({**WHOLE, "labels": LABELS + 10**9}, "a label of 1000000002, expected 0 to 255"),
        ({**WHOLE, "labels": LABELS - 1}, "labels below 0"),
        ({**WHOLE, "images": PIXELS.reshape(60, 30)}, "images must be"),
        ({**WHOLE, "labels": 0 * LABELS}, "1 classes, expected"),
        ({"images": PIXELS[:9], "labels": LABELS[:9]}, "9 training images, 0 test images"),
        ({**SPLIT, "y_test": LABELS[40:] + 3}, "test images of a class without training images"),
        ({**SPLIT, "y_test": LABELS[40:] - 3}, "labels below 0"),
        ({**SPLIT, "x_test": PIXELS[40:, 1:]}, "20 labels for images (20, 5, 5), expected (20, 6, 5); make"),
        ({"images": np.uint8(1), "labels": np.array(1)}, "1 labels for images (), expected (1,); make them match"),
        ({**WHOLE, "images": PIXELS[:, :0]}, "60 images (1, 0, 5), expected 1 to"),
    ],
)
def test_arrays_that_cannot_be_used(tmp_path: Path, arrays: dict, said: str) -> None:
    with pytest.raises(DataError) as caught:
        load(str(npz(tmp_path / "x.npz", **arrays)), "train")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_and_folders_that_cannot_be_used(tmp_path: Path) -> None:
    labels = io.BytesIO()
    np.save(labels, LABELS)
    (tmp_path / "text.npz").write_text("text")
    (tmp_path / "empty").mkdir()
    folder(tmp_path / "bad")
    (tmp_path / "bad" / "a" / "00.png").write_text("text")
    folder(tmp_path / "more" / "train")
    folder(tmp_path / "more" / "test")
    (tmp_path / "more" / "test" / "a").rename(tmp_path / "more" / "test" / "d")
    (folder(tmp_path / "nested") / "lost" / "deeper").mkdir(parents=True)  # the class was left out
    zipped(tmp_path / "bomb.npz", images=header((2**30, 64, 64)) + bytes(2**20), labels=labels.getvalue())
    zipped(tmp_path / "short.npz", images=header((60, 6, 5)) + bytes(7), labels=labels.getvalue())
    for name, said in {
        "none.npz": "cannot be read (No such file",
        "text.npz": "not a .npz file that can be used",
        "bomb.npz": "expected at most 2,147,483,648 bytes",
        "short.npz": "not a .npz file that can be used",
        "folder:none": "none is not a folder",
        "folder:empty": "empty has no images; put them into one folder per class",
        "folder:nested": "nested/lost has no images; put them into one folder per class",
        "folder:bad": "00.png is not an image that can be read",
        "folder:more": "test images of a class without training images",
    }.items():
        kind, _, rest = name.rpartition(":")
        with pytest.raises(DataError) as caught:
            load(f"{kind}:{tmp_path / rest}" if kind else str(tmp_path / rest), "train")
        assert said in str(caught.value)
