"""Plots and TensorBoard show the figures of the epochs; plots are written completely or not at all."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from banach.train import Epoch
from banach.train.plot import Board, PlotError, comparison_figure, history_figure, plot_history, tag, write_figure
from train.parts_train import NO_FIXED_POINT, epoch

pytest.importorskip("matplotlib", reason="plots need matplotlib")

NONE_YET, NO_SOLVE = "no epoch is done yet", "no fixed point: nothing to show"


def drawn(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def texts(figure: Any) -> list[str]:
    """The sentence in each panel, "" if there is none."""
    return [" ".join(text.get_text() for text in axes.texts) for axes in figure.axes]


def test_a_history_draws_its_figures() -> None:
    epochs = [epoch(number) for number in range(1, 8)]
    figure = history_figure(epochs, title="digits, $3", eps=1e-3, label_smoothing=0.1)
    panels = [drawn(axes) for axes in figure.axes]
    assert list(panels[0]) == ["train, with label smoothing 0.1", "validation"]  # which has none
    assert panels[4].pop("eps = 0.001")[1] == [1e-3, 1e-3]
    assert panels[5].pop("R contracts below 1")[1] == [1.0, 1.0]
    shown = [line for panel in panels for line in panel.values()]
    names = "loss validation_loss accuracy validation_accuracy lr depth max_depth validation_depth residual"
    for values, field in zip(shown, [*names.split(), "max_residual", "sigma"], strict=True):
        assert values == (list(range(1, 8)), [getattr(one, field) for one in epochs])
    for axes in figure.axes:
        markers = [line.get_marker() for line in axes.lines if line.get_linestyle() != ":"]
        assert set(markers) == {"."}, "without markers a lone epoch is invisible"
        assert [text.get_text() for text in axes.get_legend().get_texts()] == list(drawn(axes))
        assert axes.get_yscale() == ("log" if axes.get_ylabel() == "residual" else "linear")
    assert figure._suptitle.get_text() == "digits, $3"
    assert texts(figure) == [""] * 6


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    nan: dict[str, float] = dict.fromkeys(("loss", "validation_loss"), math.nan)
    for epochs, said in (
        ([], [NONE_YET] * 6),
        ([epoch(1, **NO_FIXED_POINT), epoch(2, **NO_FIXED_POINT)], [""] * 3 + [NO_SOLVE] * 3),
        ([epoch(1, **nan, residual=0.0, max_residual=0.0)], ["no finite value"] + [""] * 5),
        ([epoch(1, sigma=None)], [""] * 5 + ["nothing was measured"]),  # --no-monitor
    ):
        figure = history_figure(epochs, eps=1e-3)
        assert texts(figure) == said
        write_figure(figure, tmp_path / "plot.png")
    diverged = epoch(2, loss=math.nan, validation_loss=math.inf, residual=0.0, max_residual=math.inf)
    values = drawn(history_figure([epoch(1), diverged]).axes[0])
    assert values["train"][1] == [2.0, pytest.approx(math.nan, nan_ok=True)]
    assert math.isnan(values["validation"][1][1])


def test_a_comparison_overlays_the_runs() -> None:
    first = [epoch(1), epoch(2), epoch(3)]
    second = [epoch(1, loss=7.0, depth=3.0, validation_accuracy=0.25, seconds=4.0)]
    figure = comparison_figure({"first": first, "second": second})
    by_epoch, by_second, loss, depth = figure.axes
    curves = [[(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] for axes in figure.axes]
    accuracies = [0.375, 0.6875, 1 - 0.625 / 3]
    assert curves[0] == [([1, 2, 3], pytest.approx(accuracies)), ([1], [0.25])]
    assert curves[1] == [([1.5, 4.5, 9.0], pytest.approx(accuracies)), ([4.0], [0.25])]
    assert curves[2] == [([1, 2, 3], pytest.approx([2.0, 1.0, 2 / 3])), ([1], [7.0])]
    assert curves[3] == [([1, 2, 3], [11.5, 12.5, 13.5]), ([1], [3.0])]
    assert (by_epoch.get_xlabel(), by_second.get_xlabel()) == ("epoch", "seconds")
    assert [loss.get_ylabel(), depth.get_ylabel()] == ["loss, train", "solver steps, train, mean"]
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["first", "second"]
    assert [one.get_color() for one in legend.legend_handles] == [line.get_color() for line in depth.lines]
    without = comparison_figure({"new": [], "explicit": [epoch(1, **NO_FIXED_POINT)]})
    assert texts(without) == ["", "", "", NO_SOLVE]
    assert texts(comparison_figure({"new": []})) == [NONE_YET] * 4


def test_more_runs_than_colours_have_other_line_styles() -> None:
    lines = comparison_figure({str(number): [epoch(1)] for number in range(40)}).axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 40


@pytest.mark.parametrize("name", ["_hidden", "$\\frac{$", "名前"])
def test_odd_names_are_drawn_as_they_are(name: str, tmp_path: Path) -> None:
    figure = comparison_figure({name: [epoch(1)], "other": []})
    assert figure.legends[0].get_texts()[0].get_text().strip() == name
    write_figure(figure, tmp_path / "plot.png")
    plot_history([epoch(1)], tmp_path / "plot.png", title=name)


def test_files_are_complete_images(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = plot_history([epoch(1)], tmp_path / "new" / "history.png", title="t", eps=1e-4)
    assert imread(path).shape[:2] == (840, 1800)  # 7 inches high, 120 dots each
    assert path.stat().st_mode & 0o777 == 0o644
    assert [*path.parent.iterdir()] == [path]


def test_without_matplotlib_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"plots need matplotlib, which is missing; run: pip install"):
        plot_history([epoch(1)], tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())


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
    with Board(tmp_path) as board:
        board.write(FIRST)
        board.write(second)
    named = {field.name for field in fields(Epoch)} - {"epoch", "warm_up", "metrics", "validation_metrics"}
    # All these values are exact in float32, which is what an event file holds.
    assert read(tmp_path) == {tag(name): [(1, getattr(FIRST, name)), (2, getattr(second, name))] for name in named}


@pytest.mark.usefixtures("tensorboard")
def test_what_an_epoch_has_not_is_left_out(tmp_path: Path) -> None:
    with Board(tmp_path) as board:
        board.write(epoch(1, **NO_FIXED_POINT))
    kept = ("loss", "accuracy", "validation_loss", "validation_accuracy", "lr", "products", "seconds")
    assert set(read(tmp_path)) == {tag(name) for name in kept}


@pytest.mark.usefixtures("tensorboard")
def test_after_a_resume_each_epoch_occurs_once(tmp_path: Path) -> None:
    with Board(tmp_path) as board:
        for number in (1, 2, 3, 4):
            board.write(replace(FIRST, epoch=number, loss=10.0 * number))
    with Board(tmp_path) as board:  # the first file holds later epochs than the last checkpoint
        board.write(replace(FIRST, epoch=3, loss=-1.0))
    assert read(tmp_path)["loss/train"] == [(1, 10.0), (2, 20.0), (3, -1.0)]


@pytest.mark.usefixtures("tensorboard")
def test_nothing_is_written_before_an_epoch_or_without_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Board(tmp_path / "board"):
        pass
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RuntimeError, match="tensorboard is missing; run: pip install"):
        Board(tmp_path / "board")
    assert not (tmp_path / "board").exists()
