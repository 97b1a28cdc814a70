"""Build the live page into build/demo, and serve it: a small network is trained, then Q, R and S are exported.

    python demo/build.py            build what is missing: a minute or two at first, then a second
    python demo/build.py --serve    the same, then serve it on http://127.0.0.1:8000

The network is trained on MNIST where its files are found (BANACH_DATA, the cache, or ../shared/data), else on
scikit-learn's digits. onnxruntime-web, which runs it in the browser, comes from the npm registry.
"""

import argparse
import functools
import http.server
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "demo"
PAGE = Path(__file__).resolve().parent / "page"
PACKED = ROOT.parent / "shared" / "data" / "unpack.py"
RUNTIME = "onnxruntime-web@1.30.0"
RUNTIME_FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
PER_CLASS = 3  # samples of every class that the page offers, from the test set


class DemoError(RuntimeError):
    """The page cannot be built or served; the message is one sentence that says what to do."""


@dataclass(frozen=True)
class Source:
    """The data to train on, and how a drawing becomes one of its images.

    The longer side of the drawing becomes `box` pixels, and its centre of mass moves to pixel `centre`, counted
    from 0, in both directions. `peak` is the value of white ink.
    """

    data: str
    flags: tuple[str, ...]
    box: int
    centre: float
    peak: int

    @property
    def command(self) -> list[str]:
        """The arguments of `banach` that decide what is learnt."""
        return ["train", "--model", "demo", "--data", self.data, *self.flags, *SCHEDULE, *THREADS]


# A digit of MNIST fills 20 of 28 pixels. One of scikit-learn's digits fills all 8; its largest value is 16 * 15.
MNIST = Source("mnist", ("--subset", "10000", "--epochs", "2", "--augment", "affine"), box=20, centre=14, peak=255)
DIGITS = Source("digits", ("--epochs", "15"), box=8, centre=3.5, peak=240)
SCHEDULE = ("--lr", "5e-3", "--schedule", "one-cycle", "--batch-size", "50")
THREADS = ("--threads", "1")  # steps are short: on a busy machine, threads wait for each other most of the time


def build(folder: Path | None = None) -> Path:
    """Build what is missing or out of date.

    Args:
        folder: where to build, build/demo by default; the trained run stays there, too.
    Returns:
        The folder to serve.
    Raises:
        DemoError: if onnxruntime-web cannot be downloaded, or the training failed.
    """
    folder = BUILD if folder is None else folder
    site = folder / "site"
    shutil.copytree(PAGE, site, dirs_exist_ok=True)
    if not (site / "runtime" / RUNTIME).exists():
        add_runtime(site / "runtime")
    if not has_network(site):
        add_network(folder, site)
    return site


def has_network(site: Path) -> bool:
    """Return True if the page has a network that was trained as below. This does not import torch."""
    path = site / "network.json"
    return path.exists() and json.loads(path.read_text())["command"] in (MNIST.command, DIGITS.command)


