"""The training-step benchmark and the other GPU benchmarks, tiny on a CPU: contenders, counts and reports."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks import libraries, training_step
from benchmarks.__main__ import BENCHMARKS
from benchmarks.contenders import CONTENDERS, Contender, Eager, Seen, Setting, Step
from benchmarks.points import POINTS, Batch, Point, feed
from benchmarks.results import Figure
from torch import Tensor, nn

CPU = torch.device("cpu")
TIGHT = Point("tiny", "digits", 4, 1e-11, 400, "fp32")
LOOSE = replace(TIGHT, eps=1e-1, max_steps=50)
FEW = replace(BENCHMARKS["mnist100"].quick, point=LOOSE)
needs_torchdeq = pytest.mark.skipif(not libraries.has_torchdeq(), reason="torchdeq is not installed")


def batch(seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(4, 1, 8, 8, generator=draw, dtype=torch.float64)
    return images, torch.randint(0, 10, (4,), generator=draw)


def still(name: str, point: Point = TIGHT, depth: int = 60) -> Step:
    """Return a contender in float64 without dropout, so that all of them compute the same function."""
    contender = CONTENDERS[name]
    net = contender.change(point.network(CPU)).double()
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return contender.make(net, Setting(point, "fp32", CPU, depth))


def gradient(step: Step) -> Tensor:
    return torch.cat([p.grad.flatten() for p in step.net.parameters() if p.grad is not None])


def by_hand(steps: int, *, recorded: int = 1) -> tuple[Tensor, Tensor]:
    """Return loss and gradient of S(R(..R(u, v)..)), `recorded` passes with autograd after `steps` without."""
    net = still("banach-eager").net
    images, labels = batch()
    v = net.Q(images)
    u = torch.zeros_like(v)
    with torch.no_grad():
        for _ in range(steps):
            u = net.R(u, v)
    for _ in range(recorded):
        u = net.R(u, v)
    loss = F.cross_entropy(net.S(u), labels, label_smoothing=0.1)  # as the digits recipe has it
    return loss.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def check(step: Step, expected: tuple[Tensor, Tensor], atol: float) -> None:
    loss = step.gradients(*batch())
    assert float(loss) == pytest.approx(float(expected[0]), abs=atol)
    assert torch.allclose(gradient(step), expected[1], atol=atol)


PEERS = ["plain", "plain-tuned"] + [
    pytest.param(name, marks=needs_torchdeq) for name in ("torchdeq", "torchdeq-tuned")
]


@pytest.mark.parametrize("name", ["banach-eager", *PEERS])
def test_those_that_solve_take_the_same_step_and_stop_at_the_same_one(name: str) -> None:
    step = still(name)
    check(step, by_hand(100), 1e-8)
    depth, excess = step.seen.read()
    assert 10 < depth < 100
    assert excess <= 1
    for seed in range(3):
        theirs, ours = still(name, LOOSE), still("banach-eager", LOOSE)
        for one in (theirs, ours):
            one.gradients(*batch(seed))
        found, expected = theirs.seen.read(), ours.seen.read()
        assert found[0] == expected[0] > 2
        assert found[1] == pytest.approx(expected[1], rel=1e-9)


def test_fixed_depths_are_the_gradients_of_the_whole_loop() -> None:
    unrolled, explicit = still("unroll", depth=7), still("explicit")
    check(unrolled, by_hand(0, recorded=8), 1e-12)
    assert unrolled.seen.read()[0] == 7
    check(explicit, by_hand(0), 1e-12)
    depth, excess = explicit.seen.read()
    assert depth == 0
    assert math.isnan(excess)


def test_contenders_go_on_from_one_network_in_training(tmp_path: Path) -> None:
    training_step.train(FEW, tmp_path / "start.pt")
    weights, moments, _ = torch.load(tmp_path / "start.pt", weights_only=False)
    batches = feed(LOOSE, CPU, many=2)[0]
    first, second = (CONTENDERS["plain"].build(Setting(LOOSE, "fp32", CPU)) for _ in range(2))
    for step in (first, second):
        step.load(weights, moments)
    first(*next(batches))
    first(*next(batches))
    for name, value in second.net.state_dict().items():
        assert torch.equal(value, weights[name])
    state = second.optimizer.state_dict()["state"]
    assert all(torch.equal(state[k]["exp_avg"], moments["state"][k]["exp_avg"]) for k in state)
    assert state[0]["step"] == FEW.warm_up
    assert first.optimizer.state_dict()["state"][0]["step"] == FEW.warm_up + 2


class Sloppy(Eager):
    """In bf16 it does next to nothing, and misses eps."""

    def forward(self, d: Tensor) -> Tensor:
        output = super().forward(d)
        if self.setting.precision == "bf16":
            self.seen = Seen(1, lambda: 100.0)
        return output


def test_a_precision_must_meet_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTENDERS, "sloppy", Contender("sloppy", Sloppy, "ours"))
    names = ("banach-fast", "sloppy", "plain")
    report = training_step.run(replace(FEW, contenders=names, precisions=("fp32", "bf16")))
    assert [row["contender"] for row in report.rows] == ["sloppy", "plain"]
    assert "banach-fast: needs CUDA" in report.notes
    sloppy, plain = report.details["measured"].values()
    assert sloppy["precision"] == "fp32"
    assert sloppy["pilots"]["bf16"]["met"] == 0
    assert plain["host_syncs"] == plain["depth"]
    for one in (sloppy, plain):
        assert set(one["pilots"]) == {"fp32", "bf16"}
        assert 0 < one["each_step"].least <= one["ms"] <= one["each_step"].most
        assert one["images_per_second"] == pytest.approx(1e3 * LOOSE.batch / one["ms"])
        assert (one["met"], one["peak_bytes"]) == (1.0, None)
        assert one["residual"] <= LOOSE.eps
    with pytest.raises(SystemExit, match="no contender is called plane"):
        training_step.run(replace(FEW, contenders=("plane",)))


@pytest.mark.parametrize("name", ["mlp", "two-scales"])
def test_all_contenders_solve_a_network_that_no_kernel_knows(name: str, tmp_path: Path) -> None:
    settings = replace(BENCHMARKS[name].quick, point=replace(POINTS[name], batch=2))
    report = training_step.run(settings)
    expected = [name for name, one in CONTENDERS.items() if one.missing(settings.point, CPU) is None]
    assert [row["contender"] for row in report.rows] == expected
    solved = [row for row in report.rows if row["contender"] not in ("explicit", "unroll")]
    assert {row["met %"] for row in solved} == {100}
    assert max(row["depth"] for row in solved) - min(row["depth"] for row in solved) <= 1


def test_a_contender_runs_in_its_own_process(tmp_path: Path) -> None:
    one = replace(BENCHMARKS["mnist100"], name="tiny", quick=replace(FEW, contenders=("plain",), processes=1))
    written = json.loads(one.measure(one.quick).write(tmp_path).read_text())
    assert [row["contender"] for row in written["rows"]] == ["plain"]
    assert written["details"]["measured"]["plain"]["processes"]["count"] == 1
    assert written["provenance"]["settings"]["point"]["batch"] == 4


def test_a_missing_data_set_becomes_noise_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANACH_CACHE", str(tmp_path))
    monkeypatch.delenv("BANACH_DATA", raising=False)
    batches, title = feed(replace(POINTS["cifar512"], batch=4), CPU, many=3)
    assert title == "random inputs (no data set for cifar10)"
    taken = [next(batches)[0] for _ in range(4)]
    assert taken[0].shape == (4, 3, 32, 32)
    assert torch.equal(taken[0], taken[3])
    assert feed(LOOSE, CPU, many=1)[1] == "digits (scikit-learn)"


def made(name: str, role: str, ms: float) -> dict[str, Any]:
    return {"contender": name, "role": role, "ms": ms, "peak_bytes": 1, "met": 0.9, "processes": Figure.of([ms])}


def test_targets_are_held_against_the_best_peer_and_the_fast_twin() -> None:
    rows = [made("plain", "peer", 9.0), made("torchdeq", "peer", 8.0), made("unroll", "fixed", 1.0)]
    rows += [made("explicit-fast", "twin", 0.3), made("banach-fast", "ours", 0.4)]
    records = {row["contender"]: row for row in rows}
    settings = BENCHMARKS["mnist100"].full
    found = {t.what: (t.measured, t.met) for t in training_step.targets(records, settings)}
    assert found["banach-fast, ms"] == (0.4, True)
    assert found["times faster than the best peer, torchdeq"] == (20.0, True)
    assert found["times as long as explicit-fast"] == (pytest.approx(4 / 3), True)
    assert found["banach-fast, share of steps that meet eps"] == (0.9, False)
    assert training_step.targets(records, replace(settings, device="cpu")) == []


@pytest.mark.filterwarnings("ignore:training steps:UserWarning", "ignore:the training step:UserWarning")
@pytest.mark.filterwarnings("ignore::banach.ConvergenceWarning")
@pytest.mark.parametrize(
    ("name", "rows"),
    [("inference", 8), ("epoch", 2), ("curves", 4), ("kernels", 3), ("depth-memory", 2)],
)
def test_further_benchmarks_run_at_tiny_sizes(name: str, rows: int) -> None:
    """On a CPU their times mean nothing; that they run, and what they report, is tested."""
    report = BENCHMARKS[name].run(BENCHMARKS[name].quick)
    assert len(report.rows) == rows
    assert all(math.isfinite(target.measured) for target in report.targets)
    if name == "epoch":
        assert report.rows[1]["loss"] < report.rows[0]["loss"]
    if name == "curves":
        assert report.targets[0].measured < 1e-3  # on a CPU both ways are the plain one


@pytest.mark.filterwarnings("ignore:training steps:UserWarning", "ignore:the training step:UserWarning")
def test_gradients_of_steps_are_those_of_the_network() -> None:
    """On a CPU a step is the network itself, in another memory format."""
    row = BENCHMARKS["gradients-mnist100"].run(BENCHMARKS["gradients-mnist100"].quick).rows[0]
    assert row["in"] == "fp32"
    assert 0 < row["captured"] < 1e-4
    assert row["apart"] < 1e-4
    assert row["cosine"] == pytest.approx(1)
