"""`banach compare`: the table says what the runs wrote, and nothing is overwritten that is no plot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from banach.cli.app import main
from banach.cli.compare import FIGURES, PNG
from banach.cli.console import console
from banach.models import Steps
from banach.train import Run, Settings
from train.parts_train import epoch

pytest.importorskip("matplotlib", reason="the overlay is a plot")


def kept_file(accuracy: float, title: str = "t") -> dict[str, Any]:
    """What `banach train` writes of the test set."""
    solve = {"depth": 7.0, "max_depth": 9, "residual": 1e-4, "max_residual": 2e-4, "converged": 1.0}
    return {"totals": {"loss": 0.1, "accuracy": accuracy, **solve}, "title": title, "count": 360}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "_width", 240)
    return tmp_path


def make(path: str, epochs: int = 2, test: dict[str, Any] | None = None, **settings: Any) -> Path:
    given: dict[str, Any] = {"data": "digits", "model": "digits", "backward": "jfb", "solver": "anderson:5"}
    run = Run.create(path, Settings(**{**given, "eps": 2e-4, "epochs": 5, "device": "cpu", **settings}))
    if epochs:
        run.write_metrics([epoch(number) for number in range(1, epochs + 1)])
    if test is not None:
        run.write_test(test)
    return run.path


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]


def test_settings_that_differ_and_figures(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("runs/jfb", test=kept_file(0.98765, "digits (scikit-learn)"), ema=0.9)
    make("runs/other", 3, backward="neumann:5", solver="picard", eps=1e-3, batch_norm=False)
    assert main(["compare", "runs/jfb", "runs/other"]) == 0
    shown = rows(capsys.readouterr().out)
    assert shown == [
        ["data", "digits", "digits"],
        ["model", "digits", "digits"],
        ["solver", "anderson:5", "picard"],
        ["backward", "jfb", "neumann:5"],
        ["eps", "0.0002", "0.001"],
        ["batch-norm", "True", "False"],
        ["ema", "0.9", "-"],
        ["epochs done", "2/5", "3/5"],
        ["validation accuracy", "68.75%", "79.17%"],
        ["test accuracy", "98.77%", "-"],
        ["mean solver steps", "12.5", "13.5"],
        ["mean residual", "5.0e-06", "3.3e-06"],
        ["J-products", "3,000", "6,000"],
        ["seconds", "4.5", "9.0"],
        ["seconds per epoch", "2.25", "3.00"],
    ]
    assert (here / "comparison.png").read_bytes().startswith(PNG)


def test_a_run_without_epochs_and_explicit_ones(capsys: pytest.CaptureFixture[str]) -> None:
    make("new", 0)
    make("explicit", 1, max_steps=0, schedule=Steps((1, 2), 0.1))
    make("resnet", 1, model="resnet56", solver=None, backward=None, eps=None)
    assert main(["compare", "new", "explicit", "resnet"]) == 0
    found = {name: cells for name, *cells in rows(capsys.readouterr().out)}
    assert found["max-steps"] == ["-", "0", "-"]
    assert found["solver"] == ["anderson:5", "anderson:5", "-"]
    assert found["schedule"] == ["constant", "steps [1, 2] 0.1", "constant"]
    assert [found[name][0] for name in FIGURES] == ["0/5", *"-------"]


def test_each_run_once_by_a_unique_name_and_other_folders_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("a/run", "b/run", "c"):
        make(path)
    Path("paper-quick").mkdir()
    assert main(["compare", "a/run", "c", "b/run", "paper-quick", "a/../a/run/"]) == 0
    said, table = capsys.readouterr().out.split("\n", 1)
    assert said == "not a run, skipped: paper-quick"
    assert table.splitlines()[0].split(" ┃ ") == ["setting ", "a/run     ", "c         ", "b/run     "]


@pytest.mark.parametrize(
    ("data", "title", "said"),
    [
        (("mnist", "digits"), (None, None), True),
        (("svhn", "svhn"), ("SVHN", "SVHN re-cropped from the originals"), True),
        (("svhn", "svhn"), ("SVHN", None), False),
        (("mnist", "mnist"), ("MNIST", "MNIST"), False),
    ],
)
def test_different_data_do_not_compare(
    data: tuple[str, str], title: tuple[str | None, str | None], said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (0, 1):
        test = kept_file(0.9, str(title[number])) if title[number] else None
        make(str(number), data=data[number], test=test)
    assert main(["compare", "0", "1"]) == 0
    text = capsys.readouterr().out
    assert ("their accuracies are not comparable" in text) is said
    for name in title:
        assert name is None or name in text


@pytest.mark.parametrize("count", [1, 2, 9])
def test_no_word_is_cut_on_a_narrow_console(
    count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_width", 80)
    names = [f"a-long-name-of-a-run-{number}" for number in range(count)]
    for name in names:
        make(name, test=kept_file(0.98765), backward="implicit:gmres")
    assert main(["compare", *names]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    for value in ("implicit:gmres", "0.0002", "2/5", "68.75%", "98.77%", "12.5", "5.0e-06", "3,000", "2.25"):
        assert value in text.split()
    for word in {*names, *" ".join(FIGURES).split()}:
        assert word in text.split()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence, and that nothing was printed or written before it."""
    before = sorted(Path().rglob("*"))
    assert main(["compare", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
    return error


def test_what_is_no_plot_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    make("run")
    Path("thesis.png").write_text("not a picture")
    Path("folder.png").mkdir()
    assert "there is no run in nowhere" in refused(["run", "nowhere"], capsys)
    assert "there is no run in folder.png" in refused(["folder.png"], capsys)
    assert "not a PNG" in refused(["run", "--out", "thesis.png"], capsys)
    assert "ends in .png" in refused(["run", "--out", "thesis.tex"], capsys)
    assert "folder.png" in refused(["run", "--out", "folder.png"], capsys)
    assert Path("thesis.png").read_text() == "not a picture"
    Path("old.png").write_bytes(PNG + b"an older plot")
    assert main(["compare", "run", "--out", "old.png"]) == 0
    assert len(Path("old.png").read_bytes()) > 1000


def test_without_matplotlib_the_table_is_still_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    make("run")
    assert main(["compare", "run"]) == 0
    text = capsys.readouterr().out
    assert rows(text)[0] == ["data", "digits"]
    assert "no plot: plots need matplotlib, which is missing" in text
    assert not Path("comparison.png").exists()
