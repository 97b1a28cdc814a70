"""--help explains every flag and cuts no word; shells complete commands and flags."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from banach import __version__
from banach.cli import app
from banach.cli.app import main
from banach.train import Settings

COMMANDS = [[], *([name] for name in app._SHORT), ["data", "list"], ["data", "verify"], ["data", "fetch"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_shows_an_example(command: list[str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert any("banach " in line for line in lines[2:])


def test_every_setting_is_explained_in_a_group(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    shown = " ".join(out.split())
    for group in ("Data", "Network", "Training", "Penalties", "Run"):
        assert f"\n{group}:\n" in out
    for field in fields(Settings):
        assert f" --{field.name.replace('_', '-')} " in shown
        help = " ".join(field.metadata["help"].split()).split("Jacobian-")[0]  # a hyphen may end a line
        assert help
        assert help in shown
    assert "implicit:picard | implicit:anderson | implicit:broyden" in shown


def test_no_arguments_show_the_help_and_version_the_version(capsys: Any) -> None:
    assert main([]) == 2
    assert "train" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"banach {__version__}\n"


@pytest.mark.parametrize(("words", "expected"), [("banach tr", "train"), ("banach train --back", "--backward")])
def test_shells_complete(words: str, expected: str, tmp_path: Path) -> None:
    """The name of a command at once: this torch cannot be imported."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError")
    paths = [str(Path(app.__file__).parents[2]), *([] if "--" in words else [str(tmp_path / "broken")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(reversed(paths))}
    position = str(len(words.split()) - 1)
    environment |= {"_BANACH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": position}
    done = subprocess.run(
        [sys.executable, "-m", "banach"], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.split() == [expected], done.stderr
    assert done.returncode == 0
