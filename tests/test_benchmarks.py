"""The runner and every CPU benchmark at its quick size: structure, instruments, claims that are not timings."""

import functools
import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import libraries, maps, onestep, solving
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.counting import Calls, LiveBytes, host_syncs
from benchmarks.results import Figure, Report, Target, earlier
from benchmarks.timer import interleaved, ratio

from banach import Anderson, Broyden, Euclidean, Implicit, Picard, Tolerance, Unroll, fixed_point, solve

if libraries.has_torchdeq():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its docstrings hold escapes that newer Pythons warn of
        import torchdeq

needs_torchdeq = pytest.mark.skipif(not libraries.has_torchdeq(), reason="torchdeq is not installed")
CPU = torch.device("cpu")
ON_CPU = [name for name, one in BENCHMARKS.items() if one.group == "cpu"]


@functools.cache
def quick(name: str) -> Report:
    return BENCHMARKS[name].run(BENCHMARKS[name].quick)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_result_fits_in_120_columns_and_in_json(name: str, tmp_path: Path) -> None:
    one, report = BENCHMARKS[name], quick(name)
    one.show(report, {}, file := io.StringIO())
    assert one.question in file.getvalue()
    assert max(map(len, file.getvalue().splitlines())) <= 120
    written = json.loads(one.write(report, one.quick, tmp_path).read_text())
    assert written["name"] == name
    assert len(written["rows"]) == len(report.rows)
    assert {"date", "device", "versions", "commit", "dirty", "settings"} <= set(written["provenance"])
    assert written["provenance"]["settings"]
    if name in ("overhead", "steps", "memory", "compaction", "invariance"):  # counted, not timed
        assert report.targets
        assert not [target.sentence() for target in report.targets if not target.met]


def test_without_torchdeq_the_rest_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    for name in ("overhead", "steps", "memory", "onestep", "compaction", "invariance"):
        report = BENCHMARKS[name].run(BENCHMARKS[name].quick)
        assert libraries.ABSENT in report.notes
        assert "TorchDEQ" not in {row.get("library", row.get("method")) for row in report.rows}
        assert report.rows or name == "onestep"


def test_calls_are_counted_without_those_of_the_map() -> None:
    z, out = torch.ones(4, 3), torch.empty(4, 3)
    calls = Calls(z.numel())
    T = calls.without(lambda x: x.exp().sin())
    with calls:
        row = z.sum(1)  # a kernel, too small to count as an allocation
        y = T(z) * 2  # the map's own two are left out
        torch.add(y, z, out=out)  # writes into what exists
        y.view(12).add_(1)  # a view is no kernel
        row.cpu()
        row.numpy()
        bool(row[0] > 0)
        torch.linalg.solve(torch.eye(2), torch.ones(2))
    assert calls.kernels["aten.exp.default"] == 0
    assert calls.kernels["aten.mul.Tensor"] == 1
    assert calls.kernels["aten.view.default"] == 0
    assert calls.totals()[1:] == (1, 4)
    syncs = {row["method"]: row["syncs"] for row in quick("overhead").rows if row["library"] == "banach"}
    assert {name for name, count in syncs.items() if count} == {name for name in syncs if "checked" in name}
    assert host_syncs(lambda: [float(torch.ones(1)) for _ in range(3)], CPU) == 3


def test_bytes_alive_follow_the_tensors_and_the_graph() -> None:
    w = torch.ones(1000, requires_grad=True)
    with LiveBytes() as live:
        a = w * 2  # 4000 bytes
        view = a.view(10, 100)
        assert live.now == 4000
        b = a.exp()  # autograd stores the value of exp
        del a, view
        assert live.now == 4000
        b = b.sum()
        assert live.now == 4004
        b.backward()
        assert live.peak >= 4000 + 4 + 4000  # exp's value and its gradient
        del b
        assert live.now == 4000  # w.grad
        w.grad = None
        assert live.now == 0


