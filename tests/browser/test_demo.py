"""The live page in Chromium: a drawn digit is read, every control does what it says, the solvers are banach's."""

import itertools
import json
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import demo.build
from banach import Anderson, Picard, Tolerance
from banach.cli.shared import open_run
from banach.models import registry
from demo.build import BUILD, DemoError, build, register_network

pytestmark = pytest.mark.browser

STEPS = re.compile(r"Picard: (\d+) steps\. Anderson: (\d+) steps")


@pytest.fixture(scope="module")
def url(serve: Callable[[Path], str]) -> str:
    """The address of the page, built if it was not."""
    return serve(build())


@pytest.fixture(scope="module")
def about(url: str) -> dict[str, Any]:
    return json.loads((BUILD / "site" / "network.json").read_text())


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of models that is restored."""
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))


@pytest.fixture
def page(visit: Callable[..., Any], url: str) -> Any:
    """The page on a desktop, without animation."""
    return opened(visit, url)


def opened(visit: Callable[..., Any], url: str, **options: bool) -> Any:
    """Return the page without animation, when its first sample is shown."""
    page = visit(url, **options)
    page.emulate_media(reduced_motion="reduce")
    settled(page)
    return page


def settled(page: Any) -> None:
    page.wait_for_selector("body[data-state=settled]")


def sample(page: Any, label: int) -> None:
    """Press a button of the samples."""
    page.get_by_role("button", name=f"Sample of a {label}").click()
    settled(page)


def steps(page: Any) -> tuple[int, int]:
    """Return the steps of Picard and of Anderson, as the page says them."""
    found = STEPS.search(page.locator("#verdict").inner_text())
    assert found, page.locator("#verdict").inner_text()
    return int(found[1]), int(found[2])


def latent(page: Any) -> str:
    """Return the mosaic that is shown."""
    return page.locator("#mosaic").evaluate("canvas => canvas.toDataURL()")


def shown_step(page: Any) -> int:
    return int(page.locator("#step").input_value())


def set_eps(page: Any, power: float) -> None:
    page.locator("#eps").fill(str(power))
    settled(page)


def draw(page: Any, strokes: Iterable[Sequence[tuple[float, float]]]) -> None:
    """Clear the drawing area and move the mouse along strokes, whose points are (x, y) in the unit square."""
    page.get_by_role("button", name="Clear").click()
    box = page.locator("#pad").bounding_box()
    for stroke in strokes:
        for number, (x, y) in enumerate(stroke):
            page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
            if number == 0:
                page.mouse.down()
        page.mouse.up()
    settled(page)


def rows_of_ink(image: np.ndarray) -> Iterator[list[tuple[float, float]]]:
    """Yield strokes from left to right along the ink of every row of an image."""
    for row, line in enumerate(image > 0.75 * image.max()):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], line.astype(int), [0]])))
        for start, end in edges.reshape(-1, 2):
            y = (row + 0.5) / len(image)
            yield [((start + 0.5) / len(line), y), ((end - 0.5) / len(line), y)]


def arc(x: float, y: float, width: float, height: float, turn: tuple[int, int]) -> list[tuple[float, float]]:
    """Return points on an ellipse around (x, y), between two angles in degrees; 90 is down."""
    angles = np.radians(np.linspace(*turn, 17))
    return [*zip(x + width * np.cos(angles), y + height * np.sin(angles), strict=True)]


BY_HAND = {
    0: [arc(0.5, 0.5, 0.22, 0.33, (-90, 270))],
    2: [[*arc(0.5, 0.32, 0.2, 0.17, (-180, 20)), (0.3, 0.82), (0.72, 0.82)]],
    4: [[(0.55, 0.15), (0.28, 0.58), (0.75, 0.58)], [(0.62, 0.4), (0.62, 0.87)]],
    5: [[(0.7, 0.16), (0.36, 0.16), (0.34, 0.45), *arc(0.48, 0.63, 0.22, 0.2, (-120, 140))]],
    7: [[(0.28, 0.18), (0.72, 0.18), (0.45, 0.85)]],
}


def test_real_digits_drawn_with_the_mouse_are_read(page: Any, about: dict[str, Any]) -> None:
    """One of every class; the network itself errs in 2 of 100, and one of these is hard to read."""
    if about["size"] < 28:
        pytest.skip("the page was built without MNIST; these rows of ink would have gaps")
    right = 0
    for label, images in enumerate(about["samples"]):
        draw(page, rows_of_ink(np.array(images[0]).reshape(about["size"], -1)))
        right += page.locator("#answer").inner_text() == str(label)
        picard, anderson = steps(page)
        assert 1 < anderson < picard
        assert page.locator("#step-text").inner_text() == f"step {picard} of {picard}"
    assert right >= 9


@pytest.mark.parametrize("digit", BY_HAND)
def test_digits_drawn_by_hand_are_read(digit: int, page: Any) -> None:
    draw(page, BY_HAND[digit])
    assert page.locator("#answer").inner_text() == str(digit)


def test_without_mnist_it_learns_the_digits_of_scikit_learn(
    visit: Callable[..., Any],
    url: str,
    serve: Callable[[Path], str],
    models: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo.build, "find_mnist", lambda folder: None)
    shutil.copytree(BUILD / "site" / "runtime", tmp_path / "site" / "runtime")
    page = opened(visit, serve(build(tmp_path)))
    assert "Trained by banach on digits (scikit-learn)" in page.locator("#about").inner_text()
    for digit, strokes in BY_HAND.items():
        draw(page, strokes)
        assert page.locator("#answer").inner_text() == str(digit)


def test_what_cannot_be_built_or_served_gets_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(demo.build, "BUILD", tmp_path)
    monkeypatch.setattr(sys, "argv", ["build.py", "--serve", "--port", "0"])
    assert demo.build.main() == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"demo: npm could not download onnxruntime-web.*; install Node.js.*\n", said)
    assert not list(tmp_path.rglob("*.wasm"))
    with socket.create_server(("127.0.0.1", 0)) as busy, pytest.raises(DemoError, match="make demo PORT=8080"):
        demo.build.serve(tmp_path, busy.getsockname()[1])


def test_eps_moves_the_steps(page: Any) -> None:
    sample(page, 3)
    counts = []
    for power in (-2, -4, -6):
        set_eps(page, power)
        counts.append(steps(page))
    for one, other in itertools.pairwise(counts):
        assert one[0] < other[0]
        assert one[1] < other[1]


def test_the_tolerance_line_can_be_dragged(page: Any) -> None:
    sample(page, 3)
    page.locator("#residual").scroll_into_view_if_needed()
    before, box = steps(page), page.locator("#residual").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 0.3 * box["height"], steps=5)
    page.mouse.up()
    settled(page)
    assert steps(page) < before


def test_all_starts_lead_to_the_same_answer(page: Any) -> None:
    assert page.get_by_role("radio", name="previous").is_disabled()  # there is no earlier drawing yet
    sample(page, 5)
    set_eps(page, -6)
    answers, starts = [], set()
    for start in ("zeros", "random", "previous"):
        page.get_by_role("radio", name=start).check()
        settled(page)
        answers.append([float(share[:-1]) for share in page.locator("#bars .value").all_inner_texts()])
        page.locator("#step").fill("0")
        starts.add(latent(page))
    assert len(starts) == 3
    np.testing.assert_allclose(answers[1:], [answers[0]] * 2, atol=0.15)  # per cent, cut to one decimal


def test_every_step_can_be_shown(page: Any) -> None:
    """The scrubber shows the latent and the probabilities of every step, those of the chosen solver."""
    sample(page, 8)
    picard, anderson = steps(page)
    shown = set()
    for step in range(4):
        page.locator("#step").fill(str(step))
        shown.add(latent(page))
    assert len(shown) == 4
    page.get_by_role("radio", name="Anderson").check()
    settled(page)
    assert page.locator("#step-text").inner_text() == f"step {anderson} of {anderson}"
    page.get_by_role("radio", name="Picard").check()
    settled(page)
    assert page.locator("#step-text").inner_text() == f"step {picard} of {picard}"


def test_the_steps_are_played_and_can_be_paused(visit: Callable[..., Any], url: str) -> None:
    page = visit(url)
    settled(page)  # it has played the first sample
    last = steps(page)[0]
    assert shown_step(page) == last
    page.clock.install(time=0)
    page.clock.pause_at(1)
    page.get_by_role("button", name="Play").click()
    assert shown_step(page) == 0
    page.clock.run_for(700)
    page.get_by_role("button", name="Pause").click()
    paused = shown_step(page)
    assert 0 < paused < last
    page.clock.run_for(5000)
    assert shown_step(page) == paused
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(5000)
    assert shown_step(page) == last


def test_it_works_by_keyboard_and_clears(page: Any) -> None:
    page.get_by_role("button", name="Sample of a 0").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    settled(page)
    assert page.locator("#answer").inner_text() == "1"
    page.get_by_role("button", name="Clear").press("Enter")
    page.wait_for_selector("body[data-state=ready]")
    assert page.locator("#answer").inner_text() == "?"


def test_touch_draws_on_a_phone(visit: Callable[..., Any], url: str) -> None:
    page = opened(visit, url, phone=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("#pad").tap()
    settled(page)
    assert page.locator("#answer").inner_text() != "?"


SOLVE = """async (images) => {
    const [{ Network }, { SOLVERS, solve }] = [await import("./network.js"), await import("./solve.js")];
    const net = await Network.load(), found = [];
    for (const image of images) {
        const T = net.T(await net.Q(image)), zeros = new Float32Array(net.latentSize), row = {};
        for (const [name, solver] of Object.entries(SOLVERS)) {
            const { iterates, residuals } = await solve(T, zeros, solver(), { eps: 1e-5, maxSteps: 60 });
            row[name] = { steps: residuals.length, output: (await net.probabilities([iterates.at(-1)]))[0] };
        }
        found.push(row);
    }
    return found;
}"""


@torch.no_grad()
def test_the_solvers_of_the_page_are_those_of_banach(page: Any, about: dict[str, Any], models: None) -> None:
    """Step counts within one, since the page sums in float64; probabilities up to the tolerance."""
    register_network()
    net: Any = open_run(BUILD / "run", "cpu").net
    images = torch.tensor(about["samples"], dtype=torch.float32).flatten(0, 1)
    rows = page.evaluate(SOLVE, (images / about["peak"]).tolist())
    d = (images / 255 - about["mean"]) / about["std"]
    net.tolerance = Tolerance(atol=1e-5, max_steps=60)
    for name, solver in (("picard", Picard()), ("anderson", Anderson())):
        net.solver = solver
        scores, found = net(d.view(-1, 1, about["size"], about["size"]), solution=True)
        counted = torch.tensor([row[name]["steps"] for row in rows])
        assert found.converged.all()
        assert (counted - found.steps).abs().max() <= 1
        output = torch.tensor([row[name]["output"] for row in rows])
        torch.testing.assert_close(output, scores.softmax(1), atol=1e-3, rtol=0)


def test_a_drawing_is_scaled_and_centred_like_the_data(page: Any, about: dict[str, Any]) -> None:
    """Samples that are painted large and read back are nearly themselves; a small square fills the box."""
    read = """async (images) => {
        const { preprocess } = await import("./preprocess.js"), { Pad } = await import("./pad.js");
        const about = await (await fetch("network.json")).json();
        const pad = new Pad(Object.assign(document.createElement("canvas"), { width: 280, height: 280 }), () => 0);
        return images.map((image) => {
            pad.paint(image, Math.sqrt(image.length));
            return Array.from(preprocess(pad.ink(), 280, about));
        });
    }"""
    samples = np.array(about["samples"], float).reshape(-1, about["size"] ** 2) / about["peak"]
    back = np.array(page.evaluate(read, samples.tolist()))
    alike = [np.corrcoef(one, other)[0, 1] for one, other in zip(samples, back, strict=True)]
    assert np.median(alike) > 0.95
    corner = np.zeros((28, 28))
    corner[20:26, 2:8] = 1
    (image,) = np.array(page.evaluate(read, [corner.flatten().tolist()])).reshape(-1, about["size"], about["size"])
    rows, columns = np.nonzero(image > 0.1)
    assert np.ptp(rows) + 1 == np.ptp(columns) + 1 == about["box"]
    assert max(abs(rows.mean() - about["centre"]), abs(columns.mean() - about["centre"])) <= 0.5


def test_the_cobweb_shows_where_the_toy_problem_converges(page: Any) -> None:
    assert page.locator("#cobweb .attracts").count() == 1
    assert page.locator("#cobweb .web").get_attribute("points")
    read = "async (d) => (await import('./toy.js')).fixedPoints(d).map(({ y }) => y)"
    for d in (-0.5, 0.0, 0.4, 0.6):
        roots = np.roots([1, 0, 0, 0, -1, d])
        np.testing.assert_allclose(page.evaluate(read, d), np.sort(roots[abs(roots.imag) < 1e-9].real), atol=1e-9)
    verdict = page.locator("#toy-verdict")
    assert verdict.inner_text().startswith("Converges in")
    page.locator("#y0").fill("1")
    assert verdict.inner_text().startswith("Diverges. Starts between")
    page.locator("#d").fill("0.6")
    assert "every start diverges" in verdict.inner_text()
    assert page.locator("#cobweb .attracts").count() == 0
    page.locator("#d").fill("0.2")
    page.locator("#cobweb").click()  # its centre is a start of 0
    assert abs(float(page.locator("#y0").input_value())) < 0.05
    assert verdict.inner_text().startswith("Converges in")


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast(dark: bool, visit: Callable[..., Any], url: str) -> None:
    page = opened(visit, url, dark=dark)
    read = "name => getComputedStyle(document.body).getPropertyValue(name).trim().split(' ').map(Number)"

    def luminance(name: str) -> float:
        c = np.array(page.evaluate(read, name)) / 255
        return float(np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722])

    pairs = [(text, ground) for text in ("ink", "quiet", "accent") for ground in ("card", "page")]
    for text, ground in [*pairs, ("on-accent", "accent")]:
        low, high = sorted([luminance(f"--{text}-rgb"), luminance(f"--{ground}-rgb")])
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def test_screenshots(visit: Callable[..., Any], url: str, screenshot: Callable[..., Path]) -> None:
    screenshot(opened(visit, url), "demo")
    screenshot(opened(visit, url, dark=True), "demo-dark")
    page = opened(visit, url, phone=True)
    page.locator(".latent").evaluate("card => card.scrollIntoView()")
    screenshot(page, "demo-phone")
