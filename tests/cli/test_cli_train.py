"""`banach train` and `banach evaluate`, from the command line to the files."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from banach import Status, Tolerance, data, models, solve, train
from banach.cli import app
from banach.cli import train as command_line
from banach.cli.app import main
from banach.cli.console import spoken_warnings
from banach.cli.shared import open_run
from banach.solve.warning import warn_unconverged
from banach.train import Run
from banach.train.run import lock
from banach.train.state import described
from cli.conftest import SMALL, refused
from train.parts_train import STATE


def same(a: str, b: str) -> bool:
    """Return True if the newest checkpoints of two runs are equal, bit by bit."""
    checkpoints: list[Any] = [Run.open(path).latest() for path in (a, b)]
    first, second = checkpoints
    names = first.tensors.keys()
    return names == second.tensors.keys() and all(torch.equal(first.tensors[n], second.tensors[n]) for n in names)


def record_of(path: str) -> Any:
    return Run.open(path).test()


def test_a_run_has_all_its_files_and_ends_with_a_table_and_a_plot(capsys: Any) -> None:
    pytest.importorskip("tensorboard")
    assert main([*SMALL, "--tensorboard", "--monitor", "--epochs", "2"]) == 0
    names = {"settings.json", "environment.json", "metrics.jsonl", "checkpoints", "test.json", "tensorboard"}
    assert names <= {path.name for path in Path("runs/digits-1").iterdir()}
    assert Path("runs/digits-1/training.png").read_bytes()[:4] == b"\x89PNG"
    out = capsys.readouterr().out
    for said in ("training step on cpu, fp32: eager", "test accuracy", "plot: runs/digits-1/training.png"):
        assert said in out
    assert len(Run.open("runs/digits-1").metrics()) == 2
    assert record_of("runs/digits-1")["count"] == 360
    assert {"device", "versions", "commit", "settings", "date"} <= record_of("runs/digits-1").keys()


def test_the_test_figure_is_that_of_the_final_weights_and_runs_are_numbered() -> None:
    for _ in range(2):
        assert main([*SMALL, "--epochs", "1", "--ema", "0.5"]) == 0
    opened, images = open_run(Path("runs/digits-2"), "cpu"), data.load("digits", "test")
    with torch.no_grad():
        hits = (opened.net(images.normalise(images.pixels)).argmax(1) == images.labels).double().mean()
    assert record_of("runs/digits-2")["totals"]["accuracy"] == pytest.approx(float(hits))


def test_with_whole_nothing_is_validated(capsys: Any) -> None:
    whole = data.load("digits", "train+validation")
    assert main(["train", "--whole", *SMALL[3:], "--epochs", "1"]) == 0
    out = capsys.readouterr().out
    assert f"on {len(whole):,} images" in out
    assert "validation accuracy" not in out
    assert Run.open("runs/digits-1").metrics()[0].validation_accuracy is None
    assert main(["evaluate", "runs/digits-1", "--split", "train"]) == 0
    assert f"{len(whole):,}" in capsys.readouterr().out
    refused(["evaluate", "runs/digits-1", "--split", "validation"], capsys, "trained on the validation images too")
    assert main(["diagnose", "runs/digits-1", "--samples", "4"]) == 0
    assert "4 training images" in " ".join(capsys.readouterr().out.split())


def test_one_training_image() -> None:
    """A traceback: the first batch was one of two images."""
    assert main(["train", "--subset", "1", *SMALL[3:], "--epochs", "1"]) == 0


def test_the_test_set_is_read_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    load = data.load

    def noted(name: str, split: str = "train", *rest: Any, **options: Any) -> Any:
        read.append(split)
        return load(name, split, *rest, **options)

    monkeypatch.setattr(data, "load", noted)
    assert main([*SMALL, "--epochs", "1"]) == 0
    assert read == ["train", "validation", "test"]
    assert main(["train", "--resume", "runs/digits-1"]) == 0
    assert read[3:] == ["train", "validation"]


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(app.__file__).parents[2])}
    command = [sys.executable, "-m", "banach", *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_resumes_bit_by_bit(here: Path, how: signal.Signals) -> None:
    command = ["train", "--subset", "128", "--batch-size", "8", "--no-tensorboard", "--no-monitor"]
    command += ["--epochs", "2", "--checkpoint-every", "5", "--ema", "0.9", "--device", "cpu"]
    stopped = start(*command, "--out", "my run")
    deadline = time.monotonic() + 60
    while not list(here.glob("my run/checkpoints/epoch-*")):
        assert stopped.poll() is None
        assert time.monotonic() < deadline, "no checkpoint in a minute"
        time.sleep(0.01)
    stopped.send_signal(how)
    out = stopped.communicate(timeout=60)[0]
    if how != signal.SIGKILL:
        assert stopped.returncode == 128 + how
        assert "resume with: banach train --resume 'my run'" in out
    assert main([*command, "--out", "whole"]) == 0
    assert main(["train", "--resume", "my run"]) == 0
    assert same("whole", "my run")
    assert record_of("whole")["totals"] == record_of("my run")["totals"]


def test_a_closed_pipe_does_not_stop_the_training() -> None:
    made = start(*SMALL, "--epochs", "3", "--out", "run", stderr=subprocess.DEVNULL)
    assert made.stdout is not None
    made.stdout.readline()
    made.stdout.close()
    assert made.wait(timeout=120) == 0
    assert Path("run/test.json").exists()


def test_a_second_process_on_a_run_is_refused_and_changes_nothing(run: Path, capsys: Any) -> None:
    before = sorted(Path("run").rglob("*"))
    with lock(run):
        refused(["train", "--resume", "run"], capsys, "another process is training run")
        refused([*SMALL, "--out", "run"], capsys, "there is a run in run already")
    assert sorted(Path("run").rglob("*")) == before


def test_files_of_a_killed_start_do_not_block_the_directory() -> None:
    Path("run").mkdir()
    for name in (".settings.json.abc", ".environment.json.x", "environment.json"):
        Path("run", name).write_text("{")
    assert main([*SMALL, "--epochs", "0", "--out", "run"]) == 0
    assert main(["evaluate", "run", "--device", "cpu"]) == 0  # a run without epochs has its weights
    assert json.loads(Path("run/evaluation-test.json").read_text())["totals"] == record_of("run")["totals"]


def test_evaluate_at_other_tolerances_on_another_split(capsys: Any) -> None:
    """An eps is solved to, also where the run was trained to a relative tolerance."""
    assert main([*SMALL, "--epochs", "1", "--rtol", "0.1", "--out", "run"]) == 0
    tight = ["--eps", "1e-6", "--max-steps", "200", "--solver", "anderson:4", "--norm", "euclidean"]
    found = []
    for more in ([], ["--eps", "1e-6", "--rtol", "0.1"], tight):
        assert main(["evaluate", "run", "--split", "validation", *more]) == 0
        found.append(json.loads(Path("run/evaluation-validation.json").read_text()))
    trained, same_rtol, last = (one["totals"]["max_residual"] for one in found)
    assert last <= 1e-6 < 1e-4 < trained
    assert same_rtol == pytest.approx(trained, rel=1e-2)
    assert (found[2]["totals"]["converged"], found[2]["count"]) == (1, 180)
    assert (found[2]["settings"]["eps"], found[2]["settings"]["solver"]) == (1e-6, "anderson:4")
    assert "validation accuracy" in capsys.readouterr().out


def test_evaluate_says_that_a_run_is_not_finished_and_knows_explicit_models(capsys: Any) -> None:
    settings = train.Settings.choose({"model": "resnet56", "epochs": 1, "device": "cpu"})
    net, run = settings.build(), Run.create("explicit", settings)
    state = {**STATE, "step": 1, "identity": described(net, settings)}
    run.save(train.Position(0, 1), {f"net.{name}": value for name, value in net.state_dict().items()}, state)
    refused(["evaluate", "explicit", "--eps", "1e-3"], capsys, "resnet56 has no fixed point; leave out --eps")
    assert main(["evaluate", "explicit"]) == 0
    assert "the run is not finished (0 of 1 epochs)" in capsys.readouterr().out


def test_results_are_shown_even_if_they_cannot_be_written(run: Path, capsys: Any, monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device", "/somewhere/.evaluation-test.json.abc")

    monkeypatch.setattr("secrets.token_hex", full)
    for command, shown in (("evaluate", "test accuracy"), ("diagnose", "sigma")):
        assert main([command, "run"]) == 2
        said = capsys.readouterr()
        assert shown in said.out
        assert "run/" in said.err  # not the name of a temporary file
        assert ".abc" not in said.err


def test_a_warning_is_one_line_once_a_command(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own filter would show it again whenever other code changes the filters."""
    said = (
        "warning: the fixed point was not found for all samples: stopped at max_steps above the tolerance; "
        "try more --max-steps, a larger --eps or another --solver\n"
    )
    few = "warning: in epoch 1 only 0.0% of the samples converged; try more max_steps or a larger tolerance\n"
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for command in ([*SMALL, "--epochs", "3", "--max-steps", "2"], ["evaluate", "runs/digits-1"]):
            assert main(command) == 0
            assert capsys.readouterr().err == said + (few if "--epochs" in command else "")

    def complain(*_: Any) -> None:
        warnings.warn("the sky\nis low", RuntimeWarning, stacklevel=1)

    monkeypatch.setattr(command_line, "finish", complain)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main([*SMALL, "--epochs", "0"]) == 0
    assert capsys.readouterr().err == "warning: the sky is low\n"


