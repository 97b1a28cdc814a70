"""`banach diagnose`: its figures against plain autograd and dense matrices, and a run that it leaves alone."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import JFB, Implicit, Mode, Tolerance, Unroll, data, models
from banach.cli.app import main
from banach.cli.diagnose import charts, measure
from banach.cli.shared import open_run
from banach.train import Run, Settings, fit
from banach.train.plot import draw
from cli.conftest import refused
from train.parts_train import Double

EPS, COUNT = 1e-3, 12


class R(nn.Module):
    """R(u, v) = BN(tanh(W u + v)) / 4."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        found: Tensor = self.norm(torch.tanh(self.inner(u) + v)) / 4
        return found


def tiny(image: Any, classes: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    """In float64, without dropout, latent 6."""
    Q = nn.Sequential(Double(), nn.Flatten(), nn.Linear(64, 6))
    return Q.double(), R().double(), nn.Linear(6, 10).double()


@pytest.fixture(autouse=True)
def own_model(here: Path) -> None:
    models.register("tiny", tiny, description="for a test", image=(1, 8, 8))


def make_run(path: Path, model: str, **changes: Any) -> Path:
    given = {"data": "digits", "epochs": 2, "batch_size": 16, "lr": 1e-2, "monitor": False, "device": "cpu"}
    settings = Settings(model=model, **{**given, **changes})
    train, held = (data.load("digits", split) for split in ("train", "validation"))
    fit(settings.build(), train.subset(48), held.subset(10), settings, run=Run.create(path, settings))
    return path


def diagnosed(path: Path, *flags: str) -> dict[str, Any]:
    assert main(["diagnose", str(path), "--device", "cpu", "--samples", str(COUNT), *flags]) == 0
    found: dict[str, Any] = json.loads((path / "diagnose.json").read_text())
    return found


def batch() -> tuple[Tensor, Tensor]:
    """The images that are measured, normalised by hand."""
    held = data.load("digits", "validation").subset(COUNT)
    return (held.pixels.float() / 255 - held.mean[0]) / held.std[0], held.labels


def iterated(net: Any, d: Tensor, steps: int) -> Tensor:
    """All iterates of Picard from zero, recorded by autograd."""
    v = net.Q(d)
    u = [torch.zeros_like(v)]
    for _ in range(steps):
        u.append(net.R(u[-1], v))
    return torch.stack(u)


def test_the_curve_is_that_of_the_iteration(tmp_path: Path, capsys: Any) -> None:
    """The curve, and what is printed and written besides."""
    pytest.importorskip("matplotlib")
    tiny_run = make_run(tmp_path / "tiny", "tiny", eps=EPS, max_steps=60)
    capsys.readouterr()
    with torch.no_grad():
        residuals = iterated(open_run(tiny_run, "cpu").net, batch()[0], 60).diff(dim=0).pow(2).mean(2).sqrt()
    found = diagnosed(tiny_run)
    ordered, figures = residuals[:20].sort(1).values, found["figures"]
    places = {"low": round(0.1 * (COUNT - 1)), "median": round(0.5 * (COUNT - 1)), "worst": COUNT - 1}
    for name, place in places.items():
        got = torch.tensor(found["curve"][name], dtype=torch.float64)
        torch.testing.assert_close(got[:20], ordered[:, place], rtol=1e-4, atol=1e-14)
        assert float(got.min()) < 1e-9  # far below the run's own tolerance
    assert figures["steps"]["values"] == ((residuals > EPS).sum(0) + 1).tolist()
    assert (found["converged"], found["tolerance"]["atol"]) == (COUNT, EPS)
    assert figures["least residual of more steps"]["max"] < 1e-12
    out, err = capsys.readouterr()
    assert err == ""
    assert found["verdict"] in " ".join(out.split())
    assert f"{COUNT} of {COUNT} samples" in found["verdict"]
    assert (tiny_run / "diagnose.png").read_bytes()[:4] == b"\x89PNG"
    assert {"date", "device", "versions", "commit", "settings"} <= set(found["provenance"])
    assert found["provenance"]["settings"]["run"]["model"] == "tiny"
    assert found["position"] == {"epoch": 2, "step": 0}
    assert (found["split"], found["data"]) == ("validation", "digits (scikit-learn)")


def test_steps_that_would_be_enough() -> None:
    """Where max_steps are too few, the verdict says how many it takes."""
    net: Any = Settings(data="digits", model="tiny", device="cpu").build().eval()
    with torch.no_grad():
        residuals = iterated(net, batch()[0], 60).diff(dim=0).pow(2).mean(2).sqrt()
    enough = int((residuals > EPS).sum(0).max()) + 1
    for steps in (3, enough):
        net.tolerance = Tolerance(atol=EPS, max_steps=steps)
        words = measure(net, data.load("digits", "validation").subset(COUNT)).words
        assert (f"It would be met after {enough} steps: see --max-steps." in words) is (steps == 3)


def test_train_mode_sees_batch_norm_over_the_batch(tmp_path: Path) -> None:
    """The exact gradient by autograd through an iteration that normalises by the batch at every step."""
    found = diagnosed(make_run(tmp_path / "r", "tiny", eps=1e-8, max_steps=60, label_smoothing=0.2))
    ends = found["gradients"]["JFB"]["all"], found["gradients"]["JFB, train mode"]["all"]
    d, labels = batch()
    for g, training in zip(ends, (False, True), strict=True):
        net: Any = open_run(tmp_path / "r", "cpu").net.train(training)
        exact = iterated(net, d, 60)[-1]
        flat = []
        for u in (net.R(exact.detach(), net.Q(d)), exact):
            loss = F.cross_entropy(net.S(u), labels, label_smoothing=0.2)
            grads = torch.autograd.grad(loss, list(net.parameters()))
            flat.append(torch.cat([grad.flatten() for grad in grads]).double())
        wanted = float(F.cosine_similarity(flat[0], flat[1], dim=0)), float(flat[0].norm() / flat[1].norm())
        assert (g["cosine"], g["ratio"]) == pytest.approx(wanted, rel=1e-4)
    # Had the mode made no difference, this would show nothing.
    assert abs(ends[0]["ratio"] - ends[1]["ratio"]) > 0.01


def test_nothing_of_the_run_or_the_network_changes_and_a_seed_repeats(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", "digits", ema=0.9, backward="neumann:2")
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second, other = (diagnosed(path, "--seed", seed) for seed in "001")
    assert torch.equal(torch.get_rng_state(), state)
    assert {file: file.read_bytes() for file in before} == before
    added = {file.name for file in path.rglob("*") if file.is_file()} - {file.name for file in before}
    assert added <= {"diagnose.json", "diagnose.png"}
    for found in (first, second, other):
        del found["provenance"]
    assert first == second
    # The run's own mode comes first, and once.
    assert list(first["gradients"]) == ["Neumann 2", "JFB", "Neumann 1", "Neumann 5", "JFB, train mode"]
    masked = [one["gradients"].pop("JFB, train mode") for one in (first, other)]
    assert masked[0] != masked[1]  # the dropout masks of train mode
    assert first["gradients"] == other["gradients"]

    net = open_run(path, "cpu").net
    weights = copy.deepcopy(net.state_dict())
    measure(net, data.load("digits", "validation").subset(4))
    assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())
    assert not any(module.training for module in net.modules())
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("mode", "name"), [(JFB(), "JFB"), (Unroll(2), "Unroll 2"), (Implicit(), "Implicit NormalCG")]
)
def test_a_map_that_expands_is_called_that(mode: Mode, name: str, tmp_path: Path) -> None:
    net: Any = Settings(data="digits", model="tiny", device="cpu").build().eval()
    net.backward = mode
    with torch.no_grad():  # u -> BN(tanh(v - 12 P u)) / 4, P a cyclic shift: the signs go round and never settle
        net.R.inner.weight.copy_(-12 * torch.eye(6).roll(1, 0))
        for p in net.Q.parameters():
            p.mul_(0.01)
    found = measure(net, data.load("digits", "validation").subset(4))
    assert found.contraction.violations == 4
    assert "does not converge on 4 of 4 samples" in found.words
    assert "the cosines are approximate" in found.words
    assert not found.sound
    assert next(iter(found.gradients)) == name
    json.dumps(found.to_dict()["gradients"])
    draw(charts(found), tmp_path / "plot.png")


@pytest.mark.parametrize("model", ["resnet56", "digits"])
def test_without_a_fixed_point_it_is_refused(tmp_path: Path, capsys: Any, model: str) -> None:
    path = make_run(tmp_path / "r", model, epochs=1, batch_size=48, max_steps=0)
    refused(["diagnose", str(path)], capsys, "no fixed point")
    assert not (path / "diagnose.json").exists()
