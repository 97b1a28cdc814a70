"""The theory study: its matrices and perturbations by other routes, its words, and the quick run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from banach.diagnose import Linearised, conditioning, corollary, identity, linearise, theorem
from banach.models.blocks import LatentResNet
from banach.network import ImplicitNetwork
from banach.paper import Options, theory, theory_dense
from banach.paper.study import Findings
from banach.paper.theory_cases import Case, train
from banach.paper.theory_dense import Local, compressed, large, local
from banach.paper.theory_findings import findings_of
from banach.paper.theory_measure import Batch, Measured, Reading, measure
from banach.paper.theory_perturb import Inner, Perturbed, radius
from banach.paper.theory_random import count, random_case
from banach.paper.theory_rows import rows_of
from banach.solve import Tolerance

TINY = Case("digits", "digits", (0, 1), images=4, dense=1, dense_epochs=(1,))


@pytest.fixture(scope="module")
def net() -> Any:
    """A network like the paper's at two channels, float64: latent 2x4x4, batch norm that has seen data."""
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        Q = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.AvgPool2d(2))
        S = nn.Sequential(nn.Flatten(), nn.Linear(32, 10))
        made = ImplicitNetwork(Q, LatentResNet(2, blocks=1, gamma=0.5), S, tolerance=Tolerance(atol=1e-3)).double()
        made(images(32))
        return made.eval()


def images(number: int) -> Tensor:
    return torch.tensor(load_digits().images[:number] / 16)[:, None]


def loss(y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y, torch.tensor([7]))


@pytest.fixture(scope="module")
def at(net: Any) -> Linearised:
    return linearise(net, images(1), loss)


