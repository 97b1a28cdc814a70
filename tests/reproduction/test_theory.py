"""The theory study: its matrices and perturbations by other routes, its verdicts, and the quick run."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from banach import ImplicitNetwork, Tolerance
from banach.models.blocks import LatentResNet
from reproduction import theory
from reproduction.study import Options
from reproduction.theory import Cases, Image, conditioning, lemma, measure


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
        patch.setattr(theory, "OTHERS", 4)
        yield


@pytest.fixture(scope="module")
def image(net: Any) -> Image:
    return Image(net, images(1), loss)


@pytest.fixture(scope="module")
def one(image: Image) -> dict[str, Cases]:
    return image.cases()


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


def test_matrices_give_both_gradients(net: Any, one: dict[str, Cases], monkeypatch: pytest.MonkeyPatch) -> None:
    """gradient = M J~'^-1 v and p = -M v, against plain recorded loops; kappa of fewer columns is lower."""
    monkeypatch.setattr(theory, "OTHERS", 16)  # all columns of M
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
    gamma, coercivity, holds = lemma(J)
    assert (gamma < 1, one["lemma"]) == (True, Cases((coercivity,), (holds,)))
    assert 1 < one["kappa"].values[0] < conditioning(M)[0]  # Cauchy
    assert one["kappa"].held == (False,)
    cosine = torch.cosine_similarity(exact, -image.p(image.u), dim=0)
    assert one["image.cosine"].values == (pytest.approx(float(cosine)),)
    d = images(2)
    K = torch.autograd.functional.jacobian(lambda d: net.R(image.u, net.Q(d)).flatten(), d[:1]).flatten(1)
    lipschitz = measure(net, d, torch.arange(2), dense=0)["L"].values[0]
    assert lipschitz == pytest.approx(float(torch.linalg.matrix_norm(K, 2)), rel=1e-3)


def test_lemma_and_conditioning_of_small_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 2000, generator=generator, dtype=torch.float64)
    x = x / x.norm(dim=0)
    for _ in range(30):
        J = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        J = 0.9 * J / torch.linalg.matrix_norm(J, 2)
        gamma, coercivity, holds = lemma(J)
        least = float((x * (x - J @ x)).sum(0).min())
        assert coercivity <= least + 1e-12
        assert coercivity == pytest.approx(least, abs=0.1)  # the samples come near the minimum
        assert holds
        assert gamma == pytest.approx(0.9)
    eye = torch.eye(4, dtype=torch.float64)
    assert lemma(0.75 * eye) == (pytest.approx(0.75), pytest.approx(0.25), True)
    assert not lemma(eye)[2], "I - J has no inverse"
    assert conditioning(torch.diag(torch.tensor([1.0, 2.0]))) == (4.0, 0)
    assert conditioning(torch.ones(3, 2)) == (math.inf, 1)


