"""What a demanding user tries first: two processes on one run, wild numbers, damaged files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from banach import data
from banach.cli import app
from banach.cli.app import main
from banach.train import Run, Settings
from banach.train.run import lock

SMALL = ["train", "--subset", "64", "--batch-size", "16", "--no-tensorboard", "--no-monitor", "--device", "cpu"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(arguments: list[str], capsys: Any, *words: str) -> None:
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for word in words:
        assert word in said


def test_a_second_process_on_a_run_is_refused(capsys: Any) -> None:
    assert main([*SMALL, "--epochs", "1", "--out", "run"]) == 0
    before = sorted(path.name for path in Path("run/checkpoints").iterdir())
    with lock(Path("run")):
        refused(["train", "--resume", "run"], capsys, "another process is training run")
        refused([*SMALL, "--out", "run"], capsys, "there is a run in run already")
        assert not list(Path("run").rglob("events.out*"))  # TensorBoard's files are those of the other process
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == before
    assert main(["train", "--resume", "run"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", str(2**70)], "seed must be a whole number, at least 0 and at most"),
        (["--threads", "1000000"], "threads must be a whole number, at least 1 and at most 1024"),
        (["--lr", "1e300"], "lr must be a number, at least 0 and at most 1e+30"),
        (["--backward", "implicit:cg:0"], "must be between 0 and 1"),
        (["--schedule", "steps:5:nan"], "factor must be a number"),
        (["--schedule", "steps:5:-1"], "factor must be a number"),
        (["--schedule", "steps:9,5:0.1"], "ascending order"),
        (["--schedule", "one-cycle:3"], "'one-cycle:3' is not understood"),
    ],
)
def test_wild_numbers_are_refused_before_anything_is_made(arguments: list[str], said: str, capsys: Any) -> None:
    refused([*SMALL, *arguments], capsys, said)
    assert not Path("runs").exists()


def test_an_eps_that_is_asked_for_is_solved_to(capsys: Any) -> None:
    """Also where the run was trained to a relative tolerance."""
    assert main([*SMALL, "--epochs", "1", "--rtol", "0.1", "--out", "run"]) == 0
    residuals = []
    for more in ([], ["--eps", "1e-6"], ["--eps", "1e-6", "--rtol", "0.1"]):
        assert main(["evaluate", "run", *more]) == 0
        residuals.append(json.loads(Path("run/evaluation-test.json").read_text())["totals"]["max_residual"])
    assert residuals[1] <= 1e-6 < 1e-4 < residuals[0]
    assert residuals[2] == pytest.approx(residuals[0], rel=1e-2)


def test_what_a_killed_beginning_left_is_in_nobodys_way() -> None:
    Path("run").mkdir()
    for name in (".settings.json.abc", ".environment.json.x", "environment.json"):
        Path("run", name).write_text("{")
    assert main([*SMALL, "--epochs", "1", "--out", "run"]) == 0


@pytest.mark.parametrize(
    "text",
    [
        "lr = 1" + 400 * "0",
        'schedule = {kind="steps", at=["a"], factor=0.1}',
        'schedule = {kind="steps", at=3, factor=0.1}',
        'schedule = {kind="one-cycle", warm="x"}',
        "label-smoothing = 0.1\nlabel_smoothing = 0.2",
    ],
)
def test_bad_tables_are_refused_before_anything_is_made(text: str, capsys: Any) -> None:
    Path("bad.toml").write_text(text)
    refused([*SMALL, "--config", "bad.toml"], capsys)
    assert not Path("runs").exists()


@pytest.mark.parametrize("content", ['{"totals": {"accuracy": 0.5}}', "[]"])
def test_a_damaged_test_file_is_named(content: str, capsys: Any) -> None:
    assert main([*SMALL, "--epochs", "0", "--out", "run"]) == 0
    Path("run/test.json").write_text(content)
    refused(["train", "--resume", "run"], capsys, "test.json cannot be read")


def test_changed_settings_are_not_gone_on_with(capsys: Any) -> None:
    assert main([*SMALL, "--epochs", "1", "--out", "run"]) == 0
    path = Path("run/settings.json")
    path.write_text(path.read_text().replace('"epochs": 1', '"epochs": 2'))
    refused(["train", "--resume", "run"], capsys, "started with setting epochs=1, got 2")


def test_a_run_of_no_epochs_has_its_weights() -> None:
    assert main([*SMALL, "--epochs", "0", "--out", "run"]) == 0
    assert main(["evaluate", "run", "--device", "cpu"]) == 0
    kept = Run.open("run").test()
    assert kept is not None
    assert json.loads(Path("run/evaluation-test.json").read_text())["totals"] == kept["totals"]


def test_what_python_made_is_not_opened_here(capsys: Any) -> None:
    Run.create("mine", Settings(epochs=1))
    refused(["evaluate", "mine"], capsys, "was made from Python")


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    source = str(Path(app.__file__).parents[2])
    command = [sys.executable, "-m", "banach", *arguments]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": source}, text=True, **options)


def test_no_one_reading_does_not_stop_the_training() -> None:
    made = start(*SMALL, "--epochs", "3", "--out", "run", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert made.stdout is not None
    made.stdout.readline()
    made.stdout.close()
    assert made.wait(timeout=120) == 0
    assert Path("run/test.json").exists()


def test_a_pipe_in_the_place_of_data_is_not_waited_for(capsys: Any) -> None:
    Path("data/mnist").mkdir(parents=True)
    os.mkfifo("data/mnist/train-images-idx3-ubyte")
    refused(["train", "--data", "mnist", "--data-dir", "data"], capsys, "mnist")


def test_what_was_measured_is_shown_even_where_it_cannot_be_written(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*SMALL, "--epochs", "1", "--out", "mine"]) == 0

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device", "/somewhere/.evaluation-test.json.abc")

    monkeypatch.setattr("tempfile.mkstemp", full)
    for command, shown in (("evaluate", "test accuracy"), ("diagnose", "sigma")):
        capsys.readouterr()
        assert main([command, "mine"]) == 2
        said = capsys.readouterr()
        assert shown in said.out
        assert "mine/" in said.err  # not the name of a file that no one knows
        assert ".abc" not in said.err


@pytest.mark.parametrize("name", ["settings.json", "metrics.jsonl"])
def test_json_that_is_nested_too_deep_is_damage(name: str, capsys: Any) -> None:
    assert main([*SMALL, "--epochs", "1", "--out", "mine"]) == 0
    (Path("mine") / name).write_text("[" * 100_000)
    command = ["evaluate", "mine"] if name == "settings.json" else ["compare", "mine", "mine"]
    refused(command, capsys, name)


def test_a_seed_beyond_what_torch_takes_is_refused(capsys: Any) -> None:
    assert main([*SMALL, "--epochs", "1", "--out", "mine"]) == 0
    for seed in ("-1", "99999999999999999999999"):
        refused(["diagnose", "mine", "--seed", seed], capsys, "seed")


def test_missing_test_images_are_reported_before_the_training(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mnist").mkdir()
    digits = data.load("digits")
    monkeypatch.setattr(Settings, "load", lambda *_: digits)  # as if those to train with were sound
    monkeypatch.setenv("BANACH_CACHE", str(tmp_path / "no-cache"))
    monkeypatch.delenv("BANACH_DATA", raising=False)
    refused(["train", "--data", "mnist", "--data-dir", "."], capsys, "mnist has no t10k-images-idx3-ubyte; ")
    assert not Path("runs").exists()
