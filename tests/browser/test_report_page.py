"""The page of `banach report` in Chromium: drawn completely, readable in both themes and on a phone, local."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from banach.cli.app import main

# The monitor warns that T does not contract everywhere; the page says so too.
pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore:The undamped iteration converges")]

# WCAG's contrast of a colour of the page with both backgrounds, the least one.
CONTRAST = """names => {
  const style = getComputedStyle(document.documentElement), pen = document.createElement('canvas').getContext('2d')
  const light = name => {
    pen.fillStyle = style.getPropertyValue(name)
    const parts = [1, 3, 5].map(k => parseInt(pen.fillStyle.slice(k, k + 2), 16) / 255)
    const [r, g, b] = parts.map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05
  }
  const ratio = (a, b) => Math.max(light(a), light(b)) / Math.min(light(a), light(b))
  return Math.min(...names.flatMap(name => ['--page', '--box'].map(ground => ratio(name, ground))))
}"""
COLOURS = ["--text", "--quiet", "--bad", *(f"--c{number}" for number in range(6))]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the defaults: 20 epochs."""
    path = tmp_path_factory.mktemp("runs") / "digits-1"
    assert main(["train", "--device", "cpu", "--no-tensorboard", "--out", str(path)]) == 0
    assert main(["report", str(path), "--device", "cpu"]) == 0
    return path


def test_everything_is_there(digits: Path, visit: Callable[..., Any], screenshot: Callable[..., Path]) -> None:
    page = visit(digits / "report.html")
    sections = page.locator("h2").all_inner_texts()
    assert sections[:3] == ["Summary", "Learning curves", "Depth and residual over training"]
    assert sections[3:] == ["Measured on the validation images", "Settings, environment, plan"]
    parts = ["Convergence of single images", "Contraction", "Quality of the gradient", "Confusion matrix"]
    assert page.locator("h3").all_inner_texts() == [*parts, "Hardest images"]
    for name in ("Summary", "Quality of the gradient", "Confusion matrix", "Settings", "Environment"):
        table = page.get_by_role("region", name=name, exact=True).locator("table")
        assert table.is_visible()
        assert table.locator("th[scope=col]").count() >= 2
    charts = page.locator(".chart > svg")
    assert charts.count() == 3 + 4 + 2
    assert all(chart.get_attribute("aria-label") for chart in charts.all())
    assert page.locator(".chart .line").first.bounding_box()["width"] > 100
    assert page.locator("circle title").first.text_content().startswith("train, epoch 1: ")
    assert page.locator("img").count() == 16
    assert page.evaluate("[...document.images].every(image => image.naturalWidth === 8 && image.alt)")
    loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(name.startswith("data:") for name in loaded)
    page.get_by_text("All epochs of digits-1").click()
    assert page.locator("details tbody tr").count() == 20
    page.locator("nav a", has_text="Measured").click()
    assert page.locator("#run-1").bounding_box()["y"] < 100
    page.evaluate("scrollTo(0, 0)")
    page.set_viewport_size({"width": 1280, "height": 1125})  # down to the first curves
    screenshot(page, "report")


@pytest.mark.parametrize("dark", [False, True])
def test_colours_can_be_read(
    dark: bool, digits: Path, visit: Callable[..., Any], screenshot: Callable[..., Path]
) -> None:
    page = visit(digits / "report.html", dark=dark)
    assert page.evaluate(CONTRAST, COLOURS) >= 4.5
    shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert shade == ("rgb(17, 22, 29)" if dark else "rgb(255, 255, 255)")
    if dark:
        page.evaluate("document.querySelector('#run-1').scrollIntoView()")
        screenshot(page, "report-dark")
    page.emulate_media(media="print")  # on white paper, whatever the theme
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_it_fits_a_phone(digits: Path, visit: Callable[..., Any], screenshot: Callable[..., Path]) -> None:
    page = visit(digits / "report.html", phone=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    matrix = page.get_by_role("region", name="Confusion matrix")
    assert matrix.evaluate("box => box.scrollWidth > box.clientWidth")  # the table scrolls in its box
    texts = page.locator(".chart > svg text")
    assert min(text.bounding_box()["height"] for text in texts.all()[:20]) >= 10
    screenshot(page, "report-phone")


def test_two_runs_in_one_page(digits: Path, visit: Callable[..., Any]) -> None:
    twin, out = digits.parent / "twin", digits.parent / "both.html"
    few = ["--max-steps", "0", "--epochs", "2", "--subset", "64", "--device", "cpu", "--no-tensorboard"]
    assert main(["train", *few, "--out", str(twin)]) == 0
    both = ["report", str(digits), str(twin), "--samples", "4", "--out", str(out)]
    assert main([*both, "--device", "cpu"]) == 0
    page = visit(out, phone=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    differing = page.get_by_role("region", name="Settings that differ").locator("tbody th")
    assert {"max steps", "epochs", "subset"} <= {*differing.all_inner_texts()}
    assert page.locator(".chart").first.locator(".legend li").count() == 2
