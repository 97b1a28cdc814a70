"""Models and data of your own on the command line: --import, entry points, folders; runs find them again."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from banach.cli import app, shared
from banach.cli.app import main
from banach.data import dataset
from banach.models import Model
from banach.provenance import digest
from banach.train import Run
from cli.conftest import SMALL, refused

CODE = """
from dataclasses import replace
from banach import data, models
models.register("{0}", models.get("digits").builder, description="for a test", image=(1, 8, 8), overwrite=True)
data.register(replace(data.DIGITS, name="{0}-data"), replace=True)
"""


@pytest.fixture(autouse=True)
def packages(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two modules in the working directory."""
    monkeypatch.syspath_prepend(here)
    for name in ("mine", "theirs"):
        Path(f"{name}_package.py").write_text(CODE.format(name))
    shared.load_entry_points.cache_clear()
    yield
    shared.load_entry_points.cache_clear()
    for name in ("mine_package", "theirs_package"):
        sys.modules.pop(name, None)


def in_a_new_process(*arguments: str, hidden: str = "") -> subprocess.CompletedProcess[str]:
    """Run the installed entry point, whose path holds neither the working directory nor `hidden` packages."""
    kept = f"[p for p in sys.path if p not in ('', '.') and not ({hidden!r} and {hidden!r} in p)]"
    code = f"import sys; sys.path[:] = {kept}; from banach.cli.entry import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(Path(app.__file__).parents[2])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_import_is_recorded_and_found_again(capsys: Any) -> None:
    flags = ["--import", "mine_package", "--model", "mine", "--data", "mine-data", "--epochs", "0"]
    assert main([*SMALL, *flags]) == 0
    settings = Run.open("runs/mine-data-1").settings
    assert (settings.model, settings.data) == ("mine_package:mine", "mine_package:mine-data")
    # A run directory does not make us import a module: it may be somebody else's.
    refused = in_a_new_process("train", "--resume", "runs/mine-data-1")
    assert refused.returncode == 2
    assert "'mine-data' comes from mine_package" in refused.stderr
    assert "add --import mine_package" in " ".join(refused.stderr.split())
    done = in_a_new_process("train", "--resume", "runs/mine-data-1", "--import", "mine_package")
    assert done.returncode == 0, done.stderr
    capsys.readouterr()
    for command in (["evaluate"], ["diagnose", "--samples", "4"], ["report", "--samples", "0"]):
        assert main([*command, "runs/mine-data-1", "--device", "cpu", "--import", "mine_package"]) == 0
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11):  # older ones may not export loops
        assert main(["export", "runs/mine-data-1", "--format", "torch", "--import", "mine_package"]) == 0
    for command in (["models"], ["data", "list"]):
        capsys.readouterr()
        assert main([*command, "--import", "theirs_package"]) == 0
        assert "theirs" in capsys.readouterr().out
    # Names that need no import stay as they are.
    assert main([*SMALL, "--import", "mine_package", "--model", "mine", "--epochs", "0", "--out", "r"]) == 0
    assert (Run.open("r").settings.model, Run.open("r").settings.data) == ("mine_package:mine", "digits")


def test_a_module_that_replaces_a_model_is_recorded() -> None:
    """It was stored under the plain name, and later commands used another network."""
    Path("mine_package.py").write_text(CODE.format("digits"))
    assert main([*SMALL, "--import", "mine_package", "--epochs", "0", "--out", "r"]) == 0
    assert (Run.open("r").settings.model, Run.open("r").settings.data) == ("mine_package:digits", "digits")


def test_a_module_with_a_fault_is_not_said_to_be_missing(capsys: Any) -> None:
    Path("listed.py").write_text("import banach.models as m\nm.register('a')")
    for name, advice in (
        ("listed", "missing 1 required positional argument: 'builder'); correct the module"),
        ("no_such", "install it"),
    ):
        refused(["models", "--import", name], capsys, advice)


