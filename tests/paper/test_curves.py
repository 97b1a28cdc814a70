"""The studies that draw curves: Neumann orders, JFB against Jacobian-based, accelerated fixed points."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from banach.backward import JFB, Mode, Neumann
from banach.network import ImplicitNetwork
from banach.paper import Options, accelerate, figures, neumann, table2
from banach.paper.common import Subject, curves_figure
from banach.paper.marks import take
from banach.paper.records import record_of, train
from banach.paper.table1 import DIGITS
from banach.paper.table2_ways import CG
from banach.solve import RMS
from banach.train import Epoch

TINY = Subject(data="digits", model="digits", epochs=2, subset=96, fast=False)


def options_in(folder: Path) -> Options:
    return Options(quick=True, device="cpu", out=folder / "out", runs=folder / "runs")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Options:
    return options_in(tmp_path_factory.mktemp("curves"))


def test_neumann_orders_from_jfb_upwards(place: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neumann, "QUICK", (TINY,))
    found = neumann.run(place)
    assert [row["order k"] for row in found.rows] == [0, 1, 2, 5, 10]
    assert [row["J-products per image"] for row in found.rows] == [0, 1, 2, 5, 10]
    assert found.rows[0]["seconds against k = 0"] == 1
    # The gradient of order 10 is another one than JFB's; that of order 5 is nearer to it than JFB's.
    losses = [row["training loss"] for row in found.rows]
    assert abs(losses[3] - losses[4]) < abs(losses[0] - losses[4])
    pytest.importorskip("matplotlib")
    written = {path.name for path in found.write(place)}
    assert written == {"neumann.json", "neumann-digits.png", "neumann-digits.svg"}


@pytest.mark.parametrize("order", [1, 2, 5])
def test_an_order_of_the_study_is_the_neumann_series(order: int) -> None:
    """By products with J' at the fixed point, against plain autograd through further evaluations of T."""
    from banach import models

    gradients = []
    for mode in (neumann.mode(order), Neumann(order)):
        torch.manual_seed(0)
        net: Any = models.build("digits", backward=mode).double().eval()
        d = torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        gradients.append(torch.autograd.grad(net(d).square().sum(), list(net.parameters())))
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def test_order_zero_is_jfb(place: Options) -> None:
    short = replace(TINY, epochs=1)
    modes: tuple[Mode, ...] = (JFB(), Neumann(0))
    losses = [
        train(short.job(f"zero-{number}", backward=mode), place).outcome.epochs[-1].loss
        for number, mode in enumerate(modes)
    ]
    assert losses[0] == losses[1]


def test_figures_read_the_runs_of_the_tables(place: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table2, "QUICK", (TINY,))
    first = take(replace(DIGITS, epochs=3, subset=96).job("table1-digits-jfb"), place)
    done = [record_of(way.job(TINY), place) for ways in figures.PATHS.values() for way in ways]
    found = figures.run(place)
    assert [row["seconds per epoch"] for row in found.rows] == [one.pace for one in done]  # read, not trained
    captured, plain = found.details["figures-digits-captured"], found.details["figures-digits-one-by-one"]
    assert captured[figures.LONG] == first.curve
    assert list(captured) == ["JFB", CG["fixed"], figures.LONG]
    assert list(plain) == ["JFB", CG["absolute"], CG["relative"]]
    assert [row["level %"] / 100 for row in found.rows] == [done[1].accuracy] * 2 + [done[4].accuracy] * 3
    pytest.importorskip("matplotlib")
    wanted = {f"{name}.{ending}" for name in found.details for ending in ("png", "svg")}
    assert {path.name for path in found.write(place)} >= wanted


