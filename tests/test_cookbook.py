"""The recipes: each runs in its quick form and draws its figure, and keeps what it promises."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

Promises = dict[str, dict[str, tuple[float, float]]]
ROOT = Path(__file__).parent.parent
RECIPES = sorted(
    path.stem for path in (ROOT / "examples/cookbook").glob("*.py") if path.stem not in ("__init__", "recipe")
)
# What a quick run already shows; longer trainings are checked by the slow test.
PROMISES: Promises = {
    "quadratic_program": {"error of the gradient": (0, 1e-9), "largest violation": (0, 1e-9)},
    "ridge": {"error of the hyper-gradient": (0, 1e-6)},
    "control": {"plan against Riccati": (0, 1e-6)},
    "masked_transformer": {"change of scores by padding": (0, 1e-5)},
    "moving_scene": {"mean steps, Picard, previous frame": (1, 40), "mean steps, Picard, zeros": (60, 500)},
}
LEARNED: Promises = {
    "tabular": {"test accuracy": (0.93, 1)},
    "masked_transformer": {"accuracy": (0.95, 1)},
    "graph": {"accuracy with the graph": (0.8, 1), "accuracy without the graph": (0, 0.79)},
    "multiscale": {"test accuracy": (0.9, 1)},
    "inverse": {"error of the fixed point": (0, 0.02), "error of ridge": (0.025, 1)},
    "ridge": {"validation loss": (0, 0.5), "best shared": (0.8, 2)},
    "control": {"error of the weights": (0, 0.2)},
    "sudoku": {"boards solved, JFB": (0.4, 1), "boards solved, Neumann(3)": (0.4, 1)},
}


def run(recipe: str, tmp_path: Path, *, quick: bool) -> dict[str, float]:
    torch.manual_seed(0)
    numbers, figure = import_module(f"examples.cookbook.{recipe}").run(quick)
    path = import_module("examples.cookbook.recipe").save(figure, tmp_path / f"{recipe}.svg")
    assert path.stat().st_size > 3000
    return numbers


def keeps(numbers: dict[str, float], promises: dict[str, tuple[float, float]]) -> None:
    for name, (low, high) in promises.items():
        assert low <= numbers[name] <= high, f"{name}: {numbers[name]}, expected {low} to {high}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs(recipe: str, tmp_path: Path) -> None:
    keeps(run(recipe, tmp_path, quick=True), PROMISES.get(recipe, {}))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(LEARNED))
def test_a_recipe_learns(recipe: str, tmp_path: Path) -> None:
    keeps(run(recipe, tmp_path, quick=False), {**PROMISES.get(recipe, {}), **LEARNED[recipe]})


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_a_page_and_a_figure(recipe: str) -> None:
    page = (ROOT / "docs" / "cookbook" / f"{recipe}.md").read_text()
    assert f'--8<-- "examples/cookbook/{recipe}.py"' in page
    assert (ROOT / "docs" / "images" / "cookbook" / f"{recipe}.svg").stat().st_size > 3000
