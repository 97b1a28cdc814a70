"""What the studies come to: rows by hand, and the claims they stand for."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from banach.paper import neumann, table1, table2, table2_ways, theory
from banach.paper.headlines import headlines
from banach.paper.marks import MARKS, take
from banach.paper.records import RECORD, record_of
from banach.paper.report import write_report
from banach.paper.study import Findings, Options
from banach.provenance import plain

OWN = Path(__file__).resolve().parents[2] / "results" / "paper"


def summary(mean: float, spread: float | None = 0.1, count: int = 3) -> dict[str, Any]:
    return {"mean": mean, "spread": spread, "count": count, "median": mean}


def of(name: str, *rows: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
    return [(row["paper"], row["ours"], row["holds"]) for row in headlines([{"name": name, "rows": list(rows)}])]


def test_accuracies_stand_beside_printed_ones() -> None:
    def row(method: str, paper: float | None, clean: float | None) -> dict[str, Any]:
        known = clean and summary(clean)
        return {"data": "X", "method": method, "paper %": paper, "clean %": known, "released %": known}

    found = of("table1", row("JFB", 99.4, 99.5), row("explicit: the twin", 99.4, 99.25), row("MON", 99.2, None))
    told = "99.5 ± 0.1 (n = 3)"
    gain = "+0.25 ± 0.082 (standard error)"  # .1 (2 / 3)^.5
    assert found[:2] == [(99.4, told, True)] * 2  # by both protocols
    assert found[2:] == [("+0.0", gain, True)]
    (other,) = headlines([{"name": "table1", "rows": [row("JFB, otherwise", 99.4, 99.5)]}])
    assert other["claim"] == "X: JFB, otherwise, our settings, per cent by the clean protocol"
    rival = row("explicit: ResNet-56", 93.0, 99.25)
    (claim,) = headlines([{"name": "table1", "rows": [row("JFB", 93.7, 99.5), rival]}])[2:]
    assert claim["claim"] == "X: JFB matches ResNet-56, points"
    assert (claim["paper"], claim["ours"]) == ("+0.7", gain)
    short = [row("JFB", 93.7, 99.5) | {"epochs": "20 of 1000"}, rival | {"epochs": "20 of 182"}]
    claim = headlines([{"name": "table1", "rows": short}])[2]["claim"]
    assert claim == "X: JFB matches ResNet-56, points (20 of 1000 epochs), its own 20 of 182 epochs"
    twin, so = table1.TWIN, table1.DECAYED
    rows = [row("JFB" + so, 99.4, 99.25), row(twin, 99.4, 98), row(twin + so, 99.4, 99.5)]
    against = of("table1", *rows)[1:]  # with the twin that was trained alike
    assert against == [("+0.0", "-0.25 ± 0.082 (standard error)", False)]
    assert of("table1", rows[0])[0][2] is False
    assert of("table1", row("JFB", 99.4, 99.36))[0][2] is True  # as it would be printed
    assert of("table1", row("JFB", 99.4, 99.3))[0][2] == "within two standard errors"  # .1 / 3^.5 each


def test_what_was_shortened_refutes_nothing() -> None:
    row = {"data": "X", "method": "JFB, longer", "paper %": 93.7, "clean %": summary(90), "epochs": "30 of 1000"}
    assert of("table1", row)[0][2] == "not at this length"
    assert of("table1", row | {"clean %": summary(94)})[0][2] == "yes, at this length"
    assert of("table1", row | {"epochs": "9 of 9"})[0][2] is False


def test_each_tolerance_is_compared() -> None:
    def row(method: str, norm: bool, ratio: float, clean: float) -> dict[str, Any]:
        printed = None if method == "JFB" else 1.6
        more = {"paper: ratio": printed, "ratio": ratio, "clean %": summary(clean, None, 1), "test images": 10_000}
        more |= {"ratio, same settings": 2.0, "adjoints solved": 0.97}
        return {"data": "X", "method": method, "batch norm in R": norm, "steps": "one by one", **more}

    rows = [
        row("JFB", True, 1, 98),
        row("JFB", False, 0.8, 99),
        row("A", False, 1.5, 97),
        row("B", False, 9, 98.5),
    ]
    with_norm = row("to a relative 1", True, 1.1, 99)  # that with batch norm is not the paper's
    alike = "with one R and one setting for both"
    short = "longer, but by less than in the paper; with one R yes"  # 2 is above 1.6
    less, more = (1.6, f"1.5; 2 {alike}", short), (1.6, f"9; 2 {alike}", True)
    better = (">= 0", f"+1.00 ± 0.22; +2.00 ± 0.2 {alike}", True)
    worse = (">= 0", f"-0.50 ± 0.19; +0.50 ± 0.16 {alike}", "no; with one R yes")
    solved = ("fails", "97.0%", False)
    assert of("table2", *rows, with_norm) == [less, more, better, worse, solved]
    assert of("table2", with_norm | {"epochs": "3 of 100"})[0][2] == "it converges, at this length"
    assert of("table2", with_norm | {"adjoints solved": 0.1})[0][2] is True
    assert of("table2", row("A", True, 1.1, 99)) == []
    assert of("table2", *rows[:2], row("A", False, 0.9, 97) | {"ratio, same settings": 0.8})[0][2] is False
    slow = of("table2", *rows[:2], row("B", False, 9, 98) | {"ratio, same settings": 1.2})[0][2]
    assert slow == "yes; with one R longer, but by less than in the paper"
    assert of("table2", *rows[:2], rows[3] | {"epochs": "3 of 100"})[0][2] == "yes, at this length"
    rows[2:] = [row("B", False, 9, 98.25)]
    assert of("table2", *rows)[1][1:] == (
        f"-0.25 ± 0.19; +0.75 ± 0.16 {alike}",
        "within two standard errors; with one R yes",
    )
    rows[2:] = [row("B", False, 9, 98)]
    assert of("table2", *rows)[1:] == [(">= 0", f"+0.00 ± 0.2; +1.00 ± 0.17 {alike}", True)]
    assert of("table2", *rows[:2]) == of("table2", *rows[1:]) == []  # nothing to compare
    other = [row | {"steps": "captured", "ratio": 2 * row["ratio"]} for row in rows]
    assert [ours[:2] for _, ours, _ in of("table2", *rows, *other)][::2] == ["9;", "18"]  # each path on its own
    seeds = [row | {"clean %": summary(row["clean %"]["mean"], 0.3, 3)} for row in rows]
    assert of("table2", *seeds)[1][1] == f"+0.00 ± 0.24; +1.00 ± 0.24 {alike}"  # 0.3 sqrt(2 / 3)
    assert "3 seeds" in headlines([{"name": "table2", "rows": seeds}])[1]["claim"]


def test_rivals_with_another_r_or_without_fixed_points_are_marked() -> None:
    def row(method: str, norm: bool, **more: Any) -> dict[str, Any]:
        base: dict[str, Any] = {
            "paper: ratio": None if method == "JFB" else 1.6,
            "ratio": 2.0,
            "clean %": summary(98, None, 1),
        }
        base |= {"data": "X", "method": method, "batch norm in R": norm, "steps": "one by one"}
        return base | {"test images": 10_000, "ratio, same settings": 1.0} | more

    jfb = [row("JFB", True), row("JFB", False)]
    scaled = of("table2", *jfb, row("A", False, **{"ratio, same settings": None}))
    assert [ours for _, ours, _ in scaled] == ["2", "+0.00 ± 0.2"]
    missed = of("table2", *jfb, row("A", False, **{"forward converged": 0.0}))
    assert [verdict for *_, verdict in missed] == [
        "yes; with one R no; its solves miss eps",
        "yes; its solves miss eps",
    ]


def test_other_solvers_are_compared_with_picard() -> None:
    def row(what: str, solver: str) -> dict[str, Any]:
        return {"data": "X", "what": what, "solver": solver, "against Picard": 0.5, "seconds against Picard": 2.0}

    rows = [row("solve 4 to 1", "Anderson(5)"), row("train to 90", "Picard"), row("train to 90", "Broyden(10)")]
    rows += [row("train to 90", "Anderson(5)")]
    assert of("accelerate", *rows) == [(None, "0.5; 2", None), ("promising", "0.5; 2", None)]  # the paper says so


def test_a_claim_says_how_long_the_run_was() -> None:
    row = {"data": "X", "method": "JFB, so", "paper %": 93.7, "clean %": summary(90), "epochs": "30 of 1000"}
    (found,) = headlines([{"name": "table1", "rows": [row]}])
    assert found["claim"].endswith("(30 of 1000 epochs)")
    (found,) = headlines([{"name": "table1", "rows": [row | {"epochs": "100 of 100"}]}])
    assert found["claim"].endswith("protocol")


def test_fewer_terms_must_be_faster_for_every_order() -> None:
    rows = [{"data": "X", "order k": k, "seconds against k = 0": s} for k, s in ((0, 1.0), (1, 0.9), (10, 3.0))]
    assert of("neumann", *rows) == [("> 1", 3.0, False)]
    rows[1]["seconds against k = 0"] = 1.2
    assert of("neumann", *rows) == [("> 1", 3.0, True)]
    short = [row | {"epochs": "6 of 100"} for row in rows]
    assert of("neumann", *short) == [("> 1", 3.0, "yes, at this length")]


def test_memory_at_the_deepest() -> None:
    rows = [
        {"scheme": scheme, "depth": depth, "against depth 1": depth if scheme == "unrolled" else 1.0}
        for scheme in ("JFB", "unrolled")
        for depth in (1, 64)
    ]
    assert [(ours, holds) for _, ours, holds in of("memory", *rows)] == [(1.0, True), (64, None)]


def test_the_committed_trainings_are_those_of_the_table() -> None:
    """Read by `take`, not trained anew: a change of what names a job would throw them away."""
    jobs = {job.name: job for entry in table1.FULL for job in entry.jobs()}
    kept = sorted((OWN / "trainings").glob(f"*/{MARKS}"))
    assert len(kept) == len(jobs)
    for path in kept:
        found = take(
            jobs[path.parent.name], Options(runs=OWN / "trainings", device="cpu", data_dir=Path("/nowhere"))
        )
        assert found.own.accuracy > 0.8


def test_the_committed_records_are_those_of_their_studies() -> None:
    jobs = [job for subject in table2.FULL for job in table2_ways.jobs(subject)]
    jobs += [neumann.job(subject, order) for subject in neumann.FULL for order in neumann.ORDERS]
    kept = sorted((OWN / "trainings").glob(f"*/{RECORD}"))
    assert {path.parent.name for path in kept} == {job.name for job in jobs}
    for job in jobs:
        found = record_of(job, Options(runs=OWN / "trainings", device="cpu", data_dir=Path("/nowhere")))
        assert [epoch.epoch for epoch in found.epochs] == list(range(1, job.settings.epochs + 1))
        assert len(found.curve) == len(found.epochs)


def test_the_committed_readings_are_those_of_the_theory() -> None:
    """And its committed file is made of them."""
    kept = Options(runs=OWN / "trainings", device="cpu", data_dir=Path("/nowhere"))
    written = json.loads((OWN / "theory.json").read_text())["details"]
    for case in theory.CASES["full"]:
        found = theory.take(case, kept)
        assert [reading.epoch for reading in found.readings] == list(case.epochs)
        assert plain([asdict(reading) for reading in found.readings]) == written[case.model]


def test_the_committed_files_of_trainings_are_understood() -> None:
    names = ("table2", "neumann", "accelerate", "memory")
    found = headlines(json.loads((OWN / f"{name}.json").read_text()) for name in names)
    faster = [float(row["ours"].partition(";")[0]) for row in found if row["paper"] in {1.6, 2.5, 3.6}]
    assert len(faster) == 3 * 3 + 3
    assert all(ratio > 1 for ratio in faster)
    assert [row["holds"] for row in found if "Neumann" in row["claim"]] == ["yes, at this length"] * 2
    assert sum(row["paper"] == "promising" for row in found) == 2


def test_the_committed_files_are_understood() -> None:
    names = ("toy", "theory")
    found = headlines(json.loads((OWN / f"{name}.json").read_text()) for name in names)
    assert len(found) == 1 + 4 * 4 + 2
    assert (found[0]["paper"], found[0]["ours"]) == (11, 10)  # the slip of the paper, which is mended
    assert [row["holds"] for row in found if "kappa" in row["claim"]] == ["0 of 16", "0 of 4", "0 of 3", "0 of 16"]
    assert all(row["ours"] is not None for row in found)


def test_a_page_says_what_is_not_on_it(tmp_path: Path) -> None:
    Findings("figures", "a claim", []).write(Options(device="cpu", out=tmp_path))
    page = write_report(tmp_path, tmp_path / "page.md")
    for text in (page.read_text(), page.with_suffix(".html").read_text()):
        assert "Not run yet (banach paper NAME): table1, table2, neumann, accelerate, memory, toy, theory." in text
