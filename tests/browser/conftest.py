"""For tests in a real browser: Chromium, pages that record errors and requests, screenshots for the docs.

Playwright drives the Chromium of the system, through one Python package and without a download; Selenium would
need a driver whose version matches the browser. A test calls `visit(url)` or `visit(path)` and uses the page it
returns. An error on the console or a request that leaves this machine fails the test at its end.
"""

import functools
import http.server
import io
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
LARGEST = 200_000  # bytes of a screenshot
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
DESKTOP = {"viewport": {"width": 1280, "height": 800}}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="run `make test-browser`, which installs it")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is missing; run `make test-browser`, which installs it")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium)
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """visit(address, dark=False, phone=False): the Playwright page of a URL, or of a file given by its path."""
    faults: list[str] = []
    contexts = []

    def note_request(request: Any) -> None:
        if urlsplit(request.url).hostname not in (None, "", "127.0.0.1", "localhost"):
            faults.append(f"the page loads {request.url}")

    def note_message(message: Any) -> None:
        if message.type in ("error", "warning"):
            faults.append(f"{message.type} on the console: {message.text}")

    def open_page(address: str | Path, *, dark: bool = False, phone: bool = False) -> Any:
        scheme = "dark" if dark else "light"
        contexts.append(browser.new_context(color_scheme=scheme, **(PHONE if phone else DESKTOP)))
        page = contexts[-1].new_page()
        page.on("request", note_request)
        page.on("console", note_message)
        page.on("pageerror", lambda error: faults.append(f"exception on the page: {error}"))
        page.goto(address.resolve().as_uri() if isinstance(address, Path) else address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults, "\n".join(faults)


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[[Path], str]]:
    """serve(folder): the URL at which this machine serves a folder until the tests end."""
    servers = []

    def start(folder: Path) -> str:
        handler = functools.partial(_Quiet, directory=str(folder))
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """A file server that prints nothing."""

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="session")
def screenshot() -> Callable[..., Path]:
    """screenshot(page, name, full=False): write what the page shows, or all of it, to docs/images/NAME.png."""

    def write(page: Any, name: str, *, full: bool = False) -> Path:
        from PIL import Image

        shown = Image.open(io.BytesIO(page.screenshot(full_page=full, animations="disabled")))
        path = IMAGES / f"{name}.png"
        shown.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
        assert path.stat().st_size < LARGEST, f"{path} has {path.stat().st_size:,} bytes; show less of the page"
        return path

    return write
