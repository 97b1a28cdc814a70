"""`banach` when training diverges, signals arrive, files are damaged or the disk is full: nothing is lost."""

import errno
import io
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from banach import data
from banach.cli import entry
from banach.cli.app import main
from banach.cli.progress import Progress
from banach.train import Run
from banach.train.checkpoint import nonfinite
from cli.conftest import SMALL, refused
from cli.test_cli_train import same

pytestmark = pytest.mark.filterwarnings("always")  # the command line prints warnings
FULL = Path("/dev/full")
EXPLODES = ["--epochs", "4", "--optimizer", "sgd", "--lr", "0.05", "--schedule", "steps:2:1e20", "--out", "run"]


@pytest.mark.parametrize("twin", [[], ["--max-steps", "0"]], ids=["implicit", "explicit"])
def test_a_rate_that_explodes_stops_the_run(capsys: Any, twin: list[str]) -> None:
    """NaN from epoch 3: both kept checkpoints became NaN, and the exit code was 0."""
    assert main([*SMALL, *EXPLODES, *twin]) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    for part in (
        "banach: training diverged: ",
        " of epoch 3; ",
        "run/checkpoints/epoch-00002",
        "lower --lr, set --clip 1",
    ):
        assert part in said
    assert main([*SMALL, *EXPLODES[:-1], "clipped", "--clip", "1", *twin]) == 3
    assert "; lower --lr, check the data, or" in capsys.readouterr().err  # it is clipped already
    latest: Any = Run.open("run").latest()
    assert (latest.position.epoch, nonfinite(latest.tensors)) == (2, None)
    assert not Path("run/test.json").exists()
    assert main(["evaluate", "run", "--device", "cpu"]) == 0
    assert main(["train", "--resume", "run"]) == 3
    refused(["train", "--resume", "run", "--on-nonfinite", "ignore"], capsys, "unknown on_nonfinite: 'ignore'")


@pytest.fixture
def handlers() -> Iterator[None]:
    defaults: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
    defaults |= {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("split", "number"), [("train", signal.SIGINT), ("train", signal.SIGTERM), ("test", signal.SIGHUP)]
)
@pytest.mark.usefixtures("handlers")
def test_a_signal_before_or_after_training(capsys: Any, monkeypatch: Any, number: int, split: str) -> None:
    """They exit by the same rule as during training."""
    load = data.load

    def signalled(name: str, wanted: str = "train", *rest: Any) -> Any:
        if wanted == split:
            os.kill(os.getpid(), number)
        return load(name, wanted, *rest)

    command = [*SMALL, "--epochs", "1", "--out"]
    with monkeypatch.context() as patch:
        patch.setattr(data, "load", signalled)
        patch.setattr(sys, "argv", ["banach", *command, "run"])
        with pytest.raises(SystemExit) as caught:
            entry.main()
    assert caught.value.code == 128 + number
    assert capsys.readouterr().err == "banach: stopped\n"
    assert Path("run").exists() == (split == "test")
    assert main(["train", "--resume", "run"] if split == "test" else [*command, "run"]) == 0
    assert main([*command, "whole"]) == 0
    assert same("run", "whole")


RANK = """
import atexit, builtins, os, sys, types
from banach.cli import entry
class Late:  # like a thread of gloo: it ends a process that finalises Python, with another exit code
    def __del__(self):
        os._exit(70)
builtins.late = Late()
def command():
    atexit.register(print, "hook")
    print("output")
    {ending}
sys.modules["banach.cli.app"] = types.SimpleNamespace(main=command)
sys.exit(entry.main())
"""


@pytest.mark.parametrize(
    ("ending", "code"), [("return 2", 2), ("os.kill(os.getpid(), 15)", 128 + 15), ("raise KeyError('bug')", 1)]
)
def test_a_rank_ends_without_finalising_python(ending: str, code: int) -> None:
    """After a complete run a rank of torchrun aborted: a thread of gloo freed a tensor while Python finalised.

    Output is written, exit hooks run, and the exit code is that of the command.
    """
    command = [sys.executable, "-c", RANK.format(ending=ending)]
    own = {**os.environ, "PYTHONPATH": str(Path(entry.__file__).parents[2]), "PYTHONUNBUFFERED": ""}
    for started, expected in (({}, 70), ({"TORCHELASTIC_RUN_ID": "test"}, code)):
        done = subprocess.run(command, env=own | started, capture_output=True, text=True, check=False)
        assert done.returncode == expected, done.stderr
        assert done.stdout == "output\nhook\n"


