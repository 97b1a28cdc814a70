"""Every benchmark at a small size: its structure, its instruments, and the claims that are not timings."""

from __future__ import annotations

import functools
import io
import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from benchmarks import (
    compaction,
    invariance,
    ladder,
    layout,
    looptime,
    maps,
    memory,
    modes,
    onestep,
    overhead,
    penalty,
    rival,
    starts,
    steps,
)
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.counting import Calls, LiveBytes
from benchmarks.gpu.__main__ import main as gpu_main
from benchmarks.report import Result, Target
from benchmarks.timing import interleaved, ratio
from rich.console import Console

from banach import Status, Tolerance, solve
from banach.fast.depth import DepthControl, Ladder
from gpu_parts import one_thread  # noqa: F401 - a fixture that every test here uses

if rival.available():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its docstrings hold escapes that newer Pythons warn of
        import torchdeq  # noqa: F401

needs_torchdeq = pytest.mark.skipif(not rival.available(), reason="torchdeq is not installed")

SMALL = {
    "overhead": (overhead.run, overhead.Settings(batch=4)),
    "steps": (steps.run, steps.Settings(n=96, batch=2, tolerance=1e-6, max_steps=300)),
    "memory": (memory.run, memory.Settings(depths=(10, 60), unrolled=(5, 10, 20), batch=8, width=16)),
    "onestep": (onestep.run, onestep.Settings(repeats=1, max_steps=60, small=True)),
    "compaction": (compaction.run, compaction.Settings(((0.2, 0.95),), batch=96, n=32, layers=1, repeats=1)),
    "invariance": (invariance.run, invariance.Settings(batch=5, n=16)),
    "modes": (modes.run, modes.Settings(batch=4, train_steps=2, repeats=1)),
    "starts": (starts.run, starts.Settings(epochs=1, frames=2, images=16, levels=(1e-2,))),
    "ladder": (ladder.run, ladder.Settings((ladder.Case("digits", 1e-1, 1e-3, 12),), seeds=2, batch=20)),
    "layout": (layout.run, layout.QUICK),
    "penalty": (penalty.run, penalty.Settings(epochs=1, seeds=2, images=64, repeats=1)),
    "looptime": (looptime.run, looptime.Settings(shapes=((2, 8),), depth=12, repeats=1)),
}


ALONE = ("modes", "starts", "ladder", "layout", "penalty")  # measured against banach itself


@functools.cache
def small(name: str) -> Result:
    run, settings = SMALL[name]
    return run(settings)  # type: ignore[operator]


def test_all_are_here() -> None:
    assert set(SMALL) == set(BENCHMARKS)


@pytest.mark.parametrize("name", SMALL)
def test_a_result_fits_in_100_columns_and_in_json(name: str, tmp_path: Path) -> None:
    result = small(name)
    console = Console(width=100, record=True, file=io.StringIO())
    result.show(console)
    shown = console.export_text()
    assert result.question in shown
    assert max(map(len, shown.splitlines())) <= 100
    written = json.loads(result.write(tmp_path).read_text())
    assert written["name"] == name
    assert len(written["rows"]) == len(result.rows)
    assert {"date", "device", "versions", "commit", "dirty", "settings"} <= set(written["provenance"])
    assert written["provenance"]["settings"]


@pytest.mark.parametrize("name", ["overhead", "steps", "memory", "compaction", "invariance"])
def test_what_was_promised_holds(name: str) -> None:
    missed = [target.sentence() for target in small(name).targets if not target.met]
    assert small(name).targets
    assert not missed


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ALONE])
def test_without_torchdeq_the_rest_still_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rival, "available", lambda: False)
    run, settings = SMALL[name]
    result = run(settings)  # type: ignore[operator]
    assert rival.ABSENT in result.notes
    assert "TorchDEQ" not in {row.get("library", row.get("method")) for row in result.rows}
    assert result.rows or name == "onestep"