def test_one_image(net: Any, image: Image, one: dict[str, Cases], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch statistics cost one direction per channel; ascent finds worse directions than drawing does."""
    assert one["rank"] == Cases((0,), (True,))
    assert one["training.rank"] == Cases((1,), (False,))  # the mean of the one complete channel is fixed
    own = float((net.latent(images(1))[1].value - image.u).norm() / image.u.norm())
    assert one["own"].values == (pytest.approx(own),)
    assert 1e-5 < own < 1e-1
    drawn = torch.randn(200, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for distance in (0.01, 1.0):
        points = [image.u.flatten() + distance * x / x.norm() for x in drawn]
        assert image.highest(distance) > max(float(image.gradient @ image.p(u)) for u in points)
    inner = float(image.gradient @ image.p(image.u))
    left = dict.fromkeys(theory.DISTANCES, 0.8) | {0.5: 0.05}
    size = float(image.u.norm())
    monkeypatch.setattr(Image, "highest", lambda self, distance: inner * left[round(distance / size, 6)])
    assert image.radius() == 0.3, "the last distance before the first that leaves too little"


def test_measuring_changes_nothing_and_repeats(net: Any) -> None:
    d, labels, state = images(4), torch.arange(4), torch.get_rng_state()
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    first, second = (measure(net, d, labels, dense=0) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert not net.training
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    assert all(0 < x < 1 for x in (*first["sigma"].values, *first["rate"].values))


def test_a_network_without_fixed_points_is_not_measured_there(net: Any) -> None:
    other = copy.deepcopy(net)
    other.R.gamma = 3.0
    found = measure(other, images(2), torch.arange(2), dense=1)
    assert found["rate"] == Cases((), (False, False))
    assert all(found[key] == Cases() for key in ("sigma", "L", "cosine"))
    assert "kappa" not in found


def descent(J: Tensor, M: Tensor, v: Tensor) -> tuple[float, float]:
    """Return -<gradient, p>, and the corrected bound of the Theorem; the printed one is twice that."""
    eye = torch.eye(len(v) - len(J), dtype=v.dtype)
    J_tilde = torch.block_diag(eye, torch.eye(len(J), dtype=v.dtype) - J)
    gradient, p, s = M @ torch.linalg.solve(J_tilde.mT, v), -M @ v, torch.linalg.svdvals(M)
    torch.testing.assert_close(p, -M @ J_tilde.mT @ torch.linalg.pinv(M) @ gradient)
    least, most = s.max() ** -2, s.min() ** -2  # eigenvalues of the inverse of M'M
    bound = (least - torch.linalg.matrix_norm(J, 2) * most) * (M.mT @ gradient).square().sum()
    return -float(gradient @ p), float(bound)


def test_the_printed_bound_fails_and_the_corrected_one_holds() -> None:
    """As pages/theory.md says: a counterexample, and random cases that meet the assumptions."""
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    eye = torch.eye(6, dtype=torch.float64)
    inner, bound = descent(-0.3 * eye[:4, :4], eye, normal(6))
    assert bound <= inner < 2 * bound
    for gamma in torch.linspace(0.02, 0.98, 300).tolist():
        J, kappa = normal(4, 4), 1 + torch.rand(1, generator=generator) * (1 / gamma - 1)
        left, right = (torch.linalg.qr(normal(rows, 6))[0] for rows in (9, 6))
        s = torch.linspace(1, float(kappa.sqrt()), 6, dtype=torch.float64)
        inner, bound = descent(gamma * J / torch.linalg.matrix_norm(J, 2), left * s @ right, normal(6))
        assert inner >= bound * (1 - 1e-12)
        assert inner > 0


def row(epoch: int, model: str = "svhn", run: str = "net", **changes: list[float]) -> theory.Row:
    plain = {"sigma": [0.8, 1.2], "rate": [0.7, 0.9], "cosine": [0.9]} | changes
    return theory.Row(run, model, epoch, 10, 2, {key: Cases.of(key, values) for key, values in plain.items()})


def test_verdicts_are_counted_over_trained_snapshots() -> None:
    found = theory.values([row(0), row(2, sigma=[1.5, 0.9]), row(4, cosine=[-0.1])])
    sigma, cosine = found["svhn.sigma"], found["svhn.cosine"]
    assert (sigma.holding, sigma.count, sigma.high) == (2, 4, 1.5)
    assert (cosine.holding, cosine.count, found["svhn.cosine.last"]) == (1, 2, -0.1)
    assert found["all.rate"].holding == 4
    assert str(found["claim"]) == "always | 1 of 2 | 1 | over training | not reproduced"
    line = "| svhn | sigma_max(dT/du), eval mode | < 1 | 1 (0.8 to 1.2) | 1 (0.8 to 1.2) | 2 of 4 |"
    assert line in found["table"]
    # Of a network the longest run is shown, and digits only if there is no other.
    shown = theory.shown([row(5, run="short"), row(7), row(0), row(9, "digits", "other")])
    assert [(r.run, r.epoch) for r in shown["svhn"]] == [("net", 0), ("net", 7)]
    assert list(shown) == ["svhn"]


def test_quick_study_measures_once(tmp_path: Path) -> None:
    said: list[str] = []
    options = Options(quick=True, records=tmp_path, runs=tmp_path / "runs", device="cpu", say=said.append)
    rows = theory.run(options)
    assert [(r.run, r.epoch) for r in rows] == [(theory.QUICK, epoch) for epoch in (0, 4)]
    found = theory.values(rows)
    assert found["digits.image.cosine"].holding == found["digits.image.cosine"].count == 1
    assert found["digits.training.rank"].low == 1
    assert found["digits.kappa"].holding == 0
    said.clear()
    assert theory.run(options) == rows
    assert not any("measuring" in line for line in said)
