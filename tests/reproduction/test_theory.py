"""The theory study: its matrices and perturbations by other routes, its verdicts, and the quick run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from banach import ImplicitNetwork, Tolerance
from banach.diagnose import conditioning, corollary, linearise
from banach.models.blocks import LatentResNet
from reproduction import theory, theory_measure
from reproduction.study import Options
from reproduction.theory_measure import Image, Local, Numbers, local, measure


def images(number: int) -> Tensor:
    return torch.tensor(load_digits().images[:number] / 16)[:, None]


def loss(y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y, torch.tensor([7]))


@pytest.fixture(scope="module")
def net() -> Any:
    """A network like the paper's with two channels, in float64: latent 2x4x4, batch norm that has seen data."""
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        Q = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.AvgPool2d(2))
        S = nn.Sequential(nn.Flatten(), nn.Linear(32, 10))
        made = ImplicitNetwork(Q, LatentResNet(2, blocks=1, gamma=0.5), S, tolerance=Tolerance(atol=1e-3)).double()
        made(images(32))
        return made.eval()


@pytest.fixture(scope="module", autouse=True)
def few_columns() -> Iterator[None]:
    """Fewer columns of M: the latent of the test's network has 32 numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theory_measure, "OTHERS", 4)
        yield


@pytest.fixture(scope="module")
def image(net: Any) -> Image:
    return Image(net, images(1), loss)


@pytest.fixture(scope="module")
def one(net: Any) -> Local:
    return local(net, images(1), loss)


def test_matrices_are_those_of_linearise(net: Any, image: Image, one: Local) -> None:
    """J and both gradients are complete; M has its columns of one channel and some others."""
    at, wanted = image.linearised, linearise(net, images(1), loss)
    chosen = torch.cat([torch.arange(10), 10 + image.columns])  # the outputs of S come first
    torch.testing.assert_close(at.M, wanted.M[:, chosen], rtol=1e-7, atol=1e-9)
    for name in ("J", "u", "gradient", "direction"):
        torch.testing.assert_close(getattr(at, name), getattr(wanted, name), rtol=1e-7, atol=1e-9)
    assert one.lemma.gamma == pytest.approx(float(torch.linalg.svdvals(wanted.J)[0]))
    assert one.conditioning.columns == 10 + 16 + 4
    assert 1 < one.conditioning.kappa < conditioning(wanted).kappa  # Cauchy
    assert corollary(wanted).allowed < one.allowed < 0


def test_batch_statistics_cost_one_direction_per_channel(one: Local) -> None:
    assert one.conditioning.rank == one.conditioning.columns
    assert one.statistics == one.conditioning.columns - 1  # the mean of the one complete channel is fixed


def test_the_worst_direction_is_worse_than_random_ones(image: Image) -> None:
    u = image.u.flatten()
    drawn = torch.randn(200, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for distance in (0.01, 1.0):
        tried = [image.inner(u + distance * x / x.norm()) for x in drawn]
        assert image.highest(distance) > max(tried)


def test_where_the_solver_stops(net: Any, one: Local, image: Image) -> None:
    _, found = net.latent(images(1))
    own = float((found.value - image.u).norm() / image.u.norm())
    assert one.own == pytest.approx(own)
    assert 1e-5 < own < 1e-1


def test_radius_counts_from_the_fixed_point(one: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory_measure, "DISTANCES", (0.1, 1.0, 10.0))
    near = replace(one, worst=(-1.0, -0.5, 0.2))
    assert (near.radius(0.0), near.radius(0.5)) == (1, 0.1)
    assert replace(near, worst=(0.0, -1.0, -1.0)).radius(0.0) == 0
    assert replace(near, worst=(-1.0, math.nan, -1.0)).radius(0.0) == 0.1


def test_measuring_changes_nothing_and_repeats(net: Any) -> None:
    d, labels, state = images(4), torch.arange(4), torch.get_rng_state()
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    first, second = (measure(net, d, labels, dense=0) for _ in range(2))
    assert repr(first) == repr(second)
    assert torch.equal(torch.get_rng_state(), state)
    assert not net.training
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    assert all(0 < x < 1 for x in (*first.sigma, *first.rate))


def test_a_network_without_fixed_points_is_not_measured_there(net: Any) -> None:
    other = ImplicitNetwork(net.Q, LatentResNet(2, blocks=1, gamma=0.5), net.S, tolerance=net.tolerance).double()
    other.R.load_state_dict(net.R.state_dict())
    other.R.gamma = 3.0
    found = measure(other.eval(), images(2), torch.arange(2), dense=1)
    assert not any(found.found)
    assert found.locals == ()
    assert all(math.isnan(x) for x in (*found.sigma, *found.rate, *found.lipschitz, found.cosine))


def test_random_cases_meet_the_assumptions() -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(50):
        case = theory.random_case(generator)
        gamma = float(torch.linalg.matrix_norm(case.J, 2))
        assert gamma < 1
        assert float(torch.linalg.cond(case.M.mT @ case.M)) < 1 / gamma
        A = torch.block_diag(torch.eye(2, dtype=torch.float64), torch.eye(4, dtype=torch.float64) - case.J)
        torch.testing.assert_close(case.M @ torch.linalg.inv(A).mT @ case.v, case.gradient)
        torch.testing.assert_close(case.direction, -case.M @ case.v)


def test_the_printed_bound_fails_and_the_corrected_one_holds() -> None:
    found = theory.count_random(300)
    assert found.corrected == 0
    assert found.printed > 5
    assert found.descends == found.cases == 300
    assert found.error < 1e-10 < 0.1 < found.untransposed


def row(epoch: int, **changes: Any) -> theory.Row:
    plain = Numbers((True, True), (0.8, 1.2), (0.7, 0.9), (), 0.9, 0.95, 0.9, 0.8, 0.9, ())
    return theory.Row("net", "net", epoch, 10, 2, replace(plain, **changes))


def test_verdicts_are_counted_over_trained_snapshots() -> None:
    rows = [row(0), row(2, sigma=(1.5, 0.9)), row(4, cosine=-0.1)]
    found = theory.values(rows)
    assert (found["net.sigma.held"], found["net.sigma.count"], found["net.sigma.high"]) == (2, 4, 1.5)
    assert (found["net.cosine.held"], found["net.cosine.count"]) == (1, 2)
    assert found["net.cosine.last"] == -0.1
    assert found["all.rate.held"] == 4
    assert (
        "| net | sigma_max(dT/du), eval mode | < 1 | 1 (0.8 to 1.2) | 1 (0.8 to 1.2) | 2 of 4 |" in found["table"]
    )


def test_an_image_without_a_fixed_point_counts_against_the_rate_only() -> None:
    nan = math.nan
    lost = row(3, found=(True, False), sigma=(0.5, nan), rate=(0.6, nan), cosine=nan)
    found = theory.values([row(0), lost])
    assert (found["net.rate.held"], found["net.rate.count"], found["net.rate.high"]) == (1, 2, 0.6)
    assert (found["net.sigma.held"], found["net.sigma.count"]) == (1, 1)
    assert found["net.cosine.count"] == 0


def test_a_lemma_beyond_its_premise_is_not_judged(one: Local) -> None:
    beyond = replace(one, lemma=replace(one.lemma, gamma=1.2, coercivity=-0.3))
    found = theory.values([row(1, locals=(one, beyond))])
    assert (found["net.lemma.held"], found["net.lemma.count"]) == (1, 1)
    assert (found["net.beyond.held"], found["net.beyond.count"], found["net.beyond.low"]) == (0, 1, -0.3)
    assert (found["net.kappa.held"], found["net.kappa.count"]) == (0, 2)


def test_the_longest_run_of_a_model_is_shown() -> None:
    short = replace(row(5), run="short")
    assert [(r.run, r.epoch) for r in theory.shown([short, row(7), row(0)])["net"]] == [("net", 0), ("net", 7)]


def test_quick_study_measures_once(tmp_path: Path) -> None:
    said: list[str] = []
    options = Options(quick=True, records=tmp_path, runs=tmp_path / "runs", device="cpu", say=said.append)
    rows = theory.run(options)
    assert [(r.run, r.epoch) for r in rows[:-1]] == [(theory.QUICK, epoch) for epoch in (0, 4)]
    assert isinstance(rows[-1].measured, theory.Counted)
    found = theory.values(rows)
    assert found["digits.image.cosine.held"] == found["digits.image.cosine.count"] == 1
    assert found["digits.training.rank.low"] == 1
    assert found["digits.kappa.held"] == 0
    said.clear()
    assert repr(theory.run(options)) == repr(rows)
    assert not any("measuring" in line for line in said)
