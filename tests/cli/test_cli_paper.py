"""`banach paper`: a study by name, its files, the report, and names that are not known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from banach import data
from banach.cli.app import main
from banach.cli.console import console
from banach.cli.paper import _print_rows
from banach.paper import Findings, Options, neumann
from banach.paper.all import STUDIES
from banach.paper.beforehand import check_data
from banach.provenance import Summary


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_study_of_the_paper_is_there() -> None:
    wanted = {"table1", "table2", "neumann", "figures", "accelerate", "toy", "theory", "memory"}
    assert set(STUDIES) == wanted
    assert all(study.claim for study in STUDIES.values())


def test_a_study_writes_its_files_and_the_report_reads_them(here: Path, capsys: Any) -> None:
    assert main(["paper", "memory", "--quick"]) == 0
    out = here / "runs/paper-quick"
    content = json.loads((out / "memory.json").read_text())
    assert content["quick"] is True
    assert content["provenance"]["versions"]["torch"]
    assert all((out / name).exists() for name in content["figures"])
    assert STUDIES["memory"].claim.split()[0] in capsys.readouterr().out
    assert main(["paper", "report", "--quick"]) == 0  # not the place of the real page
    assert (out / "reproduction.md").exists()
    assert not (here / "docs").exists()
    assert main(["paper", "report", "--quick", "--page", "page.md"]) == 0
    assert "banach paper memory --quick" in (here / "page.md").read_text()
    assert (here / "page.html").exists()


def test_where_there_is_no_room_for_a_table_rows_come_one_by_one(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {
        "data": "MNIST",
        "method": "JFB",
        "clean %": Summary.of([99.2, 99.4]),
        "paper %": None,
        "epochs": "3 of 9",
    }
    found = Findings("table1", "a claim", [row, {"data": "SVHN", "method": "none", "clean %": 1.0}])
    monkeypatch.setattr(console, "_width", 40)
    _print_rows(found)
    assert capsys.readouterr().out == (
        "MNIST, JFB\n    clean % 99.3 ± 0.14 (n = 2); epochs\n    3 of 9\nSVHN, none\n    clean % 1\n"
    )
    monkeypatch.setattr(console, "_width", 120)
    _print_rows(found)
    assert "99.3 ± 0.14 (n = 2)" in next(line for line in capsys.readouterr().out.splitlines() if "JFB" in line)


def test_unknown_studies_and_missing_results_are_refused(here: Path, capsys: Any) -> None:
    assert main(["paper", "tabel1"]) == 2
    assert "did you mean 'table1'" in capsys.readouterr().err
    assert main(["paper", "report"]) == 2
    assert "there are no results in results/paper" in capsys.readouterr().err
    assert main(["paper"]) == 2


def test_everything_runs_quickly_on_digits(here: Path) -> None:
    """What `banach paper all report --quick` promises: every study, its figures, and one page of them all."""
    assert main(["paper", "all", "report", "--quick"]) == 0
    out = here / "runs/paper-quick"
    contents = [json.loads((out / f"{name}.json").read_text()) for name in STUDIES]
    assert all(content["rows"] and content["figures"] for content in contents)
    assert all(
        (out / name).with_suffix(end).exists()
        for c in contents
        for name in c["figures"]
        for end in (".png", ".svg")
    )
    page = (out / "reproduction.md").read_text()
    assert all(f"\n## {name}\n" in page for name in STUDIES)
    assert "Not run yet" not in page


@pytest.mark.parametrize("columns", ["0", "20"])
def test_a_strange_width_loses_nothing(columns: str, here: Path) -> None:
    command = [sys.executable, "-m", "banach", "paper", "memory", "--quick", "--device", "cpu"]
    done = subprocess.run(
        command, env=os.environ | {"COLUMNS": columns}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "written:" in " ".join(done.stdout.split())
    assert (here / "runs/paper-quick/memory.json").exists()


def test_a_place_that_cannot_be_written_to_is_refused_at_once(here: Path, capsys: Any) -> None:
    (here / "file").write_text("mine")
    assert main(["paper", "theory", "--quick", "--out", "file"]) == 2
    assert capsys.readouterr().err.strip().endswith("cannot be written to (File exists); choose another folder")
    assert not (here / "runs").exists()
    assert (here / "file").read_text() == "mine"


def test_a_page_takes_the_place_of_no_result(here: Path, capsys: Any) -> None:
    assert main(["paper", "memory", "--quick", "--out", "out"]) == 0
    before = (here / "out/memory.json").read_text()
    (here / "folder.html").mkdir()
    for page in ("out/memory.json", "page.html", "out", "folder.md", ""):
        assert main(["paper", "report", "--out", "out", "--page", page]) == 2
        assert "the page must be a file that ends in .md" in capsys.readouterr().err
    assert (here / "out/memory.json").read_text() == before
    assert not (here / "folder.md").exists()


def test_every_training_is_announced_and_an_interruption_says_how_to_go_on(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = replace(neumann.QUICK[0], epochs=1, subset=64)
    monkeypatch.setattr(neumann, "QUICK", (subject,))
    assert main(["paper", "neumann", "--quick"]) == 0
    said = capsys.readouterr().out
    assert all(f"neumann-digits-k{order}-seed0: 1 epochs\n" in said for order in neumann.ORDERS)
    assert main(["paper", "neumann", "--quick"]) == 0
    assert "seed0: 1 epochs" not in capsys.readouterr().out  # read, not trained

    def stopped(options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(STUDIES, "memory", replace(STUDIES["memory"], run=stopped))
    assert main(["paper", "memory", "--quick"]) == 130
    assert "the same command goes on" in capsys.readouterr().out


def test_data_that_a_later_training_needs_is_missed_before_the_first_begins(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BANACH_DATA", raising=False)
    monkeypatch.setenv("BANACH_CACHE", str(here / "cache"))
    for name in ("mnist", "svhn"):  # by their names they are there
        layout = data.get(name).layouts[0]
        for file in (file for files in layout.files.values() for file in files):
            path = here / "data" / layout.folders[0] / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    assert main(["paper", "neumann", "table2", "--data-dir", "data"]) == 2
    said = capsys.readouterr()
    assert "cifar10 was not found in data" in said.err
    assert "claim" not in said.out
    assert not (here / "runs").exists()
    assert not list((here / "results/paper").iterdir())


def test_what_is_kept_needs_no_data(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BANACH_DATA", raising=False)
    monkeypatch.setenv("BANACH_CACHE", str(here / "cache"))
    kept = Path(__file__).parents[2] / "results/paper/trainings"
    options = Options(runs=kept)
    check_data([study for name, study in STUDIES.items() if name != "accelerate"], options)
    with pytest.raises(data.DataError, match="mnist was not found"):  # it needs weights
        check_data([STUDIES["accelerate"]], options)