def test_unrolling_stores_what_the_layers_hold_and_a_checkpoint_one_latent() -> None:
    """R is a relu of four latents and a tanh of one: five per step, in exact bytes."""
    peak = {(row["mode"], row["depth"]): row["peak MB"] * 2**20 for row in quick("memory").rows}
    latent = 8 * 16 * 4
    assert peak["Unroll", 20] - peak["Unroll", 10] == pytest.approx(10 * 5 * latent)
    assert peak["Unroll, checkpointed", 20] - peak["Unroll, checkpointed", 10] == pytest.approx(10 * latent)
    assert peak["JFB", 60] == peak["JFB", 10]


def test_maps_take_the_steps_that_mathematics_says() -> None:
    """Powers of a symmetric matrix; rate^(k-1) |b| for a rate times an orthogonal map; no gain on a rotation."""
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
    assert seen.first_below(1e-5).tolist() == expected == found.steps.tolist()
    assert seen.rows == 3 * seen.evaluations

    problem = maps.rates(20, 32, (0.2, 0.95))
    rate, b = (part.double() for part in problem.inputs)
    exact = 1 + torch.log(1e-4 / b.square().mean(1).sqrt()) / torch.log(rate[:, 0])
    needed = solving.needed_steps(problem)
    assert (needed >= exact - 0.01).all()
    assert (needed <= exact + 1.01).all()

    rows = quick("steps").rows
    gained = {(row["map"], row["library"], row["method"]): row["against Picard"] for row in rows}
    assert 0.85 < gained["rotation, 48 angles", "banach", "Anderson(5)"] < 1.05
    assert gained["rotation, 2 angles", "banach", "Anderson(5)"] < 0.1


NORM = Euclidean()
EXACT = {"f_tol": 1e-11, "f_max_iter": 400}
TIGHT: dict[str, Any] = {"tolerance": Tolerance(atol=1e-11, max_steps=400, norm=NORM)}
# What docs/migration.md says is the same: options of get_deq, solver_kwargs, ours.
MIGRATED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {"tolerance": Tolerance(atol=1e-3, max_steps=40, norm=NORM)}),
    ({"f_stop_mode": "rel"}, {}, {"tolerance": Tolerance(atol=0, rtol=1e-3, max_steps=40)}),
    ({}, {"tau": 0.6}, {"solver": Picard(0.4), "tolerance": Tolerance(atol=1e-3 / 0.6, max_steps=40, norm=NORM)}),
    ({**EXACT, "f_solver": "anderson"}, {"m": 4}, {"solver": Anderson(3), **TIGHT}),
    ({**EXACT, "f_solver": "broyden"}, {"LBFGS_thres": 8}, {"solver": Broyden(8), **TIGHT}),
    ({"grad": 5, "tau": 0.5}, {}, {"backward": Unroll(5, 0.5), "tolerance": Tolerance(atol=1e-3, norm=NORM)}),
    (
        {**EXACT, "ift": True, "b_max_iter": 400, "b_tol": 1e-11},
        {},
        {"backward": Implicit(Picard(), *TIGHT.values()), **TIGHT},
    ),
]