def test_calls_are_counted_beside_the_map() -> None:
    z, out = torch.ones(4, 3), torch.empty(4, 3)
    calls = Calls(z.numel())
    T = calls.beside(lambda x: x.exp().sin())
    with calls:
        row = z.sum(1)  # a kernel, too small to count as an allocation
        y = T(z) * 2  # the map's own two are left out
        torch.add(y, z, out=out)  # writes into what exists
        y.view(12).add_(1)  # a view is no kernel
        row.cpu()
        bool(row[0] > 0)
        torch.linalg.solve(torch.eye(2), torch.ones(2))
    assert calls.kernels["aten.exp.default"] == 0
    assert calls.kernels["aten.mul.Tensor"] == 1
    assert calls.kernels["aten.view.default"] == 0
    assert calls.allocations.total() == 1
    assert calls.syncs == {
        "cpu": 1,
        "aten._local_scalar_dense.default": 1,
        "aten._linalg_check_errors.default": 1,
    }


def test_bytes_alive_follow_the_tensors_and_the_graph() -> None:
    w = torch.ones(1000, requires_grad=True)
    with LiveBytes() as live:
        a = w * 2  # 4000 bytes
        view = a.view(10, 100)
        assert live.now == 4000
        b = a.exp()  # autograd keeps the value of exp
        del a, view
        assert live.now == 4000
        b = b.sum()
        assert live.now == 4004
        b.backward()
        assert live.peak >= 4000 + 4 + 4000  # exp's value beside its gradient
        del b
        assert live.now == 4000  # w.grad
        w.grad = None
        assert live.now == 0


def test_unrolling_keeps_what_the_layers_hold_and_a_checkpoint_one_latent() -> None:
    """R is a relu of four latents and a tanh of one: five per step, in exact bytes."""
    peak = {(row["mode"], row["depth"]): row["peak MB"] * 2**20 for row in small("memory").rows}
    latent = 8 * 16 * 4
    assert peak["Unroll", 20] - peak["Unroll", 10] == pytest.approx(10 * 5 * latent)
    assert peak["Unroll, checkpointed", 20] - peak["Unroll, checkpointed", 10] == pytest.approx(10 * latent)
    assert peak["JFB", 60] == peak["JFB", 10]


def test_the_symmetric_map_takes_the_steps_that_its_powers_say() -> None:
    problem = maps.symmetric(40, 3)
    (b,) = problem.inputs
    A = problem.T(torch.eye(40, dtype=torch.float64), torch.zeros(1, 40, dtype=torch.float64))
    assert torch.linalg.eigvalsh(A) == pytest.approx(torch.linspace(0, 0.95, 40, dtype=torch.float64), abs=1e-12)
    expected = [
        1 + next(k for k in range(1000) if float((torch.matrix_power(A, k) @ row).square().mean().sqrt()) <= 1e-5)
        for row in b
    ]
    seen = maps.Recorder(problem.T)
    found = solve(seen, problem.z0, inputs=problem.inputs, tolerance=Tolerance(atol=1e-5, max_steps=1000))
    assert seen.first_below(1e-5).tolist() == expected
    assert found.steps.tolist() == expected
    assert seen.rows == 3 * seen.evaluations


def test_what_was_never_met_is_infinite() -> None:
    problem = maps.symmetric(8, 2)
    seen = maps.Recorder(problem.T)
    found = solve(seen, problem.z0, inputs=problem.inputs, tolerance=Tolerance(atol=0, max_steps=3))
    assert seen.first_below(0.0).tolist() == [math.inf, math.inf]
    assert set(found.status) == {Status.MAX_STEPS}


def test_nothing_is_gained_on_a_rotation() -> None:
    gained = {(row["map"], row["library"], row["method"]): row["against Picard"] for row in small("steps").rows}
    assert 0.85 < gained["rotation, 48 angles", "banach", "Anderson(5)"] < 1.05
    assert gained["rotation, 2 angles", "banach", "Anderson(5)"] < 0.1


def test_the_steps_that_rates_need_are_those_of_the_closed_form() -> None:
    """T is rate times an orthogonal map, so the residual of evaluation k is rate^(k-1) |b|."""
    problem = maps.rates(20, 32, (0.2, 0.95))
    rate, b = (part.double() for part in problem.inputs)
    size = b.square().mean(1).sqrt()
    exact = 1 + torch.log(1e-4 / size) / torch.log(rate[:, 0])
    needed = compaction.needed_steps(problem, 1e-4, 1000)
    assert (needed >= exact - 0.01).all()
    assert (needed <= exact + 1.01).all()


