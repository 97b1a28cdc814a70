"""The pages: their Python blocks run, the reference holds every public name, the site builds without warnings."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from banach.data import dataset
from banach.models import registry

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
ROOMS = ("", ".solve", ".backward", ".nn", ".fast", ".diagnose", ".train", ".data", ".models")
BLOCK = re.compile(r"(?:<!-- needs (\w+) -->\n)?```python\n(.*?)```", re.DOTALL)
# What the fragment on a page leaves to the reader.
BEFORE = {
    "docs/speed.md": """
import torch
from banach import models
net = models.build("mnist").cuda()
batches = [(torch.randn(64, 1, 28, 28).cuda(), torch.randint(10, (64,)).cuda()) for _ in range(3)]
"""
}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *, gpu: bool = False) -> list[str]:
    """Return the blocks of a page that run here, without those that need a GPU or with them."""
    unmarked = "gpu" if name(page) in BEFORE else ""
    found = [(need or unmarked, code) for need, code in BLOCK.findall(page.read_text())]
    return [code for need, code in found if (gpu if need == "gpu" else not need or find_spec(need))]


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of an empty module; a working directory; registries of models and data sets that are restored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dataset, "_registry", dict(dataset._registry))
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))
    monkeypatch.setitem(sys.modules, "page", ModuleType("page"))  # torch.export imports the module of a class
    torch.manual_seed(0)
    return sys.modules["page"].__dict__


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name)
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(
    page: Path, space: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for code in blocks(page):
        exec(compile(code, name(page), "exec"), space)
        printed = capsys.readouterr().out
        for shown in re.findall(r"^# -> (.*)$", code, re.MULTILINE):
            assert shown in printed


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # these three are of the compiler itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32:UserWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, gpu=True) != blocks(page)], ids=name)
def test_the_code_of_a_page_runs_on_a_gpu(page: Path, space: dict[str, Any]) -> None:
    for code in (BEFORE.get(name(page), ""), *blocks(page, gpu=True)):
        exec(compile(code, name(page), "exec"), space)


def documented() -> dict[tuple[str, str], Path]:
    """Return the page of every (module, name) in the reference."""
    found = {}
    for page in DOCS.glob("reference/*.md"):
        for module, member in re.findall(r"^::: ([\w.]+)\.(\w+)$", page.read_text(), re.MULTILINE):
            same = ROOT / "src" / module.replace(".", "/") / f"{member}.py"
            assert not same.exists(), f"{member} is a module; write ::: {module}.{member}.{member} in {name(page)}"
            found[module, member] = page
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_in_the_reference_with_an_example(room: str) -> None:
    module = import_module(f"banach{room}")
    pages = {(id(getattr(import_module(place), member)), member): p for (place, member), p in documented().items()}
    for public in module.__all__:
        page = pages.get((id(getattr(module, public)), public))
        assert page, f"banach{room}.{public} is on no page of docs/reference"
        example = re.search(rf"\b{public}\b", "".join(blocks(page, gpu=True)))
        assert example, f"{name(page)} has no example of {public}"


def in_navigation(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for value in entry.values() if isinstance(entry, dict) else entry:
            yield from in_navigation(value)


def test_every_page_is_in_the_navigation() -> None:
    config = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    listed = list(in_navigation(config["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_short(page: Path) -> None:
    """At most 1,500 words of text and tables, 4,000 where the paper's results are."""
    most = 4000 if name(page).startswith("docs/reproduction") else 1500
    assert len(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).split()) <= most


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="run `make docs`, which installs it")
    for part in ("docs", "src", "examples"):
        shutil.copytree(ROOT / part, tmp_path / part)
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "griffe" not in built.stderr, built.stderr
    site = tmp_path / "build" / "site"
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(\S+)|<link[^>]* href=\"?(\S+)", page.read_text())
        assert not [one for pair in loaded for one in pair if one.startswith(("http:", "https:", "//"))], page
        assert not re.search(r"^(<p>)?(Returns|Raises|Warns):", page.read_text(), re.MULTILINE), (
            page
        )  # not a table
    for module, member in documented():
        assert any(f'id="{module}.{member}"' in page.read_text() for page in site.glob("reference/*.html")), member
