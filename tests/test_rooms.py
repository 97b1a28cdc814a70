"""A room imports only from rooms above it, so that the tree reads like the sentence Q, R, S."""

import ast
from pathlib import Path

import pytest

import banach

ROOMS = (
    "checks",
    "provenance",
    "latent",
    "solve",
    "backward",
    "nn",
    "network",
    "export",
    "diagnose",
    "kernels",
    "fast",
    "models",
    "data",
    "train",
    "cli",
)
SOURCE = Path(banach.__file__).parent


def room_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_rooms(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("banach."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "banach":
            names.update(alias.name for alias in node.names if alias.name in ROOMS)
        elif isinstance(node, ast.Import):
            names.update(a.name.split(".")[1] for a in node.names if a.name.startswith("banach."))
    return names


def files() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE or path.stem in ROOMS]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_from_rooms_above_it(path: Path) -> None:
    own = room_of(path)
    assert own in ROOMS, f"{own} is a room that DESIGN does not know"
    allowed = set(ROOMS[: ROOMS.index(own) + 1])
    if own == "data":
        allowed = {"checks", "data", "provenance"}
    if own not in ("kernels", "fast", "models"):  # the plan decides whether a kernel runs
        allowed.discard("kernels")
    assert imported_rooms(path) <= allowed


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_file_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "the first line says what the file is for"


def test_the_forward_room_knows_nothing_of_gradients() -> None:
    for path in (SOURCE / "solve").glob("*.py"):
        text = path.read_text()
        assert "autograd." not in text, path
        assert "enable_grad" not in text, path