def test_freezing_wastes_what_compaction_saves() -> None:
    useful = {row["method"]: row["useful %"] for row in small("compaction").rows}
    assert useful["banach, compact"] <= 100
    assert useful["banach, freeze"] < 30


@needs_torchdeq
@pytest.mark.parametrize("method", ["picard", "anderson"])
def test_both_libraries_take_the_same_training_step(method: str) -> None:
    problem = maps.dense(4, 16)
    rms, depth = (0.0, 15) if method == "picard" else (1e-5, 200)
    taken = onestep.training_steps(problem, method, rms, depth)
    ours, theirs = (taken[name](problem.T)[0] for name in ("banach", "TorchDEQ"))
    assert ours.abs().max() > 1e-3
    assert torch.allclose(ours, theirs, atol=1e-6 if method == "picard" else 1e-4)


@needs_torchdeq
def test_equal_depth_is_equal_depth() -> None:
    rows = [row for row in small("onestep").rows if row["tol"] == "never"]
    depth = SMALL["onestep"][1].depth + 1  # type: ignore[attr-defined]
    assert {row["T evals"] for row in rows} == {f"{depth} / {depth}"}


@needs_torchdeq
def test_an_rms_tolerance_is_the_same_for_torchdeq() -> None:
    problem = maps.linear(3, 64)
    ours, theirs = maps.Recorder(problem.T), maps.Recorder(problem.closed())
    solve(ours, problem.z0, inputs=problem.inputs, tolerance=Tolerance(atol=1e-3, max_steps=500))
    rival.solve(theirs, problem.z0, "picard", rms=1e-3, max_steps=500)
    assert ours.evaluations == theirs.evaluations


@needs_torchdeq
def test_the_answer_of_torchdeq_depends_on_the_batch() -> None:
    rows = {(row["dtype"], row["library"], row["method"]): row for row in small("invariance").rows}
    assert rows["float64", "TorchDEQ", "fixed_point_iter"]["difference"] > 1e-7
    assert rows["float64", "banach", "Picard"]["difference"] < 1e-13


def test_actions_run_in_turn() -> None:
    order: list[str] = []
    seconds = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, warm_up=1)
    assert "".join(order) == "abbaabba"
    assert [len(times) for times in seconds.values()] == [3, 3]
    assert ratio([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]).median == 2.0


def test_targets_know_which_side_is_good() -> None:
    assert Target("x", 1.0, 1.0).met
    assert not Target("x", 1.1, 1.0).met
    assert Target("x", 1.1, 1.0, at_least=True).met
    assert not Target("x", math.nan, 1.0).met
    assert not Target("x", math.nan, 1.0, at_least=True).met


def test_the_command_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overhead", "--quick", "--out", str(tmp_path)]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["overhead.json"]
    assert "targets missed: 0" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["no-such-thing"])
    assert "no benchmark is called no-such-thing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["memory", "--device", "cuda:99"])
    assert "there is no device cuda:99" in capsys.readouterr().err
    for wrong, words in (["--device", "foo"], "no device foo"), (["--points="], "no point is called ''"):
        with pytest.raises(SystemExit):
            gpu_main(wrong)
        assert words in capsys.readouterr().err


def test_depths_of_the_ladder_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    result = small("ladder")
    assert [row["seed"] for row in result.rows] == [0, 1]
    (target,) = result.targets
    assert target.measured == sum(row["met"] for row in result.rows) / 2
    assert all(0 <= row["met"] <= 1 and 1 <= row["depth"] <= row["largest"] for row in result.rows)
    monkeypatch.setattr(ladder, "first_control", lambda *_: DepthControl(Ladder((1,)), 1))  # never deep enough
    (row, _) = ladder.run(SMALL["ladder"][1]).rows  # type: ignore[arg-type]
    assert (row["met"], row["depth"], row["largest"]) == (0, 1, 1)


def test_a_start_near_the_answer_saves_steps() -> None:
    """The frame before, and a neighbour among the frames before, which is the same sample."""
    saved = {row["start"]: row["of those from zeros"] for row in small("starts").rows}
    assert saved["zeros"] == 1
    assert saved["the frame before"] < 1
    assert saved["the nearest neighbour"] <= saved["the frame before"] + 0.2
    assert saved["a fitted convolution"] < 1
