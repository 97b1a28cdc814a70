"""Where a number comes from: the commit against git, values as JSON, files that are whole or old."""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import banach
from banach import provenance as source
from banach.provenance import plain, provenance, source_commit, write_json
from banach.train.checkpoint import write_checkpoint
from train.parts_train import STATE


def test_provenance_names_machine_versions_and_settings() -> None:
    found = provenance({"solver": banach.Picard(damping=0.25), "dtype": torch.float64})
    assert found["versions"]["banach"] == banach.__version__
    assert found["versions"]["torch"] == str(torch.__version__)
    assert found["settings"] == {"solver": "Picard(damping=0.25)", "dtype": "torch.float64"}
    assert found["device"] == f"cpu: {found['cpu']}"
    assert len(found["cpu"]) > 1
    assert found["threads"] == torch.get_num_threads()
    assert found["date"].endswith("+00:00")
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_what_json_cannot_hold_becomes_plain() -> None:
    mixed = {
        "nan": math.nan,
        "deep": (1, [-math.inf, np.float32(0.5)], {2: torch.tensor([1.5, math.inf])}),
        "path": Path("a") / "b",
        "kept": [True, None, "x", np.int64(3)],
    }
    assert plain(mixed) == {
        "nan": "nan",
        "deep": [1, ["-inf", 0.5], {"2": [1.5, "inf"]}],
        "path": "a/b",
        "kept": [True, None, "x", 3],
    }


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_json(tmp_path / "new" / "a.json", {"x": math.nan})
    assert json.loads(path.read_text()) == {"x": "nan"}

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(source.os, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        write_json(path, {"x": 2})
    assert json.loads(path.read_text()) == {"x": "nan"}
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"File name too long: 'x+'"):  # not that of the temporary file
        write_json("x" * 250, {})


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_tree_that_holds_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as inside a hook
    package = tmp_path / "tree" / "src" / "banach"
    package.mkdir(parents=True)
    (package / "a.py").write_text("x = 1\n")
    _git(tmp_path / "tree", "init", "--quiet")
    _git(tmp_path / "tree", "add", ".")
    _git(tmp_path / "tree", "commit", "--quiet", "-m", "one")
    commit = _git(tmp_path / "tree", "rev-parse", "HEAD")
    assert source_commit(package) == (commit, False)
    (package / "a.py").write_text("x = 2\n")
    assert source_commit(package) == (commit, False)  # the code that was imported is what counts
    source_commit.cache_clear()
    assert source_commit(package) == (commit, True)
    # The same files as a package inside someone else's repository: their commit is not ours.
    other = tmp_path / "tree" / "site-packages" / "banach"
    shutil.copytree(package, other)
    assert source_commit(other) == (None, None)
    assert source_commit(tmp_path) == (None, None)
    source_commit.cache_clear()
    monkeypatch.setenv("BANACH_COMMIT", "abc123")  # for a copy without git
    assert source_commit(tmp_path) == ("abc123", None)
    source_commit.cache_clear()


def _git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", *who, "-C", str(folder), *arguments]
    # A clean environment: no hook's GIT_DIR, no user's configuration.
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("umask", [0o077, 0o002])
def test_files_follow_the_umask(tmp_path: Path, umask: int) -> None:
    """They were readable by everyone and writable by their owner only, whatever the umask said."""
    before = os.umask(umask)
    try:
        path = write_json(tmp_path / "a.json", {})
        place = write_checkpoint(tmp_path / "checkpoints", {}, STATE, 1, None)
    finally:
        os.umask(before)
    for one in (path, *place.iterdir()):
        assert one.stat().st_mode & 0o777 == 0o666 & ~umask
    assert place.stat().st_mode & 0o777 == 0o777 & ~umask
