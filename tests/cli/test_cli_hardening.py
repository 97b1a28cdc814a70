"""What a demanding user tries first: two processes on one run, wild numbers, damage that has its checksum."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from banach.cli import app
from banach.cli.app import main
from banach.train import Run
from banach.train.checkpoint import _canonical, _digest
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
        "eps = 1" + 400 * "0",
        'schedule = {kind="steps", at=["a"], factor=0.1}',
        'schedule = {kind="steps", at=3, factor=0.1}',
        'schedule = {kind="one-cycle", end="x"}',
        'schedule = {kind="one-cycle", warm="x"}',
        "label-smoothing = 0.1\nlabel_smoothing = 0.2",
    ],
)
def test_bad_tables_are_refused_before_anything_is_made(text: str, capsys: Any) -> None:
    Path("bad.toml").write_text(text)
    refused([*SMALL, "--config", "bad.toml"], capsys)
    assert not Path("runs").exists()


@pytest.mark.filterwarnings("default")
def test_damage_that_has_its_checksum_is_still_damage(capsys: Any) -> None:
    assert main([*SMALL, "--epochs", "1", "--out", "run"]) == 0
    for path in Path("run/checkpoints").glob("*/state.json"):
        content = json.loads(path.read_text())
        content["state"] = {"epoch": 1}
        content["sha256"] = _digest(_canonical(content["state"]))
        path.write_text(json.dumps(content))
    capsys.readouterr()
    for command in (["evaluate", "run"], ["train", "--resume", "run"]):
        assert main(command) == 2
        assert "state.json has no step" in capsys.readouterr().err


NULL = {"accuracy": None, "loss": 1, "depth": None, "max_depth": None, "residual": None, "max_residual": None}
DAMAGED = (
    '{"totals": {"accuracy": 0.5}}',
    '{"totals": {"accuracy": "x"}}',
    "[]",
    json.dumps({"title": "", "count": 1, "totals": NULL | {"converged": None}}),
)


@pytest.mark.parametrize("content", DAMAGED)
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
    from banach.train import Settings

    Run.create("mine", Settings(epochs=1))
    refused(["evaluate", "mine"], capsys, "was made from Python")


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    source = str(Path(app.__file__).parents[2])
    command = [sys.executable, "-m", "banach", *arguments]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": source}, text=True, **options)


def test_the_advice_after_a_stop_can_be_typed() -> None:
    made = start(*SMALL, "--epochs", "500", "--out", "my run", stdout=subprocess.PIPE)
    while not Path("my run/checkpoints").exists():
        assert made.poll() is None
        time.sleep(0.02)
    made.send_signal(signal.SIGTERM)
    assert "resume with: banach train --resume 'my run'" in made.communicate(timeout=60)[0]


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


def test_a_refused_resume_leaves_the_record_of_the_run_that_goes_on(capsys: Any) -> None:
    pytest.importorskip("tensorboard")
    assert main([*SMALL, "--epochs", "1", "--out", "mine"]) == 0
    with lock(Path("mine")):
        refused(["train", "--resume", "mine"], capsys, "another process is training")
    assert not list(Path("mine").rglob("events.out*"))


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


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_misspelt_folder_of_data_is_refused(command: str, capsys: Any) -> None:
    refused(
        ["data", command, "--data-dir", "/no/such/folder"],
        capsys,
        "the data folder /no/such/folder is not a folder",
    )


def test_a_seed_beyond_what_torch_takes_is_refused(capsys: Any) -> None:
    assert main([*SMALL, "--epochs", "1", "--out", "mine"]) == 0
    for seed in ("-1", "99999999999999999999999"):
        refused(["diagnose", "mine", "--seed", seed], capsys, "seed")
