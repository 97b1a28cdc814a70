"""Plots and TensorBoard show the figures of the epochs; plots are written completely or not at all."""

import importlib
import math
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from banach.train import Epoch
from banach.train.plot import LEARNING, SOLVES, Chart, board, curves, draw, histogram, line_chart, ticks
from train.parts_train import NO_FIXED_POINT, epoch

pytest.importorskip("matplotlib", reason="plots need matplotlib")

PANELS = (*LEARNING, *SOLVES)


def drawn(chart: Chart) -> dict[str, list[float | None]]:
    return {name: [y for _, y in points] for name, points in chart.lines.items()}


def test_a_history_shows_its_figures() -> None:
    epochs = [epoch(number) for number in range(1, 8)]
    charts = {chart.title: chart for chart in curves({"run": epochs}, PANELS, eps=1e-3)}
    assert list(charts) == [title for title, _, _ in PANELS]
    for title, lines, kind in PANELS:
        chart = charts[title]
        assert chart.across == "epoch"
        assert all([x for x, _ in line] == list(range(1, 8)) for line in chart.lines.values())
        for label, field in lines.items():
            values = [getattr(one, field) for one in epochs]
            assert drawn(chart)[label] == ([math.log10(value) for value in values] if kind == "log" else values)
    assert charts["Residual"].rule == (pytest.approx(-3), "eps = 0.001")
    assert charts["Largest singular value of dT/du"].rule == (1.0, "contraction: below 1")


def test_charts_without_a_value_are_left_out_and_others_have_gaps(tmp_path: Path) -> None:
    nan: dict[str, float] = dict.fromkeys(("loss", "validation_loss"), math.nan)
    names = [title for title, _, _ in PANELS]
    for epochs, shown in (
        ([], []),
        ([epoch(1, **NO_FIXED_POINT), epoch(2, **NO_FIXED_POINT)], names[:3]),
        ([epoch(1, **nan, residual=0.0, max_residual=0.0)], [*names[1:4], *names[5:]]),
        ([epoch(1, sigma=None)], names[:-1]),  # --no-monitor
    ):
        charts = curves({"run": epochs}, PANELS, eps=1e-3)
        assert [chart.title for chart in charts] == shown
        if charts:
            draw(charts, tmp_path / "plot.png")
    with pytest.raises(ValueError, match="there is nothing to show yet"):
        draw([], tmp_path / "plot.png")
    diverged = epoch(2, loss=math.nan, validation_loss=math.inf, residual=0.0, max_residual=math.inf)
    values = drawn(curves({"run": [epoch(1), diverged]}, PANELS)[0])
    assert values == {"train": [2.0, None], "validation": [values["validation"][0], None]}


def test_several_runs_are_a_line_each() -> None:
    first = [epoch(1), epoch(2), epoch(3)]
    second = [epoch(1, loss=7.0, depth=3.0, validation_accuracy=0.25, seconds=4.0)]
    runs = {"first": first, "second": second}
    by_epoch = {chart.title: chart for chart in curves(runs, PANELS)}
    accuracies = [0.375, 0.6875, 1 - 0.625 / 3]
    assert drawn(by_epoch["Accuracy, validation"]) == {"first": pytest.approx(accuracies), "second": [0.25]}
    assert drawn(by_epoch["Loss, train"]) == {"first": pytest.approx([2.0, 1.0, 2 / 3]), "second": [7.0]}
    assert drawn(by_epoch["Solver steps, train, mean"]) == {"first": [11.5, 12.5, 13.5], "second": [3.0]}
    (chart,) = curves(runs, [LEARNING[2]], across="seconds")
    assert (chart.across, chart.title) == ("seconds", "Learning rate")
    assert {name: [x for x, _ in line] for name, line in chart.lines.items()} == {
        "first": [1.5, 4.5, 9.0],
        "second": [4.0],
    }


@pytest.mark.parametrize("values", [[0.0], [1.0, 1.0], [3e-9, 7e-9], [-2.0, 5e6], [0.1, 0.3]])
def test_ticks_are_few_and_hold_all_values(values: list[float]) -> None:
    for found in (ticks(values), ticks(values, whole=True)):
        assert 2 <= len(found) <= 8
        rounding = 1e-12 * max(map(abs, found))
        assert found[0] - rounding <= min(values) <= max(values) <= found[-1] + rounding
        assert found[0] < found[-1]
    assert all(value == round(value) for value in ticks(values, whole=True))


def test_charts_leave_out_what_cannot_be_drawn() -> None:
    lines: dict[str, Any] = {
        "a": [(1, 0.01), (2, None), (3, float("nan")), (4, 0.0), (5, 10.0)],
        "b": [(1, float("inf"))],
    }
    chart: Any = line_chart("residual", "step", lines, "log", (1e-3, "eps"))
    assert chart.lines == {"a": [(1, -2.0), (2, None), (3, None), (4, None), (5, 1.0)]}
    assert (chart.rule, chart.y[0], chart.y[-1]) == ((-3.0, "eps"), -3.0, 1.0)
    assert line_chart("residual", "step", {"b": lines["b"]}) is None
    assert histogram("sigma", "value", [float("nan")], (1.0, "one")) is None
    bars: Any = histogram("sigma", "value", [0.5, 0.5, 2.0, float("inf")], (1.0, "one"))
    assert sum(count or 0 for _, count in bars.lines[""]) == 3


