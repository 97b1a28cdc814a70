"""The docs site in Chromium: the front page, a recipe and a page of the reference are shown as they should be."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def url(serve: Callable[[Path], str]) -> str:
    """The address of the site, built as `make docs` does."""
    pytest.importorskip("zensical", reason="run `make test-browser`, which installs it")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return serve(ROOT / "build" / "site")


def test_the_front_page_shows_its_figure_and_its_example(visit: Callable[..., Any], url: str) -> None:
    page = visit(f"{url}/index.html")
    assert page.locator("h1").inner_text().startswith("banach")
    assert page.locator("article img").first.evaluate("image => image.naturalWidth") > 0
    assert "net = ImplicitNetwork(" in page.locator("article pre").nth(1).inner_text()
    page.locator("article").get_by_role("link", name="Quick start").first.click()
    assert page.locator("h1").inner_text().startswith("Quick start")


def test_a_recipe_shows_its_figure_and_its_script(visit: Callable[..., Any], url: str) -> None:
    page = visit(f"{url}/cookbook/tabular.html", dark=True)
    assert page.locator("article img").evaluate("image => image.naturalWidth") > 0
    assert "net = ImplicitNetwork(" in page.locator("article pre").last.inner_text()


@pytest.mark.parametrize("phone", [False, True])
def test_a_page_of_the_reference_lists_arguments(phone: bool, visit: Callable[..., Any], url: str) -> None:
    page = visit(f"{url}/reference/solve.html", phone=phone)
    assert page.locator('[id="banach.solve.solve"]').is_visible()
    assert page.locator("article table", has_text="z0").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