def test_a_large_network_has_the_same_matrices(net: Any, at: Linearised) -> None:
    columns = torch.tensor([0, 5, 31])
    other = large(net, images(1), loss, columns)
    torch.testing.assert_close(other.J, at.J, rtol=1e-8, atol=1e-10)
    chosen = torch.cat([torch.arange(10), 10 + columns])  # the outputs of S come first
    torch.testing.assert_close(other.M, at.M[:, chosen], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(other.gradient, at.gradient, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(other.direction, at.direction, rtol=1e-7, atol=1e-9)
    assert other.gamma == pytest.approx(float(torch.linalg.svdvals(at.J)[0]))
    assert 1 < conditioning(other).kappa < conditioning(at).kappa  # Cauchy


def test_large_networks_go_that_way(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = local(net, images(1), loss)
    monkeypatch.setattr(theory_dense, "LIMIT", 10)
    monkeypatch.setattr(theory_dense, "OTHERS", 4)
    part = local(net, images(1), loss)
    assert (whole.whole, part.whole) == (True, False)
    assert part.theorem is None
    assert part.conditioning.columns == 10 + 16 + 4
    assert part.statistics == part.conditioning.columns - 1  # of one whole channel the mean is fixed
    assert part.cosine == pytest.approx(whole.cosine, rel=1e-6)
    assert part.lemma.coercivity == pytest.approx(whole.lemma.coercivity, rel=1e-6)
    assert part.perturbed.worst == pytest.approx(whole.perturbed.worst, rel=1e-4)
    assert part.perturbed.allowed < 0
    assert whole.perturbed.allowed < part.perturbed.allowed


def test_batch_statistics_cost_one_direction_per_channel(net: Any) -> None:
    found = local(net, images(1), loss)
    assert found.conditioning.rank == found.conditioning.columns == 42
    assert found.statistics == 40
    assert found.descends


def test_compressing_changes_no_statement(at: Linearised) -> None:
    small = compressed(at)
    assert small.M.shape == (43, 42)
    assert conditioning(small).kappa == pytest.approx(conditioning(at).kappa, rel=1e-8)
    a, b = theorem(small), theorem(at)
    for name in ("inner", "bound", "printed", "scale"):
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-8)
    assert identity(small).error_printed == pytest.approx(identity(at).error_printed, rel=1e-6)
    near, wanted = corollary(small, (0.1, 1.0)), corollary(at, (0.1, 1.0))
    assert near.inner == pytest.approx(wanted.inner, rel=1e-8)
    assert near.moved == pytest.approx(wanted.moved, rel=1e-6)
    outside = replace(at, direction=at.direction + torch.linalg.qr(at.M, mode="complete")[0][:, -1])
    assert identity(compressed(outside)).error > 0.01  # what is not in the range of M is not lost


def test_inner_product_and_its_slope(net: Any, at: Linearised) -> None:
    inner = Inner(net, images(1), loss, at.gradient)
    assert at.u is not None
    assert at.direction_at is not None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, generator=generator, dtype=torch.float64)
    u = at.u + 0.1 * x
    assert inner(u) == pytest.approx(float(at.gradient @ at.direction_at(u)), rel=1e-8)
    h = 1e-5
    by_differences = (inner(u + h * x) - inner(u - h * x)) / (2 * h)
    assert float(inner.slope(u) @ x) == pytest.approx(by_differences, rel=1e-5)


def test_the_worst_direction_is_worse_than_random_ones(net: Any, at: Linearised) -> None:
    inner = Inner(net, images(1), loss, at.gradient)
    assert at.u is not None
    drawn = torch.randn(200, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for distance in (0.01, 1.0):
        tried = [inner(at.u + distance * x / x.norm()) for x in drawn]
        assert inner.highest(at.u, distance) > max(tried)


def test_iterates_and_where_the_solver_stops(net: Any) -> None:
    near = local(net, images(1), loss).perturbed
    assert near.iterates[0][0] == pytest.approx(1.0)  # u_0 = 0
    assert near.iterates[-1][1] == pytest.approx(-1, abs=0.05)  # close to u* JFB is what it is there
    assert 1e-5 < near.own < 1e-1
    distances = [distance for distance, _ in near.iterates]
    assert distances == sorted(distances, reverse=True)


def test_radius_and_first_step() -> None:
    assert radius((0.1, 1, 10), (-1, -0.5, 0.2)) == 1
    assert radius((0.1, 1, 10), (0.0, -1, -1)) == 0
    assert radius((0.1, 1, 10), (-1, math.nan, -1)) == 0.1
    assert radius((0.1, 1, 10), (-1, -0.11, -0.09), below=-0.1) == 1
    steps = Perturbed((), (), (), (), 0.0, ((1.0, -1.0), (0.5, 2.0), (0.2, -1.0), (0.1, -1.0)), 0.0)
    assert steps.first_step == 2
    assert replace(steps, iterates=((1.0, 1.0),)).first_step is None
    assert replace(steps, iterates=((1.0, -1.0),)).first_step == 0


def test_random_cases_meet_the_assumptions() -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(50):
        case = random_case(generator)
        gamma = float(torch.linalg.matrix_norm(case.J, 2))
        assert gamma < 1
        assert float(torch.linalg.cond(case.M.mT @ case.M)) < 1 / gamma
        A = torch.block_diag(torch.eye(2, dtype=torch.float64), torch.eye(4, dtype=torch.float64) - case.J)
        torch.testing.assert_close(case.M @ torch.linalg.inv(A).mT @ case.v, case.gradient)
        torch.testing.assert_close(case.direction, -case.M @ case.v)


def test_the_printed_bound_fails_and_the_mended_one_holds() -> None:
    found = count(300)
    assert found.mended == 0
    assert found.printed > 5
    assert found.descends == found.cases == 300


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, Options]:
    folder = tmp_path_factory.mktemp("theory")
    options = Options(quick=True, out=folder / "out", runs=folder / "runs", device="cpu")
    state = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(theory.CASES, "quick", (TINY,))
        patch.setitem(theory.RANDOM, "quick", 20)
        found = theory.STUDY.run(options)
    assert torch.equal(torch.get_rng_state(), state)
    return found, options


def test_quick_study(quick: tuple[Findings, Options]) -> None:
    found, options = quick
    assert all({"network", "what", "paper", "ours", "holds"} <= set(row) for row in found.rows)
    rows = {row["what"]: row for row in found.rows}
    assert rows["sigma_max(dT/du), eval mode"]["ours"].count == 4
    assert rows["rank of M, batch statistics in R"]["ours"] == 394 - 24
    assert rows["its bound mended is kept"]["holds"] == "1 of 1"
    assert rows["accuracy, validation images"]["ours"] > rows["accuracy, validation images"]["fresh"]
    assert any("cannot hold" in note for note in found.notes)
    written = {path.name for path in found.write(options)}
    names = ("theory-contraction", "theory-cosine", "theory-bounds", "theory-perturbation")
    assert written == {"theory.json", *(f"{name}.{end}" for name in names for end in ("png", "svg"))}
    details = json.loads((options.out / "theory.json").read_text())["details"]["digits"]
    assert [reading["epoch"] for reading in details] == [0, 1]


def test_it_goes_on_from_the_weights_it_kept(quick: tuple[Findings, Options]) -> None:
    found, options = quick
    kept = sorted((options.runs / TINY.name / "weights").iterdir())
    times = [path.stat().st_mtime_ns for path in kept]
    again = train(TINY, options)
    assert [path.name for path in kept] == ["epoch-00000.safetensors", "epoch-00001.safetensors"]
    assert [path.stat().st_mtime_ns for path in kept] == times
    fresh = TINY.job().build().double()
    for name, value in again.moments[0].net.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name])
    reading = measure(again.moments[0], again)  # looks at no image closely
    wanted = next(row for row in found.rows if row["what"].endswith("of the batch, training mode"))["fresh"]
    assert reading.training.cosine == pytest.approx(wanted, rel=1e-9)  # dropout masks are the same every time