def figure_of(charts: list[Chart], path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """The figure that is written."""
    from matplotlib.figure import Figure

    made: list[Any] = []
    write = Figure.savefig

    def note(self: Any, *args: Any, **how: Any) -> None:
        made.append(self)
        write(self, *args, **how)

    monkeypatch.setattr(Figure, "savefig", note)
    assert draw(charts, path, **options) == path
    return made[0]


def test_more_runs_than_colours_have_other_line_styles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    charts = curves({str(number): [epoch(1)] for number in range(40)}, LEARNING[:1])
    figure = figure_of(charts, tmp_path / "plot.png", monkeypatch)
    lines = figure.axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 40
    assert {line.get_marker() for line in lines} == {"."}, "without markers a lone epoch is invisible"


@pytest.mark.parametrize("name", ["_hidden", "$\\frac{$", "名前", "\udcff"])
def test_odd_names_are_drawn_as_they_are(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    charts = curves({name: [epoch(1)], "other": [epoch(1, depth=None)]}, PANELS)
    figure = figure_of(charts, tmp_path / "plot.png", monkeypatch, title=name)
    legend, shown = figure.legends[0], name.replace("\udcff", r"\udcff")  # a byte that is not UTF-8
    assert [text.get_text().strip() for text in legend.get_texts()][:2] == [shown, "other"]
    assert figure._suptitle.get_text() == shown
    for axes in figure.axes:
        assert axes.get_xlabel() == "epoch"
        assert axes.get_ylabel()
        assert axes.lines[0].get_color() == legend.legend_handles[0].get_color()


def test_charts_of_one_run_have_their_own_legends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figure_of(curves({"run": [epoch(1)]}, PANELS), tmp_path / "plot.png", monkeypatch)
    assert not figure.legends
    found = {axes.get_ylabel(): axes.get_legend() for axes in figure.axes}
    assert [text.get_text() for text in found["Loss"].get_texts()] == ["train", "validation"]
    assert found["Learning rate"] is None, "one line needs no name"


def test_files_are_complete_images(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = draw(curves({"run": [epoch(1)]}, PANELS), tmp_path / "new" / "history.png", title="t")
    assert imread(path).shape[:2] == (840, 2400)  # 7 inches high, 120 dots each
    assert path.stat().st_mode & 0o777 == 0o644
    assert [*path.parent.iterdir()] == [path]


def test_without_matplotlib_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    charts = curves({"run": [epoch(1)]}, LEARNING)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"a plot needs matplotlib, which is missing; run: pip install"):
        draw(charts, tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())


def tag(field: str) -> str:
    """The name of a figure in TensorBoard, by group."""
    kind, _, group = field.rpartition("_")
    return f"{group}/{kind or 'train'}"


FIRST = epoch(1, loss=1.5, residual=2.0**-14, max_residual=2.0**-12, converged=0.75, sigma=0.375, memory=2**30)


@pytest.fixture
def tensorboard() -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, as TensorBoard itself reads the folder."""
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.usefixtures("tensorboard")
def test_every_figure_of_an_epoch_is_there(tmp_path: Path) -> None:
    second = replace(FIRST, epoch=2, loss=0.75, products=8192)
    with board(tmp_path) as write:
        write(FIRST)
        write(second)
    named = {field.name for field in fields(Epoch)} - {"epoch", "warm_up", "metrics", "validation_metrics"}
    # All these values are exact in float32, which is what an event file holds.
    assert read(tmp_path) == {tag(name): [(1, getattr(FIRST, name)), (2, getattr(second, name))] for name in named}


@pytest.mark.usefixtures("tensorboard")
def test_what_an_epoch_has_not_is_left_out(tmp_path: Path) -> None:
    with board(tmp_path) as write:
        write(epoch(1, **NO_FIXED_POINT))
    kept = ("loss", "accuracy", "validation_loss", "validation_accuracy", "lr", "products", "seconds")
    assert set(read(tmp_path)) == {tag(name) for name in kept}


@pytest.mark.usefixtures("tensorboard")
def test_after_a_resume_each_epoch_occurs_once(tmp_path: Path) -> None:
    with board(tmp_path) as write:
        for number in (1, 2, 3, 4):
            write(replace(FIRST, epoch=number, loss=10.0 * number))
    with board(tmp_path) as write:  # the first file holds later epochs than the last checkpoint
        write(replace(FIRST, epoch=3, loss=-1.0))
    assert read(tmp_path)["loss/train"] == [(1, 10.0), (2, 20.0), (3, -1.0)]


@pytest.mark.usefixtures("tensorboard")
def test_nothing_is_written_before_an_epoch_or_without_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with board(tmp_path / "board"):
        pass
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with (
        pytest.raises(ValueError, match="needs tensorboard, which is missing; run: pip install"),
        board(tmp_path / "board"),
    ):
        pass
    assert not (tmp_path / "board").exists()