@pytest.mark.parametrize("status", list(Status)[1:], ids=lambda status: status.name)
def test_advice_follows_the_cause(status: Status, capsys: Any) -> None:
    """More steps were the advice for solves that rounding had stopped, and for NaN in the data."""
    advice = {
        Status.MAX_STEPS: "more --max-steps",
        Status.STALLED: "--precision fp32",
        Status.NONFINITE: "look for NaN in the data",
    }
    Q = torch.zeros(2, 3)
    found = solve(torch.cos, Q, tolerance=Tolerance(max_steps=1)).changed(failures=frozenset([status]))
    with spoken_warnings():
        warnings.simplefilter("always")
        warn_unconverged(found, torch.cos, (), coupled=False, owner=torch.cos)
    said = capsys.readouterr().err
    assert status.value in said
    assert [one for one, words in advice.items() if words in said] == [status]
    assert "Solution" not in said


def test_a_run_of_the_library_is_evaluated_by_the_command_if_it_names_its_parts(capsys: Any) -> None:
    """Its settings name no solver: those of the network are meant, as docs/training.md has it."""
    settings = train.Settings.of_recipe(
        models.recipe("digits"), data="digits", model="digits", epochs=1, subset=64, monitor=False, device="cpu"
    )
    assert settings.solver is None
    images, run = data.load("digits", "train").subset(64), train.Run.create("runs/mine", settings)
    train.fit(models.build("digits"), images, data.load("digits", "validation"), settings, run=run)
    for command in ("evaluate", "diagnose"):
        assert main([command, "runs/mine", "--device", "cpu"]) == 0
    for made, said in (
        (train.Settings(epochs=1), "was made from Python"),
        (settings, "has no checkpoint yet; train"),
    ):
        Run.create(said, made)
        refused(["evaluate", said], capsys, said)
    refused(["train", "--resume", "was made from Python"], capsys, "does not name its data and model")


def test_flags_reach_the_run_and_must_agree_on_resume(capsys: Any) -> None:
    penalties = ["--jacobian-penalty", "0.5", "--correction", "0.3", "--correction-steps", "1,3"]
    assert main([*SMALL, *penalties, "--finite-difference", "--epochs", "1", "--out", "run"]) == 0
    made = Run.open("run").settings
    assert (made.jacobian_penalty, made.correction, made.correction_steps) == (0.5, 0.3, (1, 3))
    assert (made.finite_difference, made.monitor, made.batch_size) == (True, False, 16)
    assert main(["train", "--resume", "run", "--correction-steps", "1,3", "--keep", "1"]) == 0
    refused(
        ["train", "--resume", "run", "--correction-steps", "1,4"],
        capsys,
        "was started with correction_steps=[1, 3], got [1, 4]",
    )