def test_seconds_to_a_level_by_hand() -> None:
    curve = [{"seconds": 9.0, "clean": 0.5}, {"seconds": 3.0, "clean": 0.7}, {"seconds": 4.0, "clean": 0.6}]
    assert figures.seconds_to(0.5, curve) == 3.5  # the first epoch warms up: as long as the others
    assert figures.seconds_to(0.6, curve) == 6.5
    assert figures.seconds_to(0.6, curve[:1]) is None
    assert figures.seconds_to(0.5, curve[:1]) == 9
    assert figures.seconds_to(0.8, curve) is None
    resumed = [{**point, "warm_up": number != 1} for number, point in enumerate(curve)]
    assert figures.seconds_to(0.7, resumed) == 6
    assert figures.seconds_to(0.7, [{**point, "warm_up": True} for point in curve]) == 6


def test_curves_by_epoch_and_by_time() -> None:
    pytest.importorskip("matplotlib")
    points = [{"epoch": k, "seconds": 2.0, "clean": k / 10} for k in (1.0, 2.0, 3.0)]
    by_epoch, by_second = curves_figure("title", {"a": points, "b": points}, untimed=["b"]).axes
    assert [list(line.get_xdata()) for line in by_epoch.lines] == [[1, 2, 3], [1, 2, 3]]
    (line,) = by_second.lines
    assert list(line.get_xdata()) == [2, 4, 6]
    assert list(line.get_ydata()) == pytest.approx([10, 20, 30])


def test_accelerated_fixed_points(place: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(accelerate.QUICK, subjects=(TINY,), batch=64, repeats=1, levels=(1e-4,))
    monkeypatch.setattr(accelerate, "QUICK", plan)
    found = accelerate.run(place)
    solves = {row["solver"]: row for row in found.rows if row["what"].startswith("solve")}
    assert set(solves) == set(accelerate.SOLVERS)
    assert solves["Anderson(5)"]["against Picard"] < 1
    assert all(row["converged"] == 1 for row in solves.values())
    trainings = [row for row in found.rows if row["what"].startswith("train")]
    assert len(trainings) == 3
    assert all(row["iterations"] > 0 and row["epochs"] in (1, 2) for row in trainings)
    pytest.importorskip("matplotlib")
    assert {path.name for path in found.write(place)} >= {"accelerate-digits.png", "accelerate-digits.svg"}


@torch.no_grad()
def test_picards_count_is_that_of_a_plain_loop() -> None:
    """Iterate T by hand, sample by sample, until the RMS of the step is at most the level."""
    from banach import data, models

    torch.manual_seed(0)
    net = models.build("digits").eval()
    assert isinstance(net, ImplicitNetwork)
    test = data.load("digits", "test")
    plan = replace(accelerate.QUICK, batch=5, repeats=1)
    rows = accelerate._solve_rows(net, test, 1e-3, plan)
    counts = []
    for image in test.pixels[:5]:
        v = net.Q(test.normalise(image[None]))
        u, steps, gap = torch.zeros_like(v), 0, float("inf")
        while gap > 1e-3:
            after = net.R(u, v)
            gap = float((after - u).square().mean().sqrt())
            u, steps = after, steps + 1
        counts.append(steps)
    assert isinstance(net.tolerance.norm, RMS)
    assert rows[0]["iterations"] == sum(counts) / 5
    assert rows[0]["most"] == max(counts)


def epochs(*values: tuple[float, float, float]) -> list[Epoch]:
    rest: dict[str, Any] = dict.fromkeys(Epoch.__dataclass_fields__)
    return [
        Epoch(**{**rest, "epoch": k, "validation_accuracy": accuracy, "depth": depth, "seconds": seconds})
        for k, (accuracy, depth, seconds) in enumerate(values, 1)
    ]


def test_what_is_spent_until_a_level_by_hand() -> None:
    done = epochs((0.5, 10, 1), (0.7, 8, 2), (0.9, 6, 4))
    one: Any = type("Record", (), {"epochs": done, "curve": [{"seconds": epoch.seconds} for epoch in done]})
    assert accelerate.spent_until(0.7, one) == accelerate.Spent(2, 18, 5)
    assert accelerate.spent_until(0.4, one) == accelerate.Spent(1, 10, 3)
