"""`banach train` and `banach evaluate`, from the command line to the files."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from banach import data
from banach.cli import app
from banach.cli.app import main
from banach.cli.opened import open_run
from banach.train import Run, checkpoint

SMALL = ["train", "--subset", "64", "--batch-size", "16", "--no-tensorboard", "--device", "cpu"]
NAMES = ("train", "evaluate", "diagnose", "predict", "compare", "models", "data")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(path: Path) -> dict[str, torch.Tensor]:
    latest = Run.open(path).latest()
    assert latest is not None
    return latest.tensors


def same(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_has_all_its_files_and_ends_with_a_table_and_a_plot(here: Path, capsys: Any) -> None:
    assert main([*SMALL[:-3], "--device", "cpu", "--epochs", "2"]) == 0
    run = here / "runs/digits-1"
    names = {path.name for path in run.iterdir()}
    assert names >= {"settings.json", "environment.json", "metrics.jsonl", "checkpoints", "test.json"}
    assert names >= {"training.png", "tensorboard"}
    assert (run / "training.png").read_bytes()[:4] == b"\x89PNG"
    out = capsys.readouterr().out
    assert "training step on cpu, fp32: eager" in out
    assert "test accuracy" in out
    assert "plot: runs/digits-1/training.png" in out
    assert len(Run.open(run).metrics()) == 2
    kept = json.loads((run / "test.json").read_text())
    assert kept["count"] == 360
    assert {"device", "versions", "commit", "settings", "date"} <= set(kept)


def test_the_test_figure_is_that_of_the_final_weights(here: Path) -> None:
    assert main([*SMALL, "--epochs", "1", "--ema", "0.5"]) == 0
    opened = open_run(here / "runs/digits-1", "cpu")
    images = data.load("digits", "test")
    with torch.no_grad():
        hits = (opened.net(images.normalise(images.pixels)).argmax(1) == images.labels).double().mean()
    kept = Run.open(here / "runs/digits-1").test()
    assert kept is not None
    assert kept["totals"]["accuracy"] == pytest.approx(float(hits))


def test_on_the_whole_nothing_is_validated(here: Path, capsys: Any) -> None:
    whole, held = data.load("digits", "train+validation"), data.load("digits")
    assert main(["train", "--whole", *SMALL[3:], "--epochs", "1"]) == 0
    out = capsys.readouterr().out
    assert f"on {len(whole):,} images" in out
    assert len(whole) > len(held)
    assert "validation accuracy" not in out
    assert "test accuracy" in out
    (epoch,) = Run.open(here / "runs/digits-1").metrics()
    assert epoch.validation_accuracy is None
    assert main(["evaluate", "runs/digits-1", "--split", "train"]) == 0
    assert f"{len(whole):,}" in capsys.readouterr().out
    assert main(["evaluate", "runs/digits-1", "--split", "validation"]) == 2
    assert "trained on the validation images too" in capsys.readouterr().err
    assert main(["compare", "runs/digits-1"]) == 0
    capsys.readouterr()
    assert main(["diagnose", "runs/digits-1", "--samples", "4"]) == 0
    assert "4 training images" in " ".join(capsys.readouterr().out.split())


def test_the_test_set_is_read_once_at_the_end(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    load = data.load

    def noted(name: str, split: str = "train", *rest: Any, **options: Any) -> Any:
        read.append(split)
        return load(name, split, *rest, **options)

    monkeypatch.setattr(data, "load", noted)
    assert main([*SMALL, "--epochs", "1"]) == 0
    assert read == ["train", "validation", "test"]
    read.clear()
    assert main(["train", "--resume", "runs/digits-1"]) == 0
    assert "test" not in read


def test_runs_are_numbered_and_kept(here: Path) -> None:
    for _ in range(2):
        assert main([*SMALL, "--epochs", "0"]) == 0
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["digits-1", "digits-2"]
    assert main([*SMALL, "--epochs", "0", "--out", "runs/digits-2"]) == 2


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_resumes_bit_by_bit(here: Path, how: signal.Signals) -> None:
    command = ["train", "--subset", "128", "--batch-size", "8", "--no-tensorboard", "--no-monitor"]
    command += ["--epochs", "2", "--checkpoint-every", "5", "--ema", "0.9", "--device", "cpu"]
    stopped = subprocess.Popen(
        [sys.executable, "-m", "banach", *command, "--out", "my run"],
        env={**os.environ, "PYTHONPATH": str(Path(app.__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
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
    assert same(here / "whole", here / "my run")
    whole, resumed = (Run.open(here / name).test() for name in ("whole", "my run"))
    assert whole is not None
    assert resumed is not None
    assert whole["totals"] == resumed["totals"]


def test_resume_finds_the_run_by_position_by_out_and_by_age(here: Path, capsys: Any) -> None:
    assert main([*SMALL, "--epochs", "0"]) == 0
    for command in (["--resume", "runs/digits-1"], ["--resume", "--out", "runs/digits-1"], ["--resume"]):
        assert main(["train", *command]) == 0
        assert "run: runs/digits-1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--epochs", "three"], "epochs"),
        (["--epochs", "-1"], "epochs must be a whole number"),
        (["--modle", "digits"], "--model"),
        (["--data", "mnits"], "did you mean 'mnist'"),
        (["--model", "digts"], "did you mean 'digits'"),
        (["--backward", "newmann:5"], "did you mean 'neumann'"),
        (["--lr", "nan"], "lr must be a number"),
        (["--subset", "5000"], "at most the 1,257 training images"),
        (["--config", "none.toml"], "none.toml cannot be read"),
        (["--resume", "nowhere"], "there is no run in nowhere"),
        (["nowhere"], "without --resume"),
        (["--device", "cuda:77"], "there is no cuda:77 here"),
        (["--device", "meta"], "device must be auto, cpu, cuda"),
        (["--data", "mnist", "--data-dir", "nowhere"], "nowhere is not a folder"),
        (["--precision", "fp8"], "precision"),
        (["--resume", "--config", "x.toml"], "its settings already"),
        (["--data", "mnist", "--model", "cifar10", "--batch-norm", "--eps", "-1"], "eps must be a number"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    here: Path, capsys: Any, arguments: list[str], said: str
) -> None:
    assert main(["train", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not (here / "runs").exists()


def test_a_full_disk_loses_nothing(here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second epoch's checkpoint does not fit: exit 2, the first one is whole, and the run resumes from it."""
    write, written = checkpoint._write, []

    def full(path: Path, content: bytes) -> None:
        written.append(path)
        if len(written) > 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(checkpoint, "_write", full)
    assert main([*SMALL, "--epochs", "3"]) == 2
    said = capsys.readouterr().err
    assert "No space left on device; free some space and resume" in said
    monkeypatch.setattr(checkpoint, "_write", write)
    assert len(Run.open(here / "runs/digits-1").metrics()) == 1
    assert not list(here.glob("runs/digits-1/checkpoints/.half-*"))
    assert main(["train", "--resume", "runs/digits-1"]) == 0
    assert main([*SMALL, "--epochs", "3", "--out", "whole"]) == 0
    assert same(here / "runs/digits-1", here / "whole")


