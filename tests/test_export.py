"""Exported networks: the files give the answers and step counts of the network, and run without banach."""

import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import banach
from banach import Anderson, ImplicitNetwork, Picard, Tolerance
from banach.cli.app import main
from banach.cli.shared import open_run
from banach.data import DIGITS
from banach.export import OUTPUTS, export
from banach.provenance import provenance, source_commit, write_json
from banach.train import words
from data.conftest import real_data  # noqa: F401
from train.parts_train import Contraction

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "results" / "export.json"
SMALL = ["train", "--batch-size", "16", "--no-tensorboard", "--no-monitor", "--device", "cpu"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 256 digits."""
    run = tmp_path_factory.mktemp("export") / "run"
    assert main([*SMALL, "--subset", "256", "--epochs", "2", "--out", str(run)]) == 0
    return run


def answers(path: Path, images: Tensor, batch: int) -> list[Tensor]:
    """Return the outputs of an ONNX file, batch by batch, on one thread: its idle threads spin."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    parts = [session.run(None, {"d": part.numpy()}) for part in images.split(batch)]
    return [torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True)]


@torch.no_grad()
def compare(run: Path, solver: str, path: Path, images: Tensor, batch: int) -> dict[str, Any]:
    """Compare an ONNX file with the network of a run, batch by batch: labels, steps, logits."""
    net: Any = open_run(run, "cpu").net
    net.solver = words.solver(solver)
    parts = [net(part, solution=True) for part in images.split(batch)]
    logits = torch.cat([output for output, _ in parts])
    steps = torch.cat([found.steps for _, found in parts])
    output, counted, _, converged = answers(path, images, batch)
    same, apart = counted == steps, (output - logits).abs().amax(1)
    return {
        "solver": solver,
        "batch": batch,
        "images": len(images),
        "same_labels": int((output.argmax(1) == logits.argmax(1)).sum()),
        "same_steps": int(same.sum()),
        "same_converged": int((converged == torch.cat([found.converged for _, found in parts])).sum()),
        "largest_difference_of_steps": int((counted - steps).abs().max()),
        "largest_difference_of_logits": float(apart.max()),
        "the_same_where_steps_are_equal": float(apart[same].max()),
        "least_steps": int(steps.min()),
        "most_steps": int(steps.max()),
    }


def check(found: dict[str, Any]) -> None:
    """Steps may differ by one where a residual is within rounding of the tolerance, and logits with them."""
    assert found["same_labels"] == found["same_converged"] == found["images"], found
    assert found["same_steps"] >= 0.999 * found["images"], found
    assert found["largest_difference_of_steps"] <= 1, found
    assert found["the_same_where_steps_are_equal"] <= 1e-4, found
    assert found["least_steps"] < found["most_steps"], found  # images stop at different steps


def images_of(run: Path, folder: Path | None = None) -> Tensor:
    images = open_run(run, "cpu").settings.load("test", folder)
    return images.normalise(images.pixels)


@pytest.mark.parametrize("solver", ["picard", "anderson:1"])
def test_onnx_equals_the_network_on_digits(solver: str, digits: Path, tmp_path: Path, capsys: Any) -> None:
    """Anderson with a memory of 1 could not be traced: its loop returned its own input."""
    path = tmp_path / "model.onnx"
    assert main(["export", str(digits), "--solver", solver, "--out", str(path)]) == 0
    out, err = capsys.readouterr()
    assert str(path) in out
    assert err == ""
    for batch in (512, 1):
        check(compare(digits, solver, path, images_of(digits), batch))


@pytest.mark.slow
def test_onnx_equals_the_network_on_mnist(tmp_path: Path, real_data: Any) -> None:  # noqa: F811
    """All test images, one by one and by 512. `make test-slow` keeps the figures in results/export.json."""
    source_commit()  # before the file is written, which makes the tree dirty
    run, path, folder = tmp_path / "run", tmp_path / "model.onnx", real_data("mnist")
    flags = ["--data", "mnist", "--data-dir", str(folder), "--subset", "2000", "--epochs", "1", "--out", str(run)]
    assert main([*SMALL, *flags]) == 0
    found = []
    for solver in ("picard", "anderson"):
        assert main(["export", str(run), "--solver", solver, "--out", str(path)]) == 0
        for batch in (512, 1):
            found.append(compare(run, solver, path, images_of(run, folder), batch))
            check(found[-1])
            print(found[-1])  # a minute each
    opened = open_run(run, "cpu")
    accuracy = json.loads((run / "test.json").read_text())["totals"]["accuracy"]
    content = {"found": found, "test_accuracy": accuracy, **provenance(opened.settings)}
    write_json(written_to(tmp_path), content)