def test_only_import_looks_into_the_working_directory() -> None:
    """A file there could pass for an optional package that is missing."""
    Path("listed.py").write_text("import os, sys; assert os.getcwd() == sys.path[-1]")
    assert in_a_new_process("models", "--import", "listed").returncode == 0
    Path("typer.py").write_text("import sys; sys.exit('run from the working directory')")
    done = in_a_new_process(hidden="packages")  # typer is missing
    assert done.stderr == "banach: the command line needs typer; run: pip install 'banach[app]'\n"


def test_entry_points_are_loaded_and_broken_ones_only_warn(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [EntryPoint("a", "no_such_package.x", "banach"), EntryPoint("b", "theirs_package", "banach")]
    monkeypatch.setattr(shared, "entry_points", lambda group: made if group == "banach" else [])
    with pytest.warns(UserWarning, match=r"the entry point no_such_package.x of banach cannot be loaded"):
        known = shared.load_entry_points()
    assert {"theirs", "mnist"} <= {one.name for one in known if isinstance(one, Model)}
    assert main([*SMALL, "--model", "theirs", "--epochs", "0", "--out", "r"]) == 0
    assert Run.open("r").settings.model == "theirs"


def test_folders_and_arrays_train_and_resume_from_another_folder(here: Path, monkeypatch: Any) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (30, 8, 8), dtype=np.uint8)
    for number in range(30):
        Path("photos", "abc"[number % 3]).mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels[number]).save(f"photos/{'abc'[number % 3]}/{number}.png")
    np.savez("mine.npz", images=pixels, labels=np.arange(30) % 3)
    common = ["--model", "digits", "--epochs", "1", "--batch-size", "8", *SMALL[5:]]
    for data, name in (("folder:photos", "photos"), ("mine.npz", "mine.npz"), ("folder:photos@12", "photos-12")):
        assert main(["train", "--data", data, *common]) == 0
        assert Run.open(f"runs/{name}-1").settings.data == str(dataset.get(data).name)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for name in ("photos", "mine.npz", "photos-12"):
        assert main(["evaluate", f"../runs/{name}-1", "--split", "validation", "--device", "cpu"]) == 0
        assert main(["train", "--resume", f"../runs/{name}-1"]) == 0
    assert main(["predict", "../runs/photos-1", str(here / "photos" / "a")]) == 0


def write_arrays(seed: int = 0, change: int = 0) -> str:
    """Write arrays of the same shapes and labels; return the SHA-256 of the training part."""
    pixels = np.random.default_rng(seed).integers(0, 200, (60, 8, 8), dtype=np.uint8)
    x, y, labels = pixels[:40], pixels[40:] + np.uint8(change), np.arange(60, dtype=np.uint8) % 3
    np.savez("mine.npz", x_train=x, y_train=labels[:40], x_test=y, y_test=labels[40:])
    return hashlib.sha256(labels[:40].tobytes() + x.tobytes()).hexdigest()