def add_runtime(folder: Path) -> None:
    """Download onnxruntime-web and keep the files for WebAssembly, with an empty file that names the version."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        kept = Path(temporary) / "kept"
        kept.mkdir()
        with tarfile.open(download(RUNTIME, temporary)) as packed:
            for name in RUNTIME_FILES:
                content: Any = packed.extractfile(f"package/dist/{name}")
                (kept / name).write_bytes(content.read())
        (kept / RUNTIME).touch()
        shutil.rmtree(folder, ignore_errors=True)
        kept.rename(folder)


def download(package: str, folder: str) -> Path:
    """Download a package from the npm registry, without what it depends on, and return the archive."""
    command = ["npm", "pack", package, "--silent", "--pack-destination", folder]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        advice = "install Node.js with npm, and check the network"
        raise DemoError(f"npm could not download {package} ({reason}); {advice}") from None
    (archive,) = Path(folder).glob("*.tgz")
    return archive


def add_network(folder: Path, site: Path) -> None:
    """Train a network on the best data at hand, and write its parts and samples; network.json comes last."""
    data_dir = find_mnist(folder)
    source = DIGITS if data_dir is None else MNIST
    (site / "network.json").unlink(missing_ok=True)
    register_network()
    train(source, folder / "run", data_dir)
    export_parts(source, folder / "run", site, data_dir)


def find_mnist(folder: Path) -> Path | None:
    """Return the folder of MNIST, unpacked if need be, or None."""
    from banach import data
    from banach.data.dataset import find, roots

    mnist = data.get("mnist")
    try:
        places = (*roots(mnist), folder / "data")
    except data.DataError as error:
        raise DemoError(str(error)) from None
    for unpack in (PACKED.exists(), False):
        with suppress(data.DataError):
            return find(mnist, "train", places)[0].parent
        if unpack:
            command = [sys.executable, str(PACKED), str(places[-1]), "mnist"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return None


def register_network() -> None:
    """Register the network "demo": 16 channels of half the image's size, and one residual block in R."""
    from torch import nn

    from banach.models import register
    from banach.models.blocks import ConvPair, Image, LatentResNet, Parts

    def parts(image: "Image", classes: int) -> "Parts":
        channels, height, width = image
        linear = nn.Linear(16 * (height // 2) * (width // 2), classes)
        return Parts(
            Q=ConvPair(channels, 16, pools=(2, 1)),
            R=LatentResNet(16, blocks=1, gamma=0.5),
            S=nn.Sequential(nn.Dropout2d(0.1), nn.Flatten(), linear),
        )

    about = "the network of the live page: latent 16x14x14 on MNIST"
    register("demo", parts, description=about, image=(1, 28, 28), channels_last=True, overwrite=True)


def train(source: Source, run: Path, data_dir: Path | None) -> None:
    """Train the network by `banach train`."""
    from banach.cli.app import main

    shutil.rmtree(run, ignore_errors=True)
    flags = ["--device", "cpu", "--no-tensorboard", "--no-monitor", "--out", str(run)]
    if main([*source.command, *flags, *([] if data_dir is None else ["--data-dir", str(data_dir)])]):
        raise DemoError(f"the network of the demo was not trained; see the lines above, and {run}")


def export_parts(source: Source, run: Path, site: Path, data_dir: Path | None) -> None:
    """Write Q.onnx, R.onnx and S.onnx, the samples, and network.json, which describes them."""
    import torch

    import banach
    from banach.cli.shared import open_run
    from banach.provenance import write_json

    opened: Any = open_run(run, "cpu")
    net, images = opened.net, opened.settings.load("test", data_dir)
    d = images.normalise(images.pixels[:2])
    with torch.no_grad():
        v = net.Q(d)
    for name, example in (("Q", d), ("R", (torch.zeros_like(v), v)), ("S", v)):
        banach.export(getattr(net, name), example, site / f"{name}.onnx")
    tested = opened.run.test()
    description = {
        "title": tested["title"],
        "accuracy": tested["totals"]["accuracy"],
        "tested": tested["count"],
        "parameters": sum(p.numel() for p in net.parameters()),
        "mean": images.mean[0],
        "std": images.std[0],
        "size": images.shape[1],
        "box": source.box,
        "centre": source.centre,
        "peak": source.peak,
        "latent": v.shape[1:],
        "samples": samples(images),
        "command": source.command,
    }
    write_json(site / "network.json", description)


def samples(images: Any) -> list[list[list[int]]]:
    """Return the first images of every class of the test set: one list of pixel values per image."""
    first = [(images.labels == label).nonzero()[:PER_CLASS, 0] for label in range(len(images.classes))]
    return [images.pixels[index].flatten(1).tolist() for index in first]


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files that the browser asks for again when they have changed."""

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def serve(site: Path, port: int) -> None:
    """Serve the page to this machine until Ctrl-C."""
    handler = functools.partial(_Handler, directory=str(site))
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        advice = "choose another: make demo PORT=8080"
        raise DemoError(f"cannot serve on port {port} ({error.strerror}); {advice}") from None
    print(f"open http://127.0.0.1:{port} (Ctrl-C stops)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main() -> int:
    """Build, and serve if asked to; return the exit code."""
    parser = argparse.ArgumentParser(description="Build the live page, and serve it on this machine.")
    parser.add_argument("--serve", action="store_true", help="serve the page after the build")
    parser.add_argument("--port", type=int, default=8000, help="port on 127.0.0.1 [8000]")
    options = parser.parse_args()
    try:
        site = build()
        if options.serve:
            serve(site, options.port)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