@needs_torchdeq
@pytest.mark.parametrize(("theirs", "solver", "ours"), MIGRATED, ids=str)
def test_the_options_of_the_migration_page_give_equal_numbers(
    theirs: dict[str, Any], solver: dict[str, Any], ours: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    W, v = torch.randn(16, 16, dtype=torch.float64) / 8, torch.randn(1, 16, dtype=torch.float64)
    W.requires_grad_()
    z0, T = torch.zeros_like(v), lambda z: torch.tanh(z @ W + v)
    ours = {"tolerance": Tolerance(atol=1e-3, max_steps=40, norm=NORM), **ours}
    values = torchdeq.get_deq(**theirs)(T, z0, solver_kwargs=solver)[0][-1], fixed_point(T, z0, **ours)
    torch.testing.assert_close(*values, rtol=0, atol=1e-9)
    gradients = [torch.autograd.grad(value.square().sum(), W) for value in values]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


@needs_torchdeq
def test_both_libraries_are_measured_on_equal_terms() -> None:
    """The same step, depth and RMS tolerance, and a batch that changes TorchDEQ's answers alone."""
    for method, rms, depth, atol in (("picard", 0.0, 15, 1e-6), ("anderson", 1e-5, 200, 1e-4)):
        problem = maps.dense(4, 16)
        steps = onestep.training_steps(problem, method, rms, depth)
        ours, theirs = (steps[name](problem.T)[0] for name in ("banach", "TorchDEQ"))
        assert ours.abs().max() > 1e-3
        assert torch.allclose(ours, theirs, atol=atol)
    rows = [row for row in quick("onestep").rows if row["tol"] == "never"]
    depth = BENCHMARKS["onestep"].quick.depth + 1
    assert {row["T evals"] for row in rows} == {f"{depth} / {depth}"}
    problem = maps.linear(3, 64)
    seen = {name: maps.Recorder(problem.T) for name in ("banach", "TorchDEQ")}
    for library, recorder in seen.items():
        solver = libraries.Method(library, "Picard", "picard")
        solver(recorder, problem.z0, problem.inputs, rms=1e-3, max_steps=500)
    assert seen["banach"].evaluations == seen["TorchDEQ"].evaluations
    found = quick("invariance").rows
    difference = {(row["dtype"], row["method"]): row["difference"] for row in found}
    assert difference["float64", "fixed_point_iter"] > 1e-7
    assert difference["float64", "Picard"] < 1e-13


def test_actions_run_in_turn_and_figures_summarise_them() -> None:
    order: list[str] = []
    seconds = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, warm_up=1)
    assert "".join(order) == "abbaabba"
    assert [len(times) for times in seconds.values()] == [3, 3]
    assert ratio([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]).median == 2.0
    assert Figure.of([1.0, 3.0]) == Figure(2.0, 2**0.5, 2, 2.0, 1.0, 3.0)
    assert Figure.of([4.0]).spread is None
    cases = [(1.0, False, True), (1.1, False, False), (1.1, True, True), (math.nan, False, False)]
    for measured, at_least, met in (*cases, (math.nan, True, False)):
        assert Target("x", measured, 1.0, at_least).met is met


def test_the_command_writes_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # of this process, for the other tests too
    assert main(["cpu", "overhead", "--quick", "--out", str(tmp_path)]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["overhead.json"]
    assert "targets missed: 0" in capsys.readouterr().out
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f" {name} " in listed for name in BENCHMARKS)
    wrong = {
        "no-such-thing": "no benchmark is called no-such-thing",
        "gpu overhead": "no benchmark is called overhead",
        "memory --device cuda:99": "got cuda:99",
        "memory --data-dir /no/such": "expected a folder as --data-dir, got /no/such",
    }
    for line, words in (
        wrong if torch.cuda.is_available() else wrong | {"training-step": "needs a CUDA GPU"}
    ).items():
        with pytest.raises(SystemExit):
            main(line.split())
        assert words in capsys.readouterr().err


def test_new_figures_are_shown_next_to_those_before(tmp_path: Path) -> None:
    """Worse by more than 3%, in the direction of the target; a count that was 0 has no ratio."""
    one, report = BENCHMARKS["overhead"], quick("overhead")
    found = earlier(one.write(report, one.quick, tmp_path))
    assert found == {target.what: target.measured for target in report.targets}
    assert earlier(tmp_path / "no.json") == {}
    one.show(report, {report.targets[0].what: 0.5}, file := io.StringIO())
    assert "; before: 0.5, worse" in file.getvalue()
    cases = [(1.02, 1.0, False), (1.04, 1.0, True), (0.0, 0.0, False), (1.0, 0.0, True)]
    assert [Target("x", new, 1.0).is_worse(old) for new, old, _ in cases] == [worse for *_, worse in cases]
    assert Target("x", 90.0, 80.0, at_least=True).is_worse(98.0)
