"""What the second table says below its rows, from records made by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from banach.paper import Options, neumann, table2, table2_notes, table2_ways
from banach.paper.common import Subject
from banach.paper.records import Record, cold, record_of

TINY = Subject(data="digits", model="digits", epochs=1, subset=96, fast=False)


def test_the_ratio_at_the_papers_count_of_products_is_reckoned() -> None:
    """10,000 images: JFB in 10 s with the norm and 20 without; 30 products in 15 s, and 119 in 59.5."""

    def record(way: Any, seconds: float, products: int) -> Record:
        epoch: Any = type("Epoch", (), {"seconds": seconds, "products": products * 10_000, "warm_up": False})()
        return Record(way.job(table2.FULL[2]), "", (epoch,), [], Counter())

    some = {
        table2_ways.JFB_PAPER: record(table2_ways.JFB_PAPER, 10, 0),
        table2_ways.JFB_PLAIN: record(table2_ways.JFB_PLAIN, 20, 0),
        table2_ways.CG_ABSOLUTE: record(table2_ways.CG_ABSOLUTE, 35, 30),
        table2_ways.CG_AS_MANY: record(table2_ways.CG_AS_MANY, 79, 119),
        table2_ways.JFB_CAPTURED: record(table2_ways.JFB_CAPTURED, 10, 0),
        table2_ways.JFB_PLAIN_CAPTURED: record(table2_ways.JFB_PLAIN_CAPTURED, 10, 0),
        table2_ways.CG_CAPTURED: record(table2_ways.CG_CAPTURED, 20, 200),
    }
    (note,) = table2_notes.reckoned(table2.FULL[2], some)
    assert "in the last epoch: 4.2 one by one. The paper's trainings made 19 on average" in note
    # (20 + 119 / 2) / 10; captured, on five times the images: (10 + 119 / 4) / 10
    assert "With 19 the ratio to JFB is, measured one by one, 7.9. From rows" in note
    assert "reckon: 7.95 one by one; 3.98 captured. At the 2" in note
    late = {
        table2_ways.JFB_LATE: record(table2_ways.JFB_LATE, 10, 0),
        table2_ways.JFB_PLAIN_LATE: record(table2_ways.JFB_PLAIN_LATE, 10, 0),
        table2_ways.CG_ABSOLUTE_LATE: record(table2_ways.CG_ABSOLUTE_LATE, 35, 50),
    }
    (note,) = table2_notes.reckoned(table2.FULL[2], some | late)
    assert "4.2 one by one; 7.5 one by one, after 20 epochs of JFB. The" in note
    assert "7.95 one by one; 6.95 one by one, after 20 epochs of JFB; 3.98 captured" in note
    del some[table2_ways.CG_AS_MANY]
    assert table2_notes.reckoned(table2.FULL[2], some) == []  # not where it was not asked for


def test_the_last_epochs_are_summed_up_where_there_are_enough() -> None:
    def record(*clean: float) -> Record:
        return Record(TINY.job("long"), "", (), [{"clean": one} for one in clean], Counter())

    long = record(*[0.1] * 5, 0.90, 0.92, 0.91, 0.93, 0.94)
    (note,) = table2_notes.last_epochs(TINY, {table2_ways.JFB_CAPTURED: long, table2_ways.JFB_PAPER: record(0.5)})
    assert note.endswith("of the last 5 epochs: JFB captured, with batch norm 92 ± 1.6 (n = 5)")
    (note,) = table2_notes.last_epochs(replace(TINY, seeds=2), {table2_ways.JFB_CAPTURED: long})
    assert "5 epochs of the first seed: JFB" in note


def test_what_seeds_and_epochs_tell_is_told() -> None:
    def record(*clean: tuple[float, float]) -> Record:
        curve = [{"clean": share, "converged": met} for share, met in clean]
        return Record(TINY.job("some"), "", (), curve, Counter())

    way, other = table2_ways.CG_CAPTURED, table2_ways.JFB_PAPER
    done = {way: record((0.9, 0.5), (0.99, 1.0)), other: record((0.5, 1.0))}
    (note,) = table2_notes.by_seed(TINY, done, {way: [record((0.98, 0.84))], other: []})
    assert note.endswith("steps of CG captured, without batch norm 99.00 (100.0%), 98.00 (84.0%)")
    assert table2_notes.by_seed(TINY, done, {way: [], other: []}) == []
    assert table2._tested([done[way], record((0.98, 0.84))]) == {"test converged": pytest.approx(0.92)}
    epochs: Any = [type("Epoch", (), {"seconds": seconds})() for seconds in (7.24, 7.04)]
    timed = {other: replace(done[other], epochs=epochs), way: replace(done[way], epochs=epochs[:1])}
    (note,) = table2_notes.once(TINY, timed)
    assert note.endswith("warms up, and of it: JFB one by one, with batch norm 7.24 and 7.04")


def test_times_of_interrupted_runs_and_of_other_processes_are_spoken_of(tmp_path: Path) -> None:
    def record(job: Any, *epochs: tuple[float, bool]) -> Record:
        parts: Any = [type("Epoch", (), {"seconds": s, "warm_up": cold})() for s, cold in epochs]
        return Record(job, "", tuple(parts), [], Counter())

    job = table2_ways.JFB_CAPTURED.job(table2.FULL[1])
    done = {table2_ways.JFB_CAPTURED: record(job, (9, True), (8, True))}
    (note,) = cold(done.values())
    assert note.startswith("table2-svhn-jfb-captured-bn-seed0 was interrupted")
    done = {table2_ways.JFB_CAPTURED: record(job, (9, True), (8, False), (7, False))}
    assert cold(done.values()) == []
    assert table2_notes.elsewhere(table2.FULL[1], done, Options(runs=tmp_path / "runs")) == []
    kept = Options(runs=Path(__file__).resolve().parents[2] / "results" / "paper" / "trainings")
    (note,) = table2_notes.elsewhere(table2.FULL[1], done, kept)
    theirs = [epoch.seconds for epoch in record_of(neumann.job(neumann.FULL[1], 0), kept).epochs[1:3]]
    assert f"took 7.5 s per epoch here and {sum(theirs) / 2:.3g} in" in note
