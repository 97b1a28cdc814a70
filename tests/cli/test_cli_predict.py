"""`banach predict`: the answers are those of the network, and images that look wrong are named."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from banach import data
from banach.cli.app import main
from banach.cli.predict import classify, looks_inverted
from banach.cli.shared import open_run
from banach.data import CIFAR10, DIGITS
from cli.conftest import SMALL, refused, rows
from data.parts_data import grey, written

pytest.importorskip("PIL.Image")


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
    for i, cells in enumerate(rows(out)):
        assert cells[0] == f"{i}.png"
        for cell, k in zip(cells[1:3], range(2), strict=True):
            name, chance = cell.rstrip("%)").split(" (")
            assert int(name) == int(classes[i, k])
            assert float(chance) == pytest.approx(100 * float(chances[i, k]), abs=0.06)
        assert cells[3] == str(int(found.steps[i]))
        assert float(cells[4]) == pytest.approx(float(found.residual[i]), rel=0.06)
        assert cells[5] == ("yes" if bool(found.converged[i]) else "no")
    assert len(rows(out)) == 5
    assert len(set(classes[:, 0].tolist())) > 1  # a network that says one thing shows nothing


def test_a_solve_that_is_cut_short_says_no(run: Path) -> None:
    opened = open_run(run, "cpu")
    net: Any = opened.net
    net.tolerance = replace(net.tolerance, max_steps=2)
    answer = classify(opened, torch.from_numpy(grey())[None, None], 1)[0]
    assert answer[2::2] == [2, "no"]


@pytest.mark.parametrize("flags", [["--max-steps", "0"], ["--model", "resnet56"]])
def test_without_a_fixed_point_there_are_no_steps(capsys: Any, flags: list[str]) -> None:
    assert main([*SMALL, "--epochs", "0", "--out", "r", *flags]) == 0
    assert main(["predict", "r", str(written(grey())), "--top", "1"]) == 0
    assert rows(capsys.readouterr().out)[-1][2:] == ["-", "-", "-", "-"]


def test_inverted_and_squashed_images_are_named(run: Path, capsys: Any) -> None:
    """Dark strokes on white paper were read as another digit, without a hint."""
    digit = data.load("digits", "test").pixels[0, 0].numpy()
    written(digit, "good.png")
    written(255 - digit, "paper.png")
    written(np.kron(digit, np.ones((1, 2), np.uint8)), "wide.png")
    assert main(["predict", "run", "good.png", "paper.png", "wide.png"]) == 0
    out = capsys.readouterr().out
    assert "looks inverted: paper.png (the mean brightness of digits (scikit-learn) is 29%" in out
    assert "squashed to 8 x 8 pixels: wide.png (the sides have another ratio)" in out
    answers = {name: answer for name, *answer in rows(out)}
    assert main(["predict", "run", "paper.png", "--invert"]) == 0
    out = capsys.readouterr().out
    assert rows(out)[0][1:] == answers["good.png"]
    assert "inverted" not in out
    for level in (0, 60, 200, 255):  # photos are never called inverted
        assert not looks_inverted(torch.full((3, 32, 32), level, dtype=torch.uint8), fmean(CIFAR10.mean))


def test_a_folder_is_all_its_images(run: Path, capsys: Any) -> None:
    Path("scans").mkdir()
    for number in range(5):
        written(255 - grey(number) // 3, f"scans/{number}.png")
    Path("scans/notes.txt").touch()
    assert main(["predict", "run", "scans", "--top", "1"]) == 0
    out = capsys.readouterr().out
    assert [row[0] for row in rows(out)] == [f"scans/{number}.png" for number in range(5)]
    assert "looks inverted: scans/0.png, scans/1.png, scans/2.png and 2 more" in out
    Path("empty").mkdir()
    refused(["predict", "run", "empty"], capsys, "empty has no image files; pass files")


def test_refusals(run: Path, capsys: Any) -> None:
    good = str(written(grey(), "a[red]b.png"))  # brackets in a name are not colours
    Path("text.png").write_text("This is not an image.\n")
    for arguments, said in (
        ([good, "text.png"], "text.png is not an image that can be read: cannot identify image file"),
        ([good, "--top", "0"], "top must be a whole number, at least 1 and at most 10, got 0"),
        ([good, "--top", "two"], "top must be a whole number, at least 1 and at most 10, got 'two'"),
    ):
        assert main(["predict", "run", *arguments]) == 2
        assert capsys.readouterr() == ("", f"banach: {said}\n")
    assert main(["predict", "run", good]) == 0
    assert good in capsys.readouterr().out


def test_two_classes(capsys: Any) -> None:
    """The default of three classes was refused: "got 3", though no --top was given."""
    np.savez("two.npz", images=np.stack([grey()] * 40), labels=np.arange(40) % 2)
    command = ["train", "--data", "two.npz", "--model", "digits", *SMALL[3:], "--epochs", "0"]
    assert main([*command, "--out", "r"]) == 0
    assert main(["predict", "r", str(written(grey()))]) == 0
    assert "class" in capsys.readouterr().out
    refused(["predict", "r", "image.png", "--top", "3"], capsys, "at most 2, got 3")