def written_to(scratch: Path) -> Path:
    """Return where figures go: into results/ only on request, as by `make test-slow`."""
    return FIGURES if os.environ.get("WRITE_RESULTS") else scratch / FIGURES.name


def test_a_committed_result_is_written_on_request_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever MNIST was on the disk, the figures changed, and the test below failed in the same run."""
    monkeypatch.delenv("WRITE_RESULTS", raising=False)
    assert written_to(tmp_path) == tmp_path / "export.json"
    makefile = (ROOT / "Makefile").read_text()
    assert "\ntest-slow: setup\n\tWRITE_RESULTS=1 $(BIN)/python -m pytest" in makefile
    monkeypatch.setenv("WRITE_RESULTS", "1")
    assert written_to(tmp_path) == FIGURES


def test_the_page_quotes_the_measured_figures() -> None:
    page = (ROOT / "docs" / "export.md").read_text()
    for one in json.loads(FIGURES.read_text())["found"]:
        counts = f"{one['same_labels']:,} | {one['same_steps']:,} | {one['largest_difference_of_logits']:.1e}"
        assert f"| {one['solver']} | {one['batch']} | {counts} |\n" in page


def test_the_torch_file_runs_without_banach_and_the_card_describes_it(digits: Path, tmp_path: Path) -> None:
    assert main(["export", str(digits), "--format", "torch"]) == 0
    path, images = digits / "model.pt2", images_of(digits)[:5]
    card = json.loads((digits / "model.pt2.json").read_text())
    torch.save(images, tmp_path / "images.pt")
    code = f"""
import os, sys, torch
os.chdir({str(digits)!r})
for count in (1, 5):
    d = torch.load({str(tmp_path / "images.pt")!r})[:count]
    {card["load"]}