def reading(**changes: Any) -> Reading:
    batch = Batch(0.9, 1.0, 0.95, 1.0)
    plain = Reading(0, 0.5, (True, True), (0.8, 1.2), (0.7, 0.9), batch, batch, 0.9, 0.8, (), ())
    return replace(plain, **changes)


def test_what_fails_is_said() -> None:
    readings = [reading(warned=("CG stopped",)), reading(epoch=2, sigma=(1.5, 0.9), warned=("it is left out",))]
    rough = replace(readings[1], batch=Batch(-0.1, 1.0, 0.9, 0.5))
    measured = Measured("net", "data", (0, 1, 2), [readings[0], rough])
    said = " ".join(findings_of(measured))
    assert "no contraction in the Euclidean norm at 2 of 4 fixed points (sigma_max up to 1.5)" in said
    assert "largest observed rate is 0.9" in said
    assert "epochs [1] were not kept" in said
    assert "at epochs [2] not all images of the batch reached u*" in said
    assert "net: CG stopped" in said
    assert "it is left out" not in said.replace("the cosine with it is left out", "")  # of epoch 2 that is said
    held = {row["what"]: row["holds"] for row in rows_of(measured)}
    assert held["sigma_max(dT/du), eval mode"] == "1 of 2 fresh, 1 of 2 trained"
    assert held["observed rate, eval mode"] == "2 of 2 fresh, 2 of 2 trained"
    assert held["cosine of JFB with the exact gradient of the batch, where the solver stops"] == "1 of 2"


def test_an_image_without_a_fixed_point_counts_against_the_rate_and_in_nothing_else() -> None:
    nan = math.nan
    lost = reading(
        epoch=3, found=(True, False), sigma=(0.5, nan), rate=(0.6, nan), batch=Batch(nan, nan, nan, 0.5)
    )
    measured = Measured("net", "data", (0, 3), [reading(), lost])
    held = {row["what"]: row["holds"] for row in rows_of(measured)}
    assert held["observed rate, eval mode"] == "2 of 2 fresh, 1 of 2 trained"
    assert held["sigma_max(dT/du), eval mode"] == "1 of 2 fresh, 1 of 1 trained"
    assert held["cosine of JFB with the exact gradient of the batch, at the fixed point"] == "1 of 1"
    said = " ".join(findings_of(measured))
    assert "no fixed point at 1 of 4 images and epochs (1 at epoch 3)" in said
    assert "at 1 of 3 fixed points" in said


