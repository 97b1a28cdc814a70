"""The page of the reproduction: what the files hold stands on it, and nothing else."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from banach.paper.report import ReportError, write_report
from banach.paper.study import Findings, Options
from banach.provenance import Summary


def figure() -> object:
    from matplotlib.figure import Figure

    made = Figure()
    made.subplots().plot([1, 2], [3, 4])
    return made


def findings(name: str = "toy") -> Findings:
    rows: list[dict[str, Any]] = [
        {"what": "accuracy | clean", "paper": 99.4, "ours": Summary.of([99.1, 99.5])},
        {"what": "<b>time</b>", "paper": None, "ours": 12},
    ]
    return Findings(name, "y = d + y^5 has one solution", rows, ["shortened & said so"], {f"{name}-curve": figure})


def test_figures_and_rows_of_a_study_are_on_both_pages(tmp_path: Path) -> None:
    options = Options(quick=True, device="cpu", out=tmp_path / "results")
    written = findings().write(options)
    assert {path.name for path in written} == {"toy.json", "toy-curve.png", "toy-curve.svg"}
    assert (tmp_path / "results/toy-curve.svg").read_text().lstrip().startswith("<?xml")
    page = write_report(options.out, tmp_path / "docs/page.md")
    text, web = page.read_text(), page.with_suffix(".html").read_text()
    assert "99.3 ± 0.28 (n = 2)" in text
    assert "accuracy \\| clean" in text
    assert "![toy-curve](../results/toy-curve.png)" in text
    assert "banach paper toy --quick" in text
    assert "&lt;b&gt;time&lt;/b&gt;" in web
    assert base64.b64encode((tmp_path / "results/toy-curve.png").read_bytes()).decode() in web
    origin = json.loads((tmp_path / "results/toy.json").read_text())["provenance"]
    for word in (origin["device"], origin["versions"]["torch"], origin["date"]):
        assert word in text
        assert word in web


def test_studies_stand_in_the_order_of_the_paper(tmp_path: Path) -> None:
    options = Options(device="cpu", out=tmp_path)
    for name in ("accelerate", "own", "figures"):
        findings(name).write(options)
    text = write_report(tmp_path, tmp_path / "page.md").read_text()
    places = [text.index(f"## {name}\n") for name in ("figures", "accelerate", "own")]
    assert places == sorted(places)
    assert "--quick" not in text


def test_damaged_and_missing_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="there are no results"):
        write_report(tmp_path, tmp_path / "page.md")
    (tmp_path / "toy.json").write_text('{"rows": 3}')
    with pytest.raises(ReportError, match=r"toy\.json is not the result of a study"):
        write_report(tmp_path, tmp_path / "page.md")
    assert not (tmp_path / "page.md").exists()