torch.save(outputs, {str(tmp_path / "outputs.pt")!r})
assert not any(name.startswith("banach") for name in sys.modules)"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=kept, check=True, timeout=120)
    net: Any = open_run(digits, "cpu").net
    output, found = net(images, solution=True)
    expected = (output, found.steps, found.residual, found.converged)
    torch.testing.assert_close([*torch.load(tmp_path / "outputs.pt")], [*expected])
    assert card["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert card["inputs"] == {"d": {"shape": ["batch", 1, 8, 8], "dtype": "torch.float32"}}
    assert list(card["outputs"]) == list(OUTPUTS)
    assert (card["model"], card["weights"]["epochs"]) == ("digits", 2)
    assert (card["solver"], card["tolerance"]) == (repr(net.solver), repr(net.tolerance))
    assert card["normalisation"] == "(pixels / 255 - mean) / std"
    assert (card["mean"], card["std"]) == (list(DIGITS.mean), list(DIGITS.std))
    assert {"commit", "versions", "date"} <= set(card["exported"])


class Scaled(nn.Module):
    """R(u, v) = v u + 1, entry by entry: u* = 1 / (1 - v)."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return v * u + 1


def scaled(solver: banach.Solver) -> ImplicitNetwork:
    tolerance = Tolerance(atol=1e-9, max_steps=101 if solver == Picard() else 41)
    return ImplicitNetwork(nn.Identity(), Scaled(), nn.Identity(), solver=solver, tolerance=tolerance).eval()


# v per sample: 13 steps, more than 41, 2, 30; and an overflow.
SLOPES = [[0.1, 0.2, 0.3, 0.4], [0.5, -0.5, 0.7, 0.9], [0.0] * 4, [0.3, 1.5, 0.2, -0.6], [1e200, 0.1, 0.2, 0.3]]
ROWS = torch.tensor(SLOPES, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore::banach.ConvergenceWarning")
def test_each_sample_stops_where_it_does_in_pytorch(tmp_path: Path) -> None:
    """In float64, against the exact fixed point. The last row overflows, and keeps its best iterate."""
    net, path = scaled(Anderson(memory=2)), tmp_path / "model.onnx"
    export(net, ROWS[:1], path)  # one sample is enough of an example
    for rows in (ROWS, ROWS[3:4], ROWS[:4].repeat(5, 1)):
        value, found = net(rows, solution=True)
        got, steps, residual, converged = answers(path, rows, len(rows))
        assert torch.equal(steps, found.steps)
        assert torch.equal(converged, found.converged)
        torch.testing.assert_close(got, value, rtol=1e-7, atol=0)
        torch.testing.assert_close(residual, found.residual, rtol=1e-5, atol=1e-12)
        exact = (1 / (1 - rows))[converged]
        torch.testing.assert_close(got[converged], exact, rtol=0, atol=1e-8)
        assert converged.any()


class Pair(nn.Module):
    """Q of two inputs."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


def test_several_inputs_and_no_file() -> None:
    net = scaled(Picard())
    net.Q = Pair()
    rows = ROWS[:3]
    program = export(net, (rows, rows), format="torch")  # one tensor given twice was one input
    a, b = ROWS[1:4], torch.full((3, 4), 0.5, dtype=torch.float64)
    torch.testing.assert_close(program.module()(a, b)[0], 1 / (1 - a * b), rtol=0, atol=1e-8)


def test_the_function_and_its_module_share_a_name() -> None:
    assert importlib.import_module("banach.export").export is banach.export is export


def test_refusals_in_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    net, path = scaled(Picard()), tmp_path / "model.onnx"
    with pytest.raises(ValueError, match=r"eval mode, got train mode; call net\.eval\(\)"):
        export(net.train(), ROWS, path)
    net.eval()
    with pytest.raises(ValueError, match="unknown format: 'onx'; did you mean 'onnx'"):
        export(net, ROWS, path, format="onx")
    with pytest.raises(TypeError, match="must be a tensor or a tuple of tensors with a batch axis, got list"):
        export(net, [1.0], path)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(
        ValueError, match=r"needs onnxscript, which is missing; run: pip install 'banach\[export\]'"
    ):
        export(net, ROWS, path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--format", "onx"], "did you mean 'onnx'"),
        (
            ["--out", "settings.json"],
            "expected a file that ends in .onnx, got settings.json; pass --out settings.onnx",
        ),
        (["--solver", "andersen"], "anderson"),
    ],
)
def test_refusals_on_the_command_line(flags: list[str], said: str, digits: Path, capsys: Any) -> None:
    before = sorted(digits.iterdir())
    assert main(["export", str(digits), *flags]) == 2
    assert said in capsys.readouterr().err
    assert sorted(digits.iterdir()) == before


def test_another_module_has_one_output() -> None:
    net, rows = nn.Linear(4, 3).double().eval(), ROWS[:4]
    (output,) = export(net, rows, format="torch").module()(rows[:3])
    torch.testing.assert_close(output, net(rows[:3]))


def test_what_cannot_be_traced_is_refused_in_a_sentence() -> None:
    """A UserError or another internal error of PyTorch was raised."""

    class Fixed(nn.Linear):
        def forward(self, d: Tensor) -> Tensor:
            return super().forward(d) + d.new_zeros(len(d), 1)

    def network(Q: nn.Module) -> ImplicitNetwork:
        return ImplicitNetwork(Q, Contraction(3), nn.Identity()).eval()

    with pytest.raises(ValueError, match=r"cannot export it \(.*batch.*\); replace .* \(len\(x\) by x.shape"):
        export(network(Fixed(4, 3)), torch.randn(3, 4), format="torch")
    net, d = network(nn.Linear(4, 3)), torch.randn(5, 4)
    corrected = export(net, d[:3], format="torch").module()(d)[0]  # PyTorch remembered the batch size
    torch.testing.assert_close(corrected, net(d))
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied"):
        export(net, torch.randn(3, 5), format="torch")
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        export(net, (d, d), format="torch")
