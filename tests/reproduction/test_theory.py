"""The theory study: its matrices and perturbations by other routes, its verdicts, and the quick run."""

from __future__ import annotations

import copy
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
from banach.models.blocks import LatentResNet
from reproduction import theory, theory_measure
from reproduction.study import Options
from reproduction.theory_measure import Conditioning, Image, Lemma, Local, Numbers, local, measure


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


def recorded(net: Any, d: Tensor, steps: int) -> Tensor:
    """The gradient by recording `steps` of Picard from u*: 1 is JFB, many are exact. S, Q, R in turn."""
    v, u = net.Q(d), torch.zeros_like(net.Q(d))
    with torch.no_grad():
        for _ in range(200):
            u = net.R(u, v)
    for _ in range(steps):
        u = net.R(u, v)
    weights = [w for part in (net.S, net.Q, net.R) for w in part.parameters()]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss(net.S(u)), weights)])


def test_matrices_give_both_gradients(net: Any, one: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """gradient = M J~'^-1 v and p = -M v, against plain recorded loops; kappa of fewer columns is lower."""
    monkeypatch.setattr(theory_measure, "OTHERS", 16)  # all columns of M
    image = Image(net, images(1), loss)
    J, M, u = image.J(), image.matrix(), image.u.clone().requires_grad_()
    y = net.S(u)
    v = torch.cat([part.flatten() for part in torch.autograd.grad(loss(y), (y, u))])
    v = torch.cat([v[:10], v[10:].index_select(0, image.columns)])
    order = image.columns
    A = torch.block_diag(
        torch.eye(10, dtype=torch.float64), torch.eye(32, dtype=torch.float64) - J[order][:, order]
    )
    exact = recorded(net, images(1), 200)
    close: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-9}
    torch.testing.assert_close(M @ torch.linalg.solve(A.mT, v), exact, **close)
    torch.testing.assert_close(image.gradient, exact, **close)
    torch.testing.assert_close(image.p(image.u), -recorded(net, images(1), 1), **close)
    torch.testing.assert_close(image.p(image.u), -M @ v, **close)
    assert one.lemma == Lemma.of(J)
    assert one.conditioning.columns == 10 + 16 + 4
    assert 1 < one.conditioning.kappa < Conditioning.of(M, one.lemma.gamma).kappa  # Cauchy
    whole = theory_measure.descent_bound(M, one.lemma.gamma, exact) / float(exact.norm())
    assert whole < one.allowed < 0
    d = images(2)
    K = torch.autograd.functional.jacobian(lambda d: net.R(image.u, net.Q(d)).flatten(), d[:1]).flatten(1)
    lipschitz = measure(net, d, torch.arange(2), dense=0).lipschitz[0]
    assert lipschitz == pytest.approx(float(torch.linalg.matrix_norm(K, 2)), rel=1e-3)


def test_lemma_and_conditioning_of_small_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 2000, generator=generator, dtype=torch.float64)
    x = x / x.norm(dim=0)
    for _ in range(30):
        J = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        J = 0.9 * J / torch.linalg.matrix_norm(J, 2)
        found, A = Lemma.of(J), torch.eye(4, dtype=torch.float64) - J
        least = [float((x * (B @ x)).sum(0).min()) for B in (A, torch.linalg.inv(A))]
        assert found.coercivity <= least[0] + 1e-12
        assert found.coercivity == pytest.approx(least[0], abs=0.1)  # the samples come near the minimum
        assert found.inverse <= least[1] + 1e-12
        assert found.holds
        assert found.gamma == pytest.approx(0.9)
    eye = torch.eye(4, dtype=torch.float64)
    assert (Lemma.of(0.75 * eye).coercivity, Lemma.of(0.75 * eye).inverse) == pytest.approx((0.25, 4.0))
    assert math.isnan(Lemma.of(eye).inverse)
    assert not Lemma.of(eye).holds
    assert Conditioning.of(torch.diag(torch.tensor([1.0, 2.0])), 0.2) == Conditioning(4.0, 5.0, 2, 2)
    assert Conditioning.of(torch.ones(3, 2), 0.5) == Conditioning(math.inf, 2.0, 1, 2)