@pytest.mark.filterwarnings("always")  # the command line prints them
def test_a_run_knows_the_images_it_was_trained_on(capsys: Any) -> None:
    """Other pixels in arrays of the same shape were resumed, evaluated and reported without a word."""
    was, command = write_arrays(), ["train", "--data", "mine.npz", "--model", "digits", "--batch-size", "8"]
    assert main([*command, *SMALL[5:], "--epochs", "2", "--out", "run"]) == 0
    now = write_arrays(seed=1)
    said = f"the run was started with the SHA-256 of the images={was}, got {now}; resume with the same one"
    refused(["train", "--resume", "run"], capsys, said)
    changed = "the images of mine.npz (validation) are not those of the run: they have changed; restore them"
    for command in (["evaluate", "run", "--split", "validation"], ["diagnose", "run", "--samples", "4"]):
        refused([*command, "--device", "cpu"], capsys, changed)
    assert main(["report", "run", "--samples", "0", "--device", "cpu"]) == 0
    assert f"Nothing was measured: {changed}." in Path("run/report.html").read_text()

    assert write_arrays(change=1) == was  # other test images: training goes on
    assert main(["train", "--resume", "run"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "run", "--split", "validation", "--device", "cpu"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["evaluate", "run", "--device", "cpu"]) == 0
    assert "mine.npz (test) are not those of the run" in capsys.readouterr().err


def test_a_run_of_an_older_version_has_no_digest_and_is_read(capsys: Any) -> None:
    write_arrays()
    command = ["train", "--data", "mine.npz", "--model", "digits", "--batch-size", "8"]
    assert main([*command, *SMALL[5:], "--epochs", "1", "--out", "run"]) == 0
    for path in Path("run").glob("checkpoints/*/state.json"):
        content = json.loads(path.read_text())
        identity = content["state"]["identity"]
        assert identity.pop("the SHA-256 of the images") == write_arrays()
        path.write_text(json.dumps({**content, "sha256": digest(content["state"])}))
    figures = json.loads(Path("run/test.json").read_text())
    del figures["the SHA-256 of the images"], figures["sha256"]
    Path("run/test.json").write_text(json.dumps(figures))
    write_arrays(seed=1)
    for later in (["train", "--resume", "run"], ["evaluate", "run"], ["report", "run", "--samples", "0"]):
        capsys.readouterr()
        assert main(later) == 0
        assert capsys.readouterr().err == ""
    assert "Nothing was measured" not in Path("run/report.html").read_text()


FAULTS = """
from torch import nn
from banach import models
class R(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(p)
    def forward(self, u, v):
        return 0.5 * self.drop(self.linear(u).tanh()) + v
class Two(nn.Module):
    def forward(self, u):
        return u, u
def Q(inputs=64):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.BatchNorm1d(16))
for name, make in {
    "few": lambda image, classes: (Q(), R(), nn.Linear(16, classes - 3)),
    "two": lambda image, classes: (Q(), R(), Two()),
    "none": lambda image, classes: "net",
    "drop": lambda image, classes: (Q(), R(0.5), nn.Linear(16, classes)),
    "shape": lambda image, classes: (Q(60), R(), nn.Linear(16, classes)),
    "bug": lambda image, classes: undefined,
    "good": lambda image, classes: (Q(), R(), nn.Linear(16, classes)),
}.items():
    models.register(name, make, description="for a test", image=(1, 8, 8))
"""


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "few",
            "class numbers below their number, got (2, 7) and torch.int64 (2,) (Target 9 is out of bounds",
        ),
        ("two", "cross entropy needs outputs (batch, classes, ...)"),
        ("none", "the builder of none must return (Q, R, S) or a module, got str"),
        ("drop", "R.drop is Dropout, which draws new random numbers at every evaluation"),
    ],
)
def test_a_model_with_a_fault_is_refused_in_a_sentence(
    model: str, said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback, which BANACH_DEBUG=1 still shows, and left a run directory."""
    Path("mine_package.py").write_text(FAULTS)
    command = [*SMALL, "--import", "mine_package", "--model", model, "--epochs", "1", "--out", "r"]
    refused(command, capsys, said)
    assert Path("r").exists() == (model == "drop")  # which is seen in train mode only
    shutil.rmtree("r", ignore_errors=True)
    monkeypatch.setenv("BANACH_DEBUG", "1")
    with pytest.raises((ValueError, RuntimeError)):
        main(command)


def test_bugs_of_a_model_are_shown() -> None:
    Path("mine_package.py").write_text(FAULTS)
    command = [*SMALL, "--import", "mine_package", "--epochs", "1", "--model"]
    for model, error, said in (("bug", NameError, "undefined"), ("shape", RuntimeError, "mat1 and mat2 shapes")):
        with pytest.raises(error, match=said):
            main([*command, model])
    assert main([*command, "good"]) == 0
