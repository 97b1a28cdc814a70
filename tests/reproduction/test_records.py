"""Records, intervals and verdicts, tables and placeholders of pages."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import ttest_ind

from banach.provenance import plain
from banach.train import RunError
from reproduction import report, study
from reproduction.study import Claim, Interval, origins, store, table, verdict


@dataclass(frozen=True)
class Inner:
    name: str
    value: float | None = None


@dataclass(frozen=True)
class Outer:
    count: int
    share: float
    flag: bool
    inner: Inner
    parts: tuple[Inner, ...]
    by_name: dict[str, tuple[float, ...]]


FULL = Outer(3, math.inf, True, Inner("a", 1.5), (Inner("b"),), {"k": (1.0, -math.inf)})


def test_dataclasses_come_back_as_they_were(tmp_path: Path) -> None:
    store(tmp_path / "rows.jsonl", [FULL, FULL], torch.device("cpu"))
    store(tmp_path / "rows.jsonl", [FULL], torch.device("cpu"), append=True)
    assert study.read(Outer, tmp_path / "rows.jsonl") == [FULL] * 3
    assert "(3 records)" in origins(tmp_path / "rows.jsonl")
    assert study.read(Outer, tmp_path / "no.jsonl") == []
    assert math.isnan(study.decode(float, plain(math.nan)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({**asdict(FULL), "share": "much"}, "could not convert"),
        ({**asdict(FULL), "inner": {"value": 1}}, "name"),
        ({**asdict(FULL), "inner": {"name": "a", "value": "b"}}, "could not convert"),
        ({"count": 1}, "missing"),
    ],
)
def test_records_that_do_not_fit_are_refused(line: Any, words: str, tmp_path: Path) -> None:
    study.write_lines(tmp_path / "rows.jsonl", [line])
    with pytest.raises(RunError, match=rf"rows.jsonl does not fit: .*{words}"):
        study.read(Outer, tmp_path / "rows.jsonl")


def test_a_damaged_file_is_named_and_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"epoch": 1}\n{"epo')
    assert study.read_lines(path) == [{"epoch": 1}]
    path.write_text('{"epoch": 1\n{"epoch": 2}\n')
    with pytest.raises(RunError, match="is damaged"):
        study.read_lines(path)


def test_intervals_by_the_t_quantile_and_welchs_difference() -> None:
    ours = Interval.of([99.0, 99.2, 99.4])
    assert ours.half == pytest.approx(4.3027 * 0.2 / 3**0.5, rel=1e-4)  # t of 2 degrees of freedom
    assert str(ours) == "99.20 ± 0.50 (n = 3)"
    assert f"{Interval.of([1.0]):+.1f}" == "+1.0"
    assert math.isnan(Interval.of([1.0]).half)
    nothing = Interval.of([])
    assert (str(nothing), f"{nothing:+.1f}", f"{ours.minus(nothing)}") == ("-", "-", "-")
    a, b = [93.4, 93.5, 93.2], [92.5, 92.7, 92.6, 93.0]
    wanted = ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    ours = Interval.of(a).minus(Interval.of(b))
    assert (ours.mean - ours.half, ours.mean + ours.half) == pytest.approx((wanted.low, wanted.high))
    assert ours.count == 3
    assert math.isnan(Interval.of(a).minus(Interval.of([1.0])).half)
    assert Interval.of([1.0, 1.0]).minus(Interval.of([1.0, 1.0])).half == 0


@pytest.mark.parametrize(
    ("mean", "half", "count", "full", "wanted"),
    [
        (99.3, 0.2, 3, True, "reproduced"),  # contains 99.4
        (99.8, 0.1, 3, True, "reproduced"),  # lies above
        (99.0, 0.1, 5, True, "not reproduced"),
        (99.0, 0.5, 3, True, "undecided"),  # contains it, too wide
        (99.3, 0.3, 3, True, "reproduced"),  # at most 0.3
        (99.3, 0.31, 3, True, "undecided"),
        (99.9, 0.4, 3, True, "reproduced"),  # wide, but all of it above, as the next one is all below
        (98.0, 0.5, 3, True, "not reproduced"),
        (99.3, 0.2, 3, False, "untested"),
        (99.9, 0.1, 2, True, "untested"),
    ],
)
def test_the_four_verdicts(mean: float, half: float, count: int, full: bool, wanted: str) -> None:
    assert verdict(Interval(mean, half, count), 99.4, full=full) == wanted
    assert verdict(Interval.of([]), 99.4) == "untested"


@pytest.mark.parametrize(("mean", "wanted"), [(1.3, "reproduced"), (1.1, "undecided"), (0.7, "not reproduced")])
def test_a_claim_of_more_is_undecided_where_the_interval_contains_the_limit(mean: float, wanted: str) -> None:
    assert verdict(Interval(mean, 0.2, 3), 1.0, strict=True) == wanted


def test_no_case_and_no_number_decide_nothing() -> None:
    """Both were "reproduced"."""
    assert str(Claim.always(0, 0, 3)) == "always | - | 0 | - | untested"
    assert verdict(Interval.of([99.5, math.nan, 99.5]), 99.4) == "undecided"


def test_pages_show_values_and_name_those_that_are_missing() -> None:
    values = {"a": {"x.y": 1.234, "i": Interval(2.0, 0.5, 3), "s": "text", "n": math.nan}, "empty": {}}
    text = "{a.x.y:.1f} {a.i} {a.i:.1f} {a.i.count} {a.s:.2f} {a.n:.1f} {empty.z} {other.z} {not a placeholder}"
    wanted = "1.2 2.00 ± 0.50 2.0 ± 0.5 3 text not run not run {other.z} {not a placeholder}"
    assert report.fill(text, values) == wanted
    with pytest.raises(ValueError, match=r"names a\.q"):
        report.fill("{a.q}", values)


def test_links_between_pages_become_anchors_of_one_page() -> None:
    page = report.html({"reproduction.md": "[x](reproduction/b.md) ![y](reproduction/c.svg)", "b.md": "# B"})
    assert 'href="#b"' in page
    assert '<section id="b">' in page
    assert 'src="c.svg"' in page


def test_tables_show_numbers_dashes_and_bars() -> None:
    shown = table([("a|b", 0.123456), ("c", None)], "name|value")
    assert shown.splitlines() == ["| name | value |", "| --- | --- |", "| a\\|b | 0.1235 |", "| c | - |"]
    assert table([], "a") == "(no records)"
    assert "| 1,000 | yes | 1.00e+06 |" in table([(1000, True, 1e6)], "a|b|c")