def test_one_image(net: Any, image: Image, one: Local) -> None:
    """Batch statistics cost one direction per channel; ascent finds worse directions than drawing does."""
    assert one.conditioning.rank == one.conditioning.columns
    assert one.statistics == one.conditioning.columns - 1  # the mean of the one complete channel is fixed
    own = float((net.latent(images(1))[1].value - image.u).norm() / image.u.norm())
    assert one.own == pytest.approx(own)
    assert 1e-5 < own < 1e-1
    drawn = torch.randn(200, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for distance in (0.01, 1.0):
        tried = max(image.inner(image.u.flatten() + distance * x / x.norm()) for x in drawn)
        assert image.highest(distance) > max(tried, image.highest_at_random(distance))


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
    other = copy.deepcopy(net)
    other.R.gamma = 3.0
    found = measure(other, images(2), torch.arange(2), dense=1)
    assert not any(found.found)
    assert found.locals == ()
    assert all(math.isnan(x) for x in (*found.sigma, *found.rate, *found.lipschitz, found.cosine))


def test_the_printed_bound_fails_and_the_corrected_one_holds() -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(50):  # random cases meet the assumptions
        gamma, J_tilde, M, _ = theory.random_case(generator)
        J = torch.eye(4, dtype=torch.float64) - J_tilde[2:, 2:]
        assert float(torch.linalg.matrix_norm(J, 2)) == pytest.approx(gamma)
        assert float(torch.linalg.cond(M.mT @ M)) < 1 / gamma
        assert torch.equal(J_tilde[:2], torch.eye(6, dtype=torch.float64)[:2])
    found = theory.count_random(300)
    assert found.corrected == 0
    assert found.printed > 5
    assert found.descends == found.cases == 300
    assert found.error < 1e-10 < 0.1 < found.untransposed


def row(epoch: int, model: str = "svhn", **changes: Any) -> theory.Row:
    plain = Numbers((True, True), (0.8, 1.2), (0.7, 0.9), (), 0.9, 0.95, 0.9, 0.8, 0.9, ())
    return theory.Row("net", model, epoch, 10, 2, replace(plain, **changes))


def test_verdicts_are_counted_over_trained_snapshots(one: Local) -> None:
    found = theory.values([row(0), row(2, sigma=(1.5, 0.9)), row(4, cosine=-0.1)])
    sigma, cosine = found["svhn.sigma"], found["svhn.cosine"]
    assert (sigma.held, sigma.count, sigma.high) == (2, 4, 1.5)
    assert (cosine.held, cosine.count, cosine.last) == (1, 2, -0.1)
    assert found["all.rate"].held == 4
    assert str(found["claim"]) == "always | 1 of 2 | 2 | over training | not reproduced"
    line = "| svhn | sigma_max(dT/du), eval mode | < 1 | 1 (0.8 to 1.2) | 1 (0.8 to 1.2) | 2 of 4 |"
    assert line in found["table"]
    # An image without a fixed point counts against the rate only.
    lost = row(3, found=(True, False), sigma=(0.5, math.nan), rate=(0.6, math.nan), cosine=math.nan)
    found = theory.values([row(0), lost])
    rate, sigma = found["svhn.rate"], found["svhn.sigma"]
    assert (rate.held, rate.count, rate.high, sigma.held, sigma.count) == (1, 2, 0.6, 1, 1)
    assert found["svhn.cosine"].count == 0
    # A lemma beyond its premise is not judged.
    beyond = replace(one, lemma=replace(one.lemma, gamma=1.2, coercivity=-0.3))
    found = theory.values([row(1, locals=(one, beyond))])
    lemma, far, kappa = (found[f"svhn.{key}"] for key in ("lemma", "beyond", "kappa"))
    assert (lemma.held, lemma.count) == (1, 1)
    assert (far.held, far.count, far.low) == (0, 1, -0.3)
    assert (kappa.held, kappa.count) == (0, 2)
    # Of a network the longest run is shown, and digits only if there is no other.
    shown = theory.shown([replace(row(5), run="short"), row(7), row(0), replace(row(9, "digits"), run="other")])
    assert [(r.run, r.epoch) for r in shown["svhn"]] == [("net", 0), ("net", 7)]
    assert list(shown) == ["svhn"]


def test_quick_study_measures_once(tmp_path: Path) -> None:
    said: list[str] = []
    options = Options(quick=True, records=tmp_path, runs=tmp_path / "runs", device="cpu", say=said.append)
    rows = theory.run(options)
    assert [(r.run, r.epoch) for r in rows[:-1]] == [(theory.QUICK, epoch) for epoch in (0, 4)]
    assert isinstance(rows[-1].measured, theory.Counted)
    found = theory.values(rows)
    assert found["digits.image.cosine"].held == found["digits.image.cosine"].count == 1
    assert found["digits.training.rank"].low == 1
    assert found["digits.kappa"].held == 0
    said.clear()
    assert repr(theory.run(options)) == repr(rows)
    assert not any("measuring" in line for line in said)