@pytest.mark.filterwarnings("default")
def test_damaged_checkpoints_are_refused_and_nothing_is_lost(here: Path, capsys: Any) -> None:
    assert main([*SMALL, "--epochs", "1"]) == 0
    files = list(here.glob("runs/digits-1/checkpoints/*/tensors.safetensors"))
    for path in files:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    capsys.readouterr()
    for command in (["train", "--resume", "runs/digits-1"], ["evaluate", "runs/digits-1"]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "is damaged: tensors.safetensors" in said
        assert "no checkpoint in" in said
    assert all(path.exists() for path in files)
    (here / "runs/digits-1/settings.json").write_text('{"epochs": ')
    assert main(["evaluate", "runs/digits-1"]) == 2
    assert "settings.json cannot be read" in capsys.readouterr().err


def test_evaluate_at_a_tighter_tolerance_on_another_split(here: Path, capsys: Any) -> None:
    assert main([*SMALL, "--epochs", "1"]) == 0
    tight = ["--eps", "1e-6", "--max-steps", "200", "--solver", "anderson:4", "--norm", "euclidean"]
    assert main(["evaluate", "runs/digits-1", "--split", "validation", *tight, "--device", "cpu"]) == 0
    kept = json.loads((here / "runs/digits-1/evaluation-validation.json").read_text())
    assert kept["totals"]["converged"] == 1
    assert kept["totals"]["max_residual"] <= 1e-6
    assert kept["count"] == 180
    assert kept["settings"]["eps"] == 1e-6
    assert kept["settings"]["solver"] == "anderson:4"
    assert "validation accuracy" in capsys.readouterr().out
    assert main(["evaluate", "runs/digits-1", "--split", "tset"]) == 2


def test_a_warning_is_one_line_without_code(here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    from banach.cli import train

    def complain(*_: Any) -> None:
        warnings.warn("the sky\nis low", RuntimeWarning, stacklevel=1)

    monkeypatch.setattr(train.Session, "finish", complain)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main([*SMALL, "--epochs", "0"]) == 0
    assert capsys.readouterr().err == "warning: the sky is low\n"


def test_fixed_points_that_are_not_found_are_said_once_a_command(here: Path, capsys: Any) -> None:
    """Python's own filter would show the warning again whenever other code changes the filters."""
    import warnings

    said = (
        "warning: the fixed point was not found for all samples: stopped at max_steps above the tolerance; "
        "try more --max-steps, a larger --eps, or --solver anderson\n"
    )
    for command in ([*SMALL, "--epochs", "3", "--max-steps", "2"], ["evaluate", "runs/digits-1"]):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            assert main(command) == 0
        assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "command", [[], *([name] for name in NAMES), ["data", "list"], ["data", "verify"], ["data", "fetch"]]
)
def test_help_fits_a_screen(command: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 46
    assert max(len(line) for line in lines) <= 100
    assert any("banach " in line for line in lines)


def test_nothing_to_do_shows_the_help(capsys: Any) -> None:
    assert main([]) == 2
    assert "train" in capsys.readouterr().out


def test_it_says_its_version(capsys: Any) -> None:
    from banach import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"banach {__version__}\n"


def test_a_run_of_ones_own_network_by_the_library_is_evaluated_by_the_command(here: Path) -> None:
    """Its settings name no solver: those of the network are meant, as docs/training.md has it."""
    from banach import data, models, train

    settings = train.Settings.of_recipe(
        models.recipe("digits"), data="digits", model="digits", epochs=1, subset=64, monitor=False, device="cpu"
    )
    assert settings.solver is None
    images = data.load("digits", "train").subset(64)
    run = train.Run.create("runs/mine", settings)
    train.fit(models.build("digits"), images, data.load("digits", "validation"), settings, run=run)
    for command in ("evaluate", "diagnose"):
        assert main([command, "runs/mine", "--device", "cpu"]) == 0


PENALTIES = ["--jacobian-penalty", "0.5", "--correction", "0.3", "--correction-steps", "1,3"]


def test_penalties_by_flags_reach_the_run_and_resume_bit_by_bit(here: Path, capsys: Any) -> None:
    assert main([*SMALL, *PENALTIES, "--epochs", "2", "--out", "whole"]) == 0
    made = Run.open(here / "whole").settings
    assert (made.jacobian_penalty, made.correction, made.correction_steps) == (0.5, 0.3, (1, 3))
    assert not made.finite_difference
    assert main([*SMALL, *PENALTIES, "--epochs", "2", "--out", "other", "--finite-difference"]) == 0
    assert Run.open(here / "other").settings.finite_difference
    assert not same(Path("whole"), Path("other"))
    (here / "part").mkdir()
    for name in ("settings.json", "environment.json"):
        (here / "part" / name).write_bytes((here / "whole" / name).read_bytes())
    assert main(["train", "--resume", "part", "--correction-steps", "1,3", "--no-tensorboard"]) == 0
    assert same(Path("whole"), Path("part"))
    assert main(["train", "--resume", "part", "--correction-steps", "1,4", "--no-tensorboard"]) == 2
    assert "was started with correction_steps=[1, 3], got [1, 4]" in " ".join(capsys.readouterr().err.split())
