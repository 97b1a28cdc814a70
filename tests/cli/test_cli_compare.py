"""`banach compare`: the table says what the runs wrote, and nothing is overwritten that is no plot."""

import sys
from pathlib import Path
from typing import Any

import pytest

from banach.cli.app import main
from banach.cli.compare import PNG
from banach.cli.console import console
from banach.models import Steps
from banach.train import Run, Settings
from cli.conftest import refused, rows
from train.parts_train import epoch, totals

pytest.importorskip("matplotlib", reason="the overlay is a plot")


def kept_file(accuracy: float, title: str = "t") -> dict[str, Any]:
    """What `banach train` writes of the test set."""
    return {"totals": totals(accuracy=accuracy), "title": title, "count": 360}


def make(path: str, epochs: int = 2, test: dict[str, Any] | None = None, **settings: Any) -> Path:
    given: dict[str, Any] = {"data": "digits", "model": "digits", "backward": "jfb", "solver": "anderson:5"}
    run = Run.create(path, Settings(**{**given, "eps": 2e-4, "epochs": 5, "device": "cpu", **settings}))
    if epochs:
        run.write_metrics([epoch(number) for number in range(1, epochs + 1)])
    if test is not None:
        run.write_test(test)
    return run.path


def test_settings_that_differ_and_figures(here: Path, capsys: Any) -> None:
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
    Path("comparison.png").write_bytes(PNG + b"an older plot")
    assert main(["compare", "runs/jfb"]) == 0
    assert len(Path("comparison.png").read_bytes()) > 1000


def test_a_run_without_epochs_and_explicit_ones(capsys: Any) -> None:
    make("new", 0)
    make("explicit", 1, max_steps=0, schedule=Steps((1, 2), 0.1))
    make("resnet", 1, model="resnet56", solver=None, backward=None, eps=None)
    assert main(["compare", "new", "explicit", "resnet"]) == 0
    found = {name: cells for name, *cells in rows(capsys.readouterr().out)}
    assert found["max-steps"] == ["-", "0", "-"]
    assert found["solver"] == ["anderson:5", "anderson:5", "-"]
    assert found["schedule"] == ["constant", "steps [1, 2] 0.1", "constant"]
    assert [cells[0] for cells in list(found.values())[-8:]] == ["0/5", *"-------"]


def test_different_data_do_not_compare(capsys: Any) -> None:
    make("published", data="svhn", test=kept_file(0.9, "SVHN"))
    make("other", data="svhn", test=kept_file(0.9, "SVHN re-cropped from the originals"))
    make("unfinished", data="svhn")
    make("mnist", data="mnist")
    for run, different in {"other": True, "mnist": True, "unfinished": False}.items():
        assert main(["compare", "published", run]) == 0
        text = capsys.readouterr().out
        assert ("their accuracies are not comparable" in text) is different
        assert f"data: SVHN{', SVHN re-cropped from the originals' if run == 'other' else ''}\n" in text


@pytest.mark.parametrize("count", [1, 9])
def test_no_word_is_cut_on_a_narrow_console(count: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(console, "_width", 80)
    names = [f"a-long-name-of-a-run-{number}" for number in range(count)]
    for name in names:
        make(name, test=kept_file(0.98765), backward="implicit:gmres")
    assert main(["compare", *names]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    for value in ("implicit:gmres", "0.0002", "2/5", "68.75%", "98.77%", "12.5", "5.0e-06", "3,000", "2.25"):
        assert value in text.split()
    for word in (*names, "accuracy", "residual", "J-products", "seconds"):
        assert word in text.split()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nowhere"], "no run in nowhere"),
        (["run", "--out", "thesis.png"], "not a PNG"),
        (["run", "--out", "thesis.tex"], "ends in .png"),
        (["run", "--out", "folder.png"], "folder.png"),
    ],
)
def test_what_is_no_plot_is_not_overwritten(arguments: list[str], said: str, capsys: Any) -> None:
    make("run")
    Path("thesis.png").write_text("not a picture")
    Path("folder.png").mkdir()
    before = {path: path.is_dir() or path.read_bytes() for path in Path().rglob("*")}
    assert refused(["compare", *arguments], capsys, said) == ""
    assert {path: path.is_dir() or path.read_bytes() for path in Path().rglob("*")} == before


def test_without_matplotlib_the_table_is_still_there(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    make("run")
    assert main(["compare", "run"]) == 0
    text = capsys.readouterr().out
    assert rows(text)[0] == ["data", "digits"]
    assert "no plot: a plot needs matplotlib, which is missing" in text
    assert not Path("comparison.png").exists()
