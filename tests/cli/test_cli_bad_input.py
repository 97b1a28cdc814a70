"""Bad input: one sentence and exit code 2, nothing is written, and damaged or hostile files are never run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from banach import data
from banach.cli.app import main
from banach.provenance import digest
from banach.train import Settings
from cli.conftest import refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--epochs", "three"], "epochs must be a whole number, at least 0 and at most 1000000000, got"),
        (["train", "--lr", "fast"], "lr must be a number, at least 0 and at most 1e+30, got 'fast'"),
        (["train", "--data", "nowhere.npz"], "nowhere.npz cannot be read (No such file or directory)"),
        (["train", "--data", "folder:nowhere"], "nowhere is not a folder"),
        (["train", "--data", "no_such_module:mine"], "add --import no_such_module"),
        (["models", "--import", "no_such.py"], "install it, or go to its folder; names have no .py"),
        (["train", "--modle", "digits"], "--model"),
        (["train", "--data", "mnits"], "did you mean 'mnist'"),
        (["train", "--model", "digts"], "did you mean 'digits'"),
        (["train", "--augment", "crop:99999999999"], "pad must be a whole number, at least 0 and at most 256"),
        (["train", "--solver", "anderson:99999999999"], "needs a whole number from 1 to 100"),
        (["train", "--backward", "neumann:99999999999"], "needs a whole number from 0 to 10000"),
        (["train", "--epochs", "1" + "0" * 400], "epochs must be a whole number"),
        (["train", "--subset", "5000"], "at most the 1,257 training images"),
        (["train", "--config", "none.toml"], "none.toml cannot be read"),
        (["train", "--resume", "nowhere"], "no run in nowhere (settings.json: No such file or directory); give"),
        (["train", "--resume", "nowhere", "--out", "there"], "its settings already; leave out --out and --config"),
        (["train", "--resume"], "'--resume' requires an argument"),
        (["train", "--device", "cuda:77"], "there is no cuda:77 here"),
        (["train", "--data", "mnist", "--data-dir", "nowhere"], "nowhere is not a folder"),
        (["data", "list", "--data-dir", "/no/such"], "the data folder /no/such is not a folder"),
        (["data", "verify", "mnist", "--data-dir", "/no/such"], "the data folder /no/such is not a folder"),
        (["models", "mnits"], "did you mean 'mnist'?"),
        (["compare"], "compare --help"),
        (["xyz"], "No such command 'xyz'; see: banach --help"),
        (["trian"], "No such command 'trian'"),  # newer versions of typer then suggest the closest one,
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: list[str], said: str, capsys: Any) -> None:
    assert refused(arguments, capsys, said) == ""
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "content",
    [
        "a = " + "[" * 5_000 + "]" * 5_000,  # RecursionError in the parser
        "epochs" + ".a" * 5_000 + " = 1",  # in the message about the value
        "epochs = " + "9" * 5_000,  # more digits than Python reads
        "epochs = 1 # " + "x" * 2**20,
        "epochs = 1\0",
    ],
    ids=["lists", "tables", "digits", "size", "zero"],
)
def test_hostile_settings_files(content: str, capsys: Any) -> None:
    Path("s.toml").write_text(content)
    refused(["train", "--config", "s.toml"], capsys, "the settings file s.toml is not a TOML file of settings")
    assert not Path("runs").exists()


def test_bad_options_of_other_commands(run: Path, capsys: Any) -> None:
    refused(["evaluate", "run", "--split", "tset"], capsys, "tset")
    refused(["evaluate", "run", "--eps", "tiny"], capsys, "eps must be a number", "got 'tiny'")
    refused(["evaluate", "run", "--solver", ""], capsys, "solver must be a name, or left out, got ''")
    for size in ("0", "-3", "many"):  # all images at once, or a traceback
        refused(["evaluate", "run", "--batch-size", size], capsys, "batch_size must be a whole number, at least 1")
    refused(["diagnose", "run", "--samples", "181"], capsys, "samples must be a whole number, at least 2 and at")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError("alloc"), "not enough memory for this; choose smaller settings (alloc)"),
        (RuntimeError("CUDA out of memory"), "not enough memory"),
    ],
)
def test_too_little_memory(error: Exception, said: str, capsys: Any, monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Settings, "choose", fail)
    assert main(["train"]) == 2
    assert said in capsys.readouterr().err
    monkeypatch.setattr(Settings, "choose", lambda *_: 1 / 0)  # anything else is a bug, and shows its traceback
    with pytest.raises(ZeroDivisionError):
        main(["train"])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("checksum", [True, False])
def test_damaged_checkpoints_are_refused_and_kept(checksum: bool, run: Path, capsys: Any) -> None:
    """Also a state that has its checksum, but not what a run needs."""
    for path in run.glob("checkpoints/*/state.json"):
        content = json.loads(path.read_text())
        content["state"] = {"epoch": 1}
        if checksum:
            content["sha256"] = digest(content["state"])
        path.write_text(json.dumps(content))
    before = sorted(run.rglob("*"))
    for command in (["evaluate", "run"], ["train", "--resume", "run"]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert ("state.json must have the keys" if checksum else "state.json has the SHA-256") in said
        assert "no checkpoint in" in said
    assert sorted(run.rglob("*")) == before


SOLVE = dict.fromkeys(("depth", "max_depth", "residual", "max_residual", "converged"))
NO_LOSS = {"title": "", "count": 1, "totals": {"accuracy": 0.5, "loss": None, **SOLVE}}
NO_COUNT = {**NO_LOSS, "count": "1", "totals": {"accuracy": 0.5, "loss": 1.0, **SOLVE}}
NO_DEPTH = {**NO_LOSS, "totals": {"accuracy": 0.5, "loss": 1.0, **SOLVE, "depth": [1]}}


@pytest.mark.parametrize(
    ("name", "content", "command"),
    [
        ("test.json", '{"totals": {"accuracy": 0.5}}', ["train", "--resume", "run"]),
        ("test.json", "[]", ["train", "--resume", "run"]),
        ("test.json", json.dumps(NO_LOSS), ["compare", "run"]),
        ("test.json", json.dumps(NO_DEPTH), ["report", "run"]),
        ("test.json", json.dumps(NO_COUNT), ["report", "run"]),
        ("metrics.jsonl", '{"epoch": 1}\n', ["compare", "run"]),
        ("metrics.jsonl", "[" * 100_000, ["compare", "run"]),
        ("settings.json", "[" * 100_000, ["evaluate", "run"]),
        ("settings.json", '{"epochs": ', ["evaluate", "run"]),
    ],
)
def test_a_damaged_file_is_named(name: str, content: str, command: list[str], run: Path, capsys: Any) -> None:
    (run / name).write_text(content)
    refused(command, capsys, f"{name} cannot be read")


@pytest.mark.parametrize(("key", "value"), [("eps", 0.5), ("solver", "anderson"), ("epochs", 2)])
def test_settings_edited_after_training_are_refused(run: Path, capsys: Any, key: str, value: Any) -> None:
    path = run / "settings.json"
    content = json.loads(path.read_text()) | {key: value}
    path.write_text(json.dumps(content))
    refused(["evaluate", "run"], capsys, "settings.json cannot be read: its sha256 does not match")
    del content["sha256"]  # as in older runs
    path.write_text(json.dumps(content))
    for command in (["evaluate", "run"], ["train", "--resume", "run"]):
        refused(command, capsys, f"the run was started with setting {key}=")


def test_a_file_that_ends_too_early(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of the user's may raise an EOFError, which typer turns into its own Abort."""

    def load(*given: Any) -> Any:
        raise EOFError("Ran out of input")

    monkeypatch.setattr(Settings, "load", load)
    refused(["train"], capsys, "ended too early")


def refused_data(name: str, capsys: Any, *words: str) -> None:
    refused(["train", "--data", name, "--data-dir", ".", "--out", "run"], capsys, *words)
    assert not Path("run").exists()


def test_missing_test_images_are_reported_before_training(capsys: Any, monkeypatch: Any) -> None:
    Path("mnist").mkdir()
    digits = data.load("digits")
    monkeypatch.setattr(Settings, "load", lambda *_: digits)  # as if those to train with were sound
    refused_data("mnist", capsys, "mnist (test part) was not found")


def test_a_pipe_in_the_place_of_data_is_not_waited_for(capsys: Any) -> None:
    Path("mnist").mkdir()
    os.mkfifo("mnist/train-images-idx3-ubyte")
    refused_data("mnist", capsys, "mnist")
