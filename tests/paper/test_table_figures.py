"""The tables as figures: every number is where its row says."""

from typing import Any

import pytest

from banach.paper.table_figures import accuracy_figure, time_figure
from banach.provenance import Summary

pytest.importorskip("matplotlib")


def trained(data: str, method: str, clean: tuple[float, ...], paper: float | None = 99.4) -> dict[str, Any]:
    released = Summary.of(value - 0.5 for value in clean)
    return {"data": data, "method": method, "paper %": paper, "clean %": Summary.of(clean), "released %": released}


def test_accuracies_stand_in_the_panel_of_their_data_with_their_spread() -> None:
    rival = {"data": "SVHN", "method": "a rival", "paper %": 92.3, "clean %": None}
    rows = [
        trained("MNIST", "JFB", (99.0, 99.5)),
        trained("SVHN re-cropped from the originals", "JFB", (93.0,), None),
        rival,
    ]
    mnist, svhn = accuracy_figure(rows).axes
    assert [axes.get_title() for axes in (mnist, svhn)] == ["MNIST", "SVHN"]
    assert [label.get_text() for label in svhn.get_yticklabels()] == ["JFB", "a rival"]
    places = {container.get_label(): container.lines[0].get_xydata().tolist() for container in mnist.containers}
    assert places == {"paper": [[99.4, 0]], "clean": [[99.25, 0]], "released": [[98.75, 0]]}
    (clean,) = (container for container in mnist.containers if container.get_label() == "clean")
    (bar,) = clean.lines[2][0].get_segments()
    assert bar[1][0] - bar[0][0] == pytest.approx(2 * rows[0]["clean %"].spread)
    of_svhn = {container.get_label(): container.lines[0].get_xydata().tolist() for container in svhn.containers}
    assert of_svhn["paper"] == [[92.3, 1]]
    assert of_svhn["clean"] == [[93.0, 0]]


def test_times_are_per_image_and_carry_both_ratios() -> None:
    row = {"data": "MNIST", "method": "JFB", "batch norm in R": True, "seconds per epoch": Summary.of([2.0])}
    row |= {"training images": 1000, "ratio": 1.0, "paper: ratio": None}
    slow = row | {"method": "Jacobian-based", "batch norm in R": False, "training images": 500, "ratio": 2.0}
    (axes,) = time_figure([row, slow | {"paper: ratio": 1.6}]).axes
    (points,) = axes.collections
    assert points.get_offsets().tolist() == [[2.0, 0.0], [4.0, 1.0]]
    assert [text.get_text().strip() for text in axes.texts] == ["1 x", "2 x (paper 1.6)"]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["JFB, batch norm in R", "Jacobian-based, no batch norm"]
