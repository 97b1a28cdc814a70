"""The training-step benchmark, tiny on a CPU: contenders, studies, jobs, processes, summaries."""

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks import libraries, processes, summary, training_step
from benchmarks.__main__ import BENCHMARKS
from benchmarks.contenders import CONTENDERS, Setting, Step
from benchmarks.jobs import Job, Settings, next_jobs
from benchmarks.points import OWN_POINTS, POINTS, Batch, Point, feed
from benchmarks.processes import Gate, Record, run_wave
from benchmarks.studies import measure, without_dropout
from torch import Tensor, nn

from fast.simulated import simulate_gpu

CPU = torch.device("cpu")
TIGHT = Point("digits", 4, 1e-11, 400, "fp32")
LOOSE = replace(TIGHT, eps=1e-1, max_steps=50)
QUICK: Settings = BENCHMARKS["training-step"].quick
needs_torchdeq = pytest.mark.skipif(not libraries.has_torchdeq(), reason="torchdeq is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:the training step:UserWarning"),  # on a CPU it is not captured
    pytest.mark.filterwarnings("ignore::banach.ConvergenceWarning"),
]


def batch(seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(4, 1, 8, 8, generator=draw, dtype=torch.float64)
    return images, torch.randint(0, 10, (4,), generator=draw)


def still(name: str, point: Point = TIGHT) -> Step:
    """Return a contender in float64 without dropout, so that all of them compute the same function."""

    def change(net: nn.Module) -> None:
        without_dropout(net.double())

    return CONTENDERS[name].build(Setting(point, "fp32", CPU), change)


def by_hand(steps: int) -> tuple[Tensor, Tensor]:
    """Return loss and gradient of S(R(..R(u, v)..)), one evaluation with autograd after `steps` without."""
    net = still("banach-eager").net
    images, labels = batch()
    v = net.Q(images)
    u = torch.zeros_like(v)
    with torch.no_grad():
        for _ in range(steps):
            u = net.R(u, v)
    loss = F.cross_entropy(net.S(net.R(u, v)), labels, label_smoothing=0.1)  # as the digits recipe has it
    return loss.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


PEERS = ["authors", "plain", "plain-tuned", "plain-graphs"] + [
    pytest.param(name, marks=needs_torchdeq) for name in ("torchdeq", "torchdeq-tuned")
]


@pytest.mark.parametrize("name", ["banach-eager", *PEERS])
def test_those_that_solve_take_the_same_step_and_stop_at_the_same_one(name: str) -> None:
    step, (loss, gradient) = still(name), by_hand(steps=100)
    assert float(step.gradients(*batch())) == pytest.approx(float(loss), abs=1e-8)
    found = torch.cat([p.grad.flatten() for p in step.net.parameters() if p.grad is not None])
    assert torch.allclose(found, gradient, atol=1e-8)
    depth, _, excess = step.reached()
    assert 10 < depth < 100
    assert excess <= 1
    for seed in range(3):
        theirs, ours = still(name, LOOSE), still("banach-eager", LOOSE)
        for one in (theirs, ours):
            one.gradients(*batch(seed))
        there, here = theirs.reached(), ours.reached()
        assert there[0] == here[0] > 2
        assert there[2] == pytest.approx(here[2], rel=1e-9)


def run_in(folder: Path, *only: str, **changes: Any) -> tuple[Settings, list[Record]]:
    """Run jobs in this process until none is left; return the settings and the records."""
    settings = replace(QUICK, only=only, out=folder, work=folder, at_once=100, **changes)
    while jobs := next_jobs(processes.read(settings.records), settings, "here"):
        for job in jobs:
            found = {"job": job.name, **asdict(job), **measure(job, settings, Gate()), "commit": "here"}
            processes.append(settings.records, json.loads(json.dumps(found)))
    return settings, processes.read(settings.records)


def test_contenders_go_on_from_one_network_in_training(tmp_path: Path) -> None:
    settings, _ = run_in(tmp_path, "step/mnist100/plain/")
    weights, moments = torch.load(settings.start("mnist100"), weights_only=False)
    point = settings.point("mnist100")
    batches = feed(point, CPU, many=2)[0]
    first, second = (CONTENDERS["plain"].build(Setting(point, "fp32", CPU)) for _ in range(2))
    for step in (first, second):
        step.load(weights, moments)
    first(*next(batches))
    for name, value in second.net.state_dict().items():
        assert torch.equal(value, weights[name])
    state = second.optimizer.state_dict()["state"]
    assert all(torch.equal(state[k]["exp_avg"], moments["state"][k]["exp_avg"]) for k in state)
    assert state[0]["step"] == point.warm_up
    assert first.optimizer.state_dict()["state"][0]["step"] == point.warm_up + 1


def test_all_contenders_solve_a_network_that_no_kernel_knows(tmp_path: Path) -> None:
    _, records = run_in(tmp_path, "step/mlp", "step/two-scales/plain/", "step/two-scales/banach-fast")
    pairs = [one for one in records if (one["study"], one["point"]) == ("step", "two-scales")]
    assert pairs[0]["depth"] == pytest.approx(pairs[1]["depth"], abs=1)
    steps = {one["contender"]: one for one in records if (one["study"], one["point"]) == ("step", "mlp")}
    assert set(steps) >= {"plain", "plain-tuned", "plain-graphs", "banach-eager", "banach-fast", "explicit-fast"}
    solved = [one for name, one in steps.items() if name != "explicit-fast"]
    assert {one["met"] for one in solved} == {1.0}
    assert max(one["depth"] for one in solved) - min(one["depth"] for one in solved) <= 1
    assert all(one["mean_depth"] <= one["depth"] for one in solved)
    assert steps["plain"]["host_syncs"] == pytest.approx(steps["plain"]["depth"], abs=1)
    assert (steps["explicit-fast"]["met"], steps["explicit-fast"]["host_syncs"]) == (None, 0)
    for one in steps.values():
        assert one["each_step"]["least"] <= one["ms"] <= one["each_step"]["most"]
        assert "random inputs" in one["data"]


def test_the_other_studies_measure_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated GPU, whose loop tests every fourth step."""
    simulate_gpu(monkeypatch, kernels=False)
    shallow = replace(POINTS["transformer-8"], mean_steps=3)
    monkeypatch.setitem(POINTS, "transformer-8", shallow)
    names = (
        "depth/mlp",
        "gradients/mlp",
        "curve/cifar100/banach-captured",
        "per-step",
        "step/transformer-8/banach",
    )
    _, records = run_in(tmp_path, *names, curve_steps=2, depth_steps=2)
    found = {(one["study"], one["contender"]): one for one in records}
    more = found["depth", "banach-captured"]
    assert 0 <= more["least_more"] <= more["most_more"] <= summary.CYCLE - 1
    assert sum(more["more"].values()) == pytest.approx(1)
    for way in ("plain", "banach-eager", "banach-fast"):
        one = found["gradients", way]
        assert set(one["errors"]) == {"Q", "R", "S"}
        assert max(one["errors"].values()) < 0.02  # of the order of eps
        assert min(one["cosines"].values()) > 0.9999
    assert len(found["curve", "banach-captured"]["losses"]) == 2
    assert set(found["per-step", "banach-fast"]["per_step"]) == {"Picard", "Anderson"}
    starts = {one["point"]: one for one in records if one["study"] == "start"}
    assert starts["transformer-8"]["steps"] == 1 < starts["transformer"]["steps"]  # it ends at three steps
    assert found["step", "banach-fast"]["mean_depth"] == starts["transformer-8"]["mean_depth"] >= 3


@pytest.mark.filterwarnings("ignore::banach.AdjointWarning")  # Broyden's method, after two steps of training
def test_rivals_are_compared_with_what_their_authors_designed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a simulated GPU: by the exact gradient, captured or as a batch that stops as one, and by JFB."""
    simulate_gpu(monkeypatch, kernels=False)
    settings, records = run_in(tmp_path, "step/mon/", "step/mdeq-tiny/jfb")
    found = {one["contender"]: one for one in records if (one["study"], one["point"]) == ("step", "mon")}
    assert set(found) == {"exact-eager", "exact-captured", "jfb-captured", "jfb-fast"}
    assert found["exact-eager"]["depth"] == found["exact-eager"]["mean_depth"] > 1
    assert all(one["met"] == 1 and one["data"].startswith("digits") for one in found.values())
    text = [target.what for target in summary.report(records, settings.out).targets]
    assert [name.partition(" (")[0] for name in text if "exact-eager" in name] == [
        f"mon: {name}, times faster than exact-eager" for name in ("exact-captured", "jfb-captured", "jfb-fast")
    ]


def test_a_prediction_is_timed_at_every_batch(tmp_path: Path) -> None:
    _, records = run_in(tmp_path, "prediction/cifar512")
    found = {one["contender"]: one for one in records if one["study"] == "prediction"}
    assert set(found) == {"banach-fast", "explicit-fast", "plain", "plain-tuned"}
    assert all(set(one["by_batch"]) == {"1", "3"} for one in found.values())
    assert (found["banach-fast"]["met"], found["explicit-fast"]["met"]) == (1.0, None)


@pytest.mark.gpu
def test_captured_steps_on_a_gpu_end_at_the_depth_that_is_needed(tmp_path: Path) -> None:
    names = ("step/mlp/banach-fast", "step/mlp/plain/", "depth", "gradients/two-scales", "prediction/transformer")
    _, records = run_in(tmp_path, *names, device="cuda", depth_steps=20)
    found = {(one["study"], one["point"], one["contender"]): one for one in records}
    assert all(found["depth", point, "banach-captured"]["least_more"] >= -1 for point in OWN_POINTS)
    assert all(found["depth", point, "banach-captured"]["most_more"] < summary.CYCLE for point in OWN_POINTS)
    fast = found["step", "mlp", "banach-fast"]
    assert fast["peak_bytes"] > 0
    assert fast["host_syncs"] == 0
    assert fast["ms"] < found["step", "mlp", "plain"]["ms"]
    assert max(found["gradients", "two-scales", "banach-fast"]["errors"].values()) < 0.05


def record(job: Job, **fields: Any) -> Record:
    return {"job": job.name, **asdict(job), "commit": "here", "met": 1.0, **fields}


def test_later_processes_use_the_fastest_precision_that_meets_the_tolerance(tmp_path: Path) -> None:
    settings = replace(Settings(), out=tmp_path, work=tmp_path, only=("step/mlp/plain/", "depth/mlp"))
    (first,) = next_jobs([], settings, "here")
    assert first.name == "start/mlp/banach-eager/fp32/0"
    assert next_jobs([record(first)], settings, "here") == [first]  # a machine without the file of the record
    assert next_jobs([record(first, error="no")], settings, "here") == []
    settings.start("mlp").touch()
    wave = next_jobs([], settings, "here")
    assert [job.name for job in wave] == ["step/mlp/plain/tf32/0", "step/mlp/plain/bf16/0"]
    records = [record(wave[0], ms=3.0), record(wave[1], ms=1.0, met=0.5)]
    later = next_jobs(records, settings, "here")
    assert [job.name for job in later] == ["step/mlp/plain/tf32/1", "step/mlp/plain/tf32/2"]
    records += [record(job, ms=3.0) for job in later]
    assert [job.name for job in next_jobs(records, settings, "here")] == ["depth/mlp/banach-captured/fp32/0"]
    failed = [record(wave[0], error="no"), record(wave[1], error="no")]
    assert [job.study for job in next_jobs(failed, settings, "here")] == ["depth"]
    assert next_jobs(failed, settings, "another commit")[:2] == wave


def test_processes_write_records_and_a_second_call_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(QUICK, only=("step/mlp/plain/",), out=tmp_path, work=tmp_path)
    with pytest.raises(SystemExit, match="2"):
        training_step.run(replace(settings, only=("step/mpl",)))
    assert "no job begins with step/mpl" in capsys.readouterr().err
    late = replace(settings, seconds=training_step.RESERVE)  # no time for a single process
    assert "some jobs are left: run the command again" in training_step.run(late).notes
    assert training_step.run(settings).rows[0]["contender"] == "plain"
    names = [one["job"] for one in processes.read(settings.records)]
    assert names == ["start/mlp/banach-eager/fp32/0", "step/mlp/plain/fp32/0"]
    training_step.run(settings)
    assert [one["job"] for one in processes.read(settings.records)] == names
    settings.start("mlp").write_text("damaged")
    job = Job("step", "mlp", "authors", "fp32")
    assert not run_wave({"one": job.command(settings)}, time.monotonic() + 100, {})
    assert "Error" in processes.read(settings.records)[-1]["error"]
    assert "processes, step/mlp/plain/fp32/0" in capsys.readouterr().out


WORK = """
import sys, time
from benchmarks.processes import Gate
sys.stderr.write("no turn\\n")
way, out, *handles = sys.argv[1:]
gate = Gate(tuple(map(int, handles)))
if way == "dies": sys.exit(3)
time.sleep(60 if way == "hangs" else float(way))
prepared = time.monotonic()
gate.meet(1)
gate.meet(2)
with gate.turn():
    began = time.monotonic()
    time.sleep(0.05)
    print(prepared, began, time.monotonic(), file=open(out, "w"))
"""


def test_processes_prepare_together_take_turns_and_end_in_time(tmp_path: Path) -> None:
    ways = {"0.0": "quick", "0.5": "slow", "dies": "dies", "hangs": "hangs"}
    command = {name: [sys.executable, "-c", WORK, way, str(tmp_path / name)] for way, name in ways.items()}
    first = {name: command[name] for name in ("quick", "slow", "dies")}
    assert run_wave(first, time.monotonic() + 60, {}) == {"dies": "no turn"}
    times = [tuple(map(float, (tmp_path / name).read_text().split())) for name in ("quick", "slow")]
    one, two = sorted(times, key=lambda each: each[1])
    assert max(one[0], two[0]) <= one[1] < one[2] <= two[1]
    began = time.monotonic()
    assert run_wave({"hangs": command["hangs"]}, began + 1, {}) == {}  # killed, not failed
    assert time.monotonic() - began < 20


def test_a_missing_data_set_becomes_noise_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANACH_CACHE", str(tmp_path))
    monkeypatch.delenv("BANACH_DATA", raising=False)
    batches, title = feed(replace(POINTS["cifar512"], batch=4), CPU, many=3)
    assert title == "random inputs (no data set for cifar10)"
    taken = [next(batches)[0] for _ in range(4)]
    assert taken[0].shape == (4, 3, 32, 32)
    assert torch.equal(taken[0], taken[3])
    assert feed(LOOSE, CPU, many=1)[1] == "digits (scikit-learn)"


def step_records(point: str, **ms: float) -> list[Record]:
    names = {name.replace("_", "-"): value for name, value in ms.items()}
    return [
        record(Job("step", point, name, "bf16", number), ms=value * (1 + number / 10), depth=3.0, mean_depth=2.0)
        for name, value in names.items()
        for number in range(3)
    ]


def test_ratios_are_taken_against_the_fastest_peer_of_any_run(tmp_path: Path) -> None:
    older = {"provenance": {"settings": {"point": {"name": "mnist100"}}}}
    older["measured"] = [{"contender": "plain", "role": "peer", "ms": 8.0}]  # type: ignore[assignment]
    (tmp_path / "mnist100.json").write_text(json.dumps(older))
    records = step_records(
        "mnist100", plain=10.0, torchdeq=20.0, plain_tuned=4.0, banach_fast=0.4, banach_eager=12.0
    )
    report = summary.report([*records, record(Job("step", "mlp", "plain", "bf16"), error="no memory")], tmp_path)
    found = {target.what: target for target in report.targets}
    assert found["mnist100: ms of banach-fast"].measured == pytest.approx(0.44)
    against = found["mnist100: times faster than authors of mnist100.json (16.7-20)"]
    assert against.measured == pytest.approx(8.0 / 0.44)
    assert found["mnist100: times faster than plain-tuned (8.33-12)"].measured == pytest.approx(10.0)
    eager = found["mnist100: eager / plain loop (1-1.44)"]
    assert (eager.measured, eager.met) == (pytest.approx(1.2), False)
    assert "step/mlp/plain/bf16/0: no memory" in report.notes
    assert [row["range"] for row in report.rows if row["contender"] == "banach-fast"] == ["0.4-0.48"]


def test_the_other_promises_are_judged(tmp_path: Path) -> None:
    records = step_records("transformer-8", banach_fast=2.0, explicit_fast=1.0)
    records.append(
        record(Job("per-step", "transformer", "banach-fast", "bf16"), per_step={"Picard": 2, "Anderson": 3}, ms=1)
    )
    records.append(record(Job("depth", "mlp", "banach-captured", "fp32"), most_more=2))
    for way, size, ms in (("banach-fast", "64", 1.0), ("plain", "64", 6.0), ("plain-tuned", "64", 3.0)):
        records.append(
            record(Job("prediction", "transformer", way, "bf16"), ms=ms, by_batch={size: {"median": ms}})
        )
    for way, part in (("banach-eager", 0.1), ("banach-fast", 0.2)):
        records.append(record(Job("gradients", "mlp", way, "bf16"), errors={"Q": 0.1, "R": part}))
    for way, seed in (("captured", 0), ("captured", 1), ("eager", 0), ("eager", 1)):
        records.append(record(Job("curve", "cifar100", f"banach-{way}", "bf16", seed), final=1.0 + seed))
    found = {one.what: (one.measured, one.met) for one in summary.report(records, tmp_path).targets}
    assert found["transformer-8: implicit / explicit (1.67-2.4)"] == (2.0, True)
    assert found["captured Anderson / Picard, per step (1.5-1.5)"] == (1.5, False)
    assert found["mlp: evaluations of R beyond those needed"] == (2, True)
    assert found["prediction, batch 64: times faster than plain (6-6)"] == (6.0, True)
    assert found["mlp: error of the gradient of Q, of the eager one"] == (1.0, True)
    assert found["mlp: error of the gradient of R, of the eager one"] == (2.0, False)
    assert found["cifar100: final losses apart, in spreads over seeds"] == (0.0, True)


def test_two_folders_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, ms in (("old", 2.0), ("new", 3.0)):
        for one in step_records("mnist100", banach_fast=ms):
            processes.append(tmp_path / name / summary.RECORDS, one)
    summary.main([str(tmp_path / "old"), str(tmp_path / "new")])
    assert capsys.readouterr().out == "mnist100, banach-fast: new / old (1.25-1.8): 1.5, at most 1.03\n"


def test_the_table_of_the_page_comes_from_the_records(tmp_path: Path) -> None:
    page = summary.PAGE.read_text()
    assert summary.rewritten(page, summary.page_table(summary.PAGE.parents[1] / "results" / "gpu")) == page
    assert "replaced" in summary.rewritten(page, "replaced")
    records = step_records("mlp", plain=10.0, plain_tuned=4.0, banach_fast=0.4, explicit_fast=0.2)
    for one in records:
        processes.append(tmp_path / summary.RECORDS, one)
    row = "| mlp, batch 256 | 0.44 (0.4-0.48) | 11 (10-12) (plain) | 25 (20.8-30) | 10 (8.33-12) | 2 (1.67-2.4) |"
    assert summary.page_table(tmp_path).splitlines()[2] == row
