"""The plots show the figures of the epochs, and are written completely or not at all."""

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
    "learning rate": {"train": "lr"},
    "solver steps": {"train, mean": "depth", "train, max": "max_depth", "validation": "validation_depth"},
    "residual": {"train, mean": "residual", "train, max": "max_residual"},
    "largest singular value of dT/du": {"train, a few images": "sigma"},
}
NONE_YET, NO_VALUE = "no epoch is done yet", "no finite value to show"


def drawn(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def texts(figure: Any) -> list[str]:
    """The sentence in each panel, "" if there is none."""
    return [" ".join(text.get_text() for text in axes.texts) for axes in figure.axes]


def test_a_history_draws_its_figures() -> None:
    epochs = [epoch(number) for number in range(1, 8)]
    figure = history_figure(epochs, title="digits, $3", eps=1e-3)
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    assert panels.keys() == FIELDS.keys()
    assert drawn(panels["residual"]).pop("eps = 0.001")[1] == [1e-3, 1e-3]
    assert drawn(panels["largest singular value of dT/du"]).pop("R contracts below 1")[1] == [1.0, 1.0]
    assert figure._suptitle.get_text() == "digits, $3"
    for name, axes in panels.items():
        for label, field in FIELDS[name].items():
            assert drawn(axes)[label] == (list(range(1, 8)), [getattr(one, field) for one in epochs])
        markers = [line.get_marker() for line in axes.lines if line.get_linestyle() != ":"]
        assert set(markers) == {"."}, "without markers a lone epoch is invisible"
        assert [text.get_text() for text in axes.get_legend().get_texts()] == list(drawn(axes))
        assert axes.get_yscale() == ("log" if name == "residual" else "linear")
    assert texts(figure) == [""] * 6


def test_the_legend_says_that_only_the_training_loss_is_smoothed() -> None:
    loss = history_figure([epoch(1)], label_smoothing=0.1).axes[0]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == [
        "train, with label smoothing 0.1",
        "validation",
    ]


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    nan: dict[str, float] = dict.fromkeys(("loss", "validation_loss"), math.nan)
    for epochs, said in (
        ([], [NONE_YET] * 6),
        ([epoch(1, **NO_FIXED_POINT), epoch(2, **NO_FIXED_POINT)], [""] * 3 + [NO_VALUE] * 3),
        ([epoch(1, **nan, residual=0.0, max_residual=0.0)], [NO_VALUE] + [""] * 5),
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
    assert texts(without) == ["", "", "", NO_VALUE]
    assert texts(comparison_figure({"new": []})) == [NONE_YET] * 4


@pytest.mark.parametrize("name", ["_hidden", "$\\frac{$", "名前"])
def test_odd_names_are_drawn_as_they_are(name: str, tmp_path: Path) -> None:
    figure = comparison_figure({name: [epoch(1)], "other": []})
    assert figure.legends[0].get_texts()[0].get_text().strip() == name
    write_figure(figure, tmp_path / "plot.png")
    plot_history([epoch(1)], tmp_path / "plot.png", title=name)


def test_files_are_complete_images(tmp_path: Path) -> None:
    from matplotlib.image import imread

    folder = tmp_path / "new"
    paths = [
        plot_history([epoch(1)], folder / "history.png", title="t", eps=1e-4),
        plot_comparison({"a": [epoch(1)]}, str(folder / "comparison.png")),
    ]
    for path, width in zip(paths, (1800, 1200), strict=True):
        assert imread(path).shape[:2] == (840, width)  # 7 inches high, 120 dots each
        assert path.stat().st_mode & 0o777 == 0o644
    assert sorted(folder.iterdir()) == sorted(paths)


def test_without_matplotlib_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"plots need matplotlib, which is missing; run: pip install"):
        plot_history([epoch(1)], tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())