def test_a_signal_in_the_last_step_stops_before_the_test_set(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was noted, all epochs were done, and so it was forgotten."""
    monkeypatch.setattr(Progress, "epoch", lambda *_: os.kill(os.getpid(), signal.SIGTERM))  # after the last step
    assert main([*SMALL, "--epochs", "1", "--out", "run"]) == 128 + signal.SIGTERM
    assert not Path("run/test.json").exists()
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert main(["train", "--resume", "run"]) == 0
    assert Path("run/test.json").exists()


@pytest.mark.parametrize("left", [b"", b"\0" * 700, b"\n"])
def test_emptied_settings_are_restored(run: Path, capsys: Any, left: bytes) -> None:
    """A power cut leaves an empty file, or one of zeros."""
    path = run / "settings.json"
    before = path.read_bytes()
    path.write_bytes(left)
    assert main(["evaluate", "run", "--device", "cpu"]) == 0
    assert "settings.json was empty and is restored from environment.json" in capsys.readouterr().err
    assert path.read_bytes() == before
    for name in ("settings.json", "environment.json"):
        (run / name).write_bytes(left)
    refused(["evaluate", "run"], capsys, "settings.json cannot be read")


@pytest.mark.parametrize("name", ["settings.json", "metrics.jsonl", "test.json"])
def test_a_changed_figure_is_noticed(run: Path, capsys: Any, name: str) -> None:
    text = (run / name).read_text()
    changed = {"settings.json": ('"lr": 0.', '"lr": 1.'), "metrics.jsonl": ('"loss": ', '"loss": 1')}
    before, after = changed.get(name, ('"count": ', '"count": 1'))
    assert before in text
    (run / name).write_text(text.replace(before, after, 1))
    refused(["compare", "run"], capsys, f"{name} cannot be read: its sha256 does not match")


def test_files_of_a_run_without_checksums_are_read(run: Path) -> None:
    """Older versions wrote none."""
    for name in ("settings.json", "test.json", "metrics.jsonl"):
        content = json.loads((run / name).read_text())
        assert len(content.pop("sha256")) == 64
        (run / name).write_text(json.dumps(content) + "\n")
    assert main(["compare", "run"]) == 0
    assert main(["train", "--resume", "run"]) == 0


@pytest.mark.parametrize(("count", "name"), [(3, "epoch-00001-step"), (5, "metrics.jsonl")])
def test_a_full_disk_loses_nothing(capsys: Any, monkeypatch: Any, count: int, name: str) -> None:
    """It is named: the system reports it without a name, or for a temporary file."""
    real, calls = os.fsync, [0]

    def full(handle: int) -> None:
        calls[0] += stat.S_ISREG(os.fstat(handle).st_mode)
        if calls[0] > count:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main([*SMALL, "--epochs", "1", "--out", "run"]) == 2
    said = capsys.readouterr().err
    assert name in said
    assert "No space left on device; free some space and run it again (train: with --resume, earlier" in said
    assert main(["train", "--resume", "run"]) == 0
    assert main([*SMALL, "--epochs", "1", "--out", "whole"]) == 0
    assert same("run", "whole")


@pytest.mark.parametrize("command", [["evaluate", "run"], ["report", "run", "--samples", "0"]], ids="".join)
def test_a_full_disk_is_no_reason_to_resume_a_finished_run(
    command: list[str], run: Path, capsys: Any, monkeypatch: Any
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused(command, capsys, "No space left on device; free some space and run it again (train: with --resume")


@pytest.mark.usefixtures("handlers")
def test_a_name_that_the_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the command with "'ascii' codec can't encode", and left a run that had not begun.

    TensorBoard, plots and pages refuse bytes that are not UTF-8, each in its own way.
    """
    name = "\u6f22\udce9"  # the second is a byte that is not UTF-8
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    monkeypatch.setattr(sys, "argv", ["banach", *SMALL, "--tensorboard", "--epochs", "1", "--out", name])
    assert entry.main() == 0
    sys.stdout.seek(0)
    said = sys.stdout.read()
    assert r"run: \u6f22\udce9" in said
    assert "TensorBoard" in said
    monkeypatch.setattr(sys, "argv", ["banach", "report", name, "--samples", "0"])
    assert entry.main() == 0
    assert "\u6f22\\udce9</h1>" in Path(name, "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    "full", [False, pytest.param(True, marks=pytest.mark.skipif(not FULL.exists(), reason="none"))]
)
def test_a_closed_pipe_of_warnings_does_not_stop_the_run(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`banach train 2>&1 | head -1` died of its first warning, before the first checkpoint; so did a full disk."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(FULL if full else writer, "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        assert main([*SMALL, "--epochs", "1", "--max-steps", "1", "--out", "run"]) == 0
    assert Path("run/test.json").exists()
