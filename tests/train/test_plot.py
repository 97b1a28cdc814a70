"""The plots show the figures of the epochs, whatever those are, and are written whole or not at all."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from banach.train.plot import (
    PlotError,
    comparison_figure,
    history_figure,
    plot_comparison,
    plot_history,
    write_figure,
)
from train.parts_train import NO_FIXED_POINT, epoch

pytest.importorskip("matplotlib", reason="plots need matplotlib")

FIELDS = {
    "loss": {"train": "loss", "validation": "validation_loss"},
    "accuracy": {"train": "accuracy", "validation": "validation_accuracy"},
    "depth": {"train, mean": "depth", "train, max": "max_depth", "validation": "validation_depth"},
    "residual": {"train, mean": "residual", "train, max": "max_residual"},
}


def drawn(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_history_draws_its_figures(count: int) -> None:
    epochs = [epoch(number) for number in range(1, count + 1)]
    panels = {axes.get_ylabel(): axes for axes in history_figure(epochs).axes}
    assert panels.keys() == FIELDS.keys()
    for name, axes in panels.items():
        expected = {
            label: (list(range(1, count + 1)), [getattr(one, field) for one in epochs])
            for label, field in FIELDS[name].items()
        }
        assert drawn(axes) == expected
        assert not axes.texts
        assert all(line.get_marker() == "." for line in axes.lines), "without markers a lone epoch is invisible"
        assert [text.get_text() for text in axes.get_legend().get_texts()] == list(expected)
    assert {name: axes.get_yscale() for name, axes in panels.items() if axes.get_yscale() == "log"} == {
        "residual": "log"
    }


def test_eps_is_a_line_among_the_residuals() -> None:
    figure = history_figure([epoch(1)], title="digits, $3", eps=1e-3)
    assert drawn(figure.axes[3])["eps = 0.001"][1] == [1e-3, 1e-3]
    assert figure._suptitle.get_text() == "digits, $3"


def test_a_network_without_a_fixed_point_says_so(tmp_path: Path) -> None:
    figure = history_figure([epoch(1, **NO_FIXED_POINT), epoch(2, **NO_FIXED_POINT)], eps=1e-3)
    loss, accuracy, depth, residual = figure.axes
    assert loss.lines
    assert accuracy.lines
    for axes in (depth, residual):
        assert not axes.lines
        assert texts(axes) == ["no fixed point: nothing to show"]
    write_figure(figure, tmp_path / "plot.png")


def test_a_run_that_diverged_is_still_plotted(tmp_path: Path) -> None:
    epochs = [epoch(1), epoch(2, loss=math.nan, validation_loss=math.inf, residual=0.0, max_residual=math.inf)]
    figure = history_figure(epochs)
    values = drawn(figure.axes[0])
    assert values["train"][1][0] == 2.0
    assert math.isnan(values["train"][1][1])
    assert math.isnan(values["validation"][1][1])
    write_figure(figure, tmp_path / "plot.png")
    nothing = history_figure([epoch(1, loss=math.nan, validation_loss=math.nan, residual=0.0, max_residual=0.0)])
    assert texts(nothing.axes[0]) == ["no finite value"]
    assert nothing.axes[3].get_yscale() == "linear"
    write_figure(nothing, tmp_path / "plot.png")


def test_no_epoch_at_all(tmp_path: Path) -> None:
    figure = history_figure([])
    assert [texts(axes) for axes in figure.axes] == [["no epoch is done yet"]] * 4
    write_figure(figure, tmp_path / "plot.png")


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
    assert [loss.get_ylabel(), depth.get_ylabel()] == ["loss, train", "depth, train, mean"]
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["first", "second"]
    colours = [handle.get_color() for handle in legend.legend_handles]
    assert colours == [line.get_color() for line in depth.lines]


@pytest.mark.parametrize("name", ["_hidden", "a$b$c", "$\\frac{$", "名前", "two\nlines", ""])
def test_odd_names_are_drawn_as_they_are(name: str, tmp_path: Path) -> None:
    figure = comparison_figure({name: [epoch(1)], "other": []})
    assert figure.legends[0].get_texts()[0].get_text().strip() == name.strip()
    write_figure(figure, tmp_path / "plot.png")
    plot_history([epoch(1)], tmp_path / "plot.png", title=name)


def test_runs_without_epochs_or_fixed_points(tmp_path: Path) -> None:
    figure = comparison_figure({"new": [], "explicit": [epoch(1, **NO_FIXED_POINT)]})
    assert texts(figure.axes[0]) == []
    assert texts(figure.axes[3]) == ["no fixed point: nothing to show"]
    assert texts(comparison_figure({"new": []}).axes[1]) == ["no epoch is done yet"]
    plot_comparison({"new": []}, tmp_path / "plot.png")


def test_files_are_images_and_nothing_else_is_left(tmp_path: Path) -> None:
    from matplotlib.image import imread

    paths = [
        plot_history([epoch(1)], tmp_path / "new" / "history.png", title="t", eps=1e-4),
        plot_comparison({"a": [epoch(1)]}, str(tmp_path / "new" / "comparison.png")),
    ]
    assert sorted((tmp_path / "new").iterdir()) == sorted(paths)
    for path in paths:
        assert imread(path).shape[:2] == (840, 1200)  # 10 x 7 inches at 120 dots each
        assert path.stat().st_mode & 0o777 == 0o644


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    class Broken:
        def savefig(self, file: Any, **options: Any) -> None:
            file.write(b"half")
            raise OSError(28, "No space left on device")

    path = plot_history([epoch(1)], tmp_path / "plot.png")
    before = path.read_bytes()
    with pytest.raises(OSError, match="No space left"):
        write_figure(Broken(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_without_matplotlib_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"plots need matplotlib, which is missing; run: pip install"):
        plot_history([epoch(1)], tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())