def test_a_diverging_network_is_measured_at_no_fixed_point(net: Any, tmp_path: Path) -> None:
    """R doubled beyond contraction: no image has a fixed point, so none is looked at closely."""
    trained = train(replace(TINY, epochs=(0,), dense_epochs=(0,)), Options(runs=tmp_path, device="cpu"))
    moment = trained.moments[0]
    moment.net.R.gamma = 3.0
    found = measure(moment, trained)
    assert not any(found.found)
    assert found.locals == ()
    assert all(math.isnan(x) for x in (*found.sigma, *found.rate, found.batch.cosine))


def test_local_is_what_rows_are_made_of(net: Any) -> None:
    one: Local = local(net, images(1), loss)
    rows = {row["what"]: row for row in rows_of(Measured("net", "data", (0,), [reading(locals=(one,))]))}
    assert rows["coercivity of I - J (holds: where gamma < 1)"]["ours"].mean == one.lemma.coercivity
    assert rows["kappa(M'M), least over the images"]["holds"] == "0 of 1"
    assert rows["kappa(M'M), least over the images"]["ours"] == one.conditioning.kappa
    assert rows["images and epochs to which the Theorem applies"]["ours"] == 0


def test_a_lemma_beyond_its_premise_is_said(net: Any) -> None:
    one = local(net, images(1), loss)
    beyond = replace(one, lemma=replace(one.lemma, gamma=1.2, coercivity=0.3))
    said = " ".join(findings_of(Measured("net", "data", (0,), [reading(locals=(one, beyond))])))
    assert "I - J is all the same coercive at 1 of 1 such images (least quotient 0.3)" in said
    none = replace(beyond, lemma=replace(beyond.lemma, coercivity=-0.1))
    measured = Measured("net", "data", (0,), [reading(locals=(one, none))])
    assert "I - J is coercive at none of 1 such images" in " ".join(findings_of(measured))
    (row,) = [row for row in rows_of(measured) if row["what"].startswith("coercivity of I - J")]
    assert row["holds"] == "1 of 1"  # beyond the premise nothing is claimed


def test_how_far_from_the_fixed_point_is_said(net: Any) -> None:
    one = local(net, images(1), loss)
    far = replace(one.perturbed, distance=(0.1, 0.2, 1.0, 2.0), worst=(-0.9, -0.05, -1e-9, 4.0), own=0.07)
    measured = Measured("net", "data", (3,), [reading(epoch=3, locals=(replace(one, perturbed=far),))])
    (note,) = (said for said in findings_of(measured) if "how far" in said)
    assert "At epoch 3 a tenth of its descent is left up to |u - u*| / |u*| = 0.1 in the worst" in note
    assert "the solver stops at 0.07. Farther out, where it still descends, 1e-09 to 0.05 of it is left" in note
    near = replace(far, worst=(-0.9, 0.05, -1e-9, 4.0))
    measured = Measured("net", "data", (3,), [reading(epoch=3, locals=(replace(one, perturbed=near),))])
    (note,) = (said for said in findings_of(measured) if "how far" in said)
    assert note.endswith("the solver stops at 0.07.")


def test_a_refused_folder_stays(tmp_path: Path) -> None:
    """Weights beside a run of other settings are not mixed with it."""
    from banach.train import RunError

    options = Options(quick=True, out=tmp_path, runs=tmp_path, device="cpu")
    train(replace(TINY, epochs=(0,)), options)
    with pytest.raises(RunError, match="was begun with epochs=0, got 1"):
        train(TINY, options)
