"""`banach report`: one self-contained HTML page about a run, or one that compares several."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.progress import track
from torch import Tensor

from banach import checks
from banach.cli.console import console
from banach.cli.diagnose import Diagnosis, measure
from banach.cli.progress import is_terminal
from banach.cli.shared import DataDir, Device, Imports, argument, check_out, number, open_run, option, parameters
from banach.data import DataError
from banach.data.dataset import need
from banach.data.images import held_out
from banach.diagnose import Contraction, verdict
from banach.network import ImplicitNetwork
from banach.provenance import provenance, whole_file
from banach.train import Epoch, Run, RunError, Totals
from banach.train.plot import LEARNING, SOLVES, Chart, curves, histogram, line_chart

EPILOG = """\b
Examples:
  banach report runs/digits-1                       runs/digits-1/report.html
  banach report runs/digits-1 runs/digits-2 --out both.html"""

PAGE, FIRST = "report.html", b"<!doctype html><!-- banach report -->"
DIAGNOSED = 16  # images at a time
HARDEST, SINGLE = 10, 6  # images to show, images with a curve


@dataclass(frozen=True, eq=False)
class Reported:
    """A run, what it wrote, and what was measured on its validation images; `why` says what was not.

    The `diagnoses` are of the `chosen` images, a few at a time; `probabilities` and `steps` are of all `images`.
    """

    name: str
    run: Run
    epochs: tuple[Epoch, ...]
    test: Mapping[str, Any]
    environment: Mapping[str, Any]
    why: str = ""
    parameters: Mapping[str, int] = field(default_factory=dict)
    images: Any = None
    probabilities: Any = None
    steps: Tensor | None = None
    chosen: Sequence[int] = ()
    diagnoses: Sequence[Diagnosis] = ()

    @property
    def solved(self) -> Totals | None:
        """How solves went on the test images or, before the end, in the last epoch; None without a fixed point."""
        found = Totals(**self.test["totals"]) if self.test else self.epochs[-1] if self.epochs else None
        return None if found is None or found.converged is None else found

    @property
    def contraction(self) -> Contraction:
        """That of all chosen images; its solution is of the first ones."""
        found = [one.contraction for one in self.diagnoses]
        sigma, rate = (torch.cat([getattr(one, name).cpu() for one in found]) for name in ("sigma", "rate"))
        return replace(found[0], sigma=sigma, rate=rate)

    @property
    def confusions(self) -> Any:
        """Numbers of images by label and predicted class."""
        count = self.probabilities.shape[1]
        pairs = self.images.labels * count + self.probabilities.argmax(1)
        return pairs.bincount(minlength=count * count).view(count, count).tolist()

    @property
    def hardest(self) -> list[dict[str, Any]]:
        """The images whose label is least probable."""
        chances = self.probabilities.gather(1, self.images.labels[:, None])[:, 0]
        return [self.card(index) for index in chances.argsort()[:HARDEST].tolist()]

    @property
    def single(self) -> tuple[Chart | None, list[dict[str, Any]]]:
        """Residuals by step of some chosen images, from the easiest to the hardest, and these images."""
        steps = torch.cat([one.contraction.solution.steps.cpu() for one in self.diagnoses])
        order = steps.argsort(stable=True)[torch.linspace(0, len(steps) - 1, SINGLE).long().unique()].tolist()
        traces = [trace for one in self.diagnoses for trace in one.trace.T[:, : 2 * int(steps.max())].tolist()]
        lines = {f"image {self.chosen[k]}": list(enumerate(traces[k], 1)) for k in order}
        chart = line_chart("Residual", "step", lines, "log", (self.diagnoses[0].tolerance.atol, "tolerance"))
        return chart, [self.card(self.chosen[k]) for k in order]

    def card(self, index: int) -> dict[str, Any]:
        """Return an image with its label, prediction and solver steps."""
        chances, label = self.probabilities[index], int(self.images.labels[index])
        pixels, file = self.images.pixels[index].movedim(0, -1).squeeze(-1).numpy(), io.BytesIO()
        need("PIL.Image", "showing images").fromarray(pixels).save(file, "PNG")
        return {
            "number": index,
            "picture": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}",
            "label": self.images.classes[label],
            "guess": self.images.classes[int(chances.argmax())],
            "chance": float(chances[label]),
            "steps": None if self.steps is None else int(self.steps[index]),
        }


def report(
    runs: Annotated[list[Path], argument("Run directories.")],
    out: Annotated[Path | None, option("The page.  [RUN/report.html; of several: report.html]")] = None,
    samples: Annotated[int, number(int, "Validation images to diagnose, or 0.", show_default=True)] = 64,
    data_dir: DataDir = None,
    device: Device = "auto",
    modules: Imports = None,
) -> None:
    """Write one HTML page about a run: figures, curves, convergence, gradients, errors, settings.

    Several runs are compared. The newest weights are measured on the validation images; if these are missing, the
    page shows what the runs wrote. It needs no network access.
    """
    found = {path.resolve(): Run.open(path) for path in runs}
    page = out or (runs[0] if len(found) == 1 else Path()) / PAGE
    check_out(page, "the report is an HTML page", ".html", "a report", FIRST)
    samples = samples and checks.whole("samples, unless 0,", samples, 2)
    reported = []
    for path, run in found.items():
        name = path.name if len(found) == 1 else str(run.path)
        one = Reported(name, run, run.metrics(), run.test() or {}, run.environment())
        reported.append(_measure(one, samples, data_dir, device))
    with whole_file(page, binary=True) as file:
        file.write(render(reported).encode(errors="backslashreplace"))  # names of files that are not UTF-8
    console.print(f"report: {page}")


def _measure(one: Reported, samples: int, data_dir: Path | None, device: str) -> Reported:
    """Measure the newest weights of a run on its validation images."""
    try:
        opened = open_run(one.run.path, device)
        one = replace(one, parameters=parameters(opened.net))
        images = opened.load("validation", data_dir)
    except (RunError, DataError) as error:
        return replace(one, why=f"Nothing was measured: {error}.")
    console.print(f"measuring {one.name} on {len(images):,} validation images")
    probabilities, ends = opened.answers(images)
    one = replace(one, images=images, probabilities=probabilities, steps=ends[:, 0])
    if not isinstance(opened.net, ImplicitNetwork) or opened.net.tolerance.max_steps == 0:
        return replace(one, why="The network is explicit: there is no fixed point to measure.", steps=None)
    if samples == 0:
        return replace(one, why="Contraction and gradient were not measured: --samples 0.")
    chosen = held_out(images.labels.numpy(), min(samples, len(images))).tolist()
    parts = torch.tensor(chosen).chunk(math.ceil(len(chosen) / DIAGNOSED))
    shown = track(parts, "diagnosing", console=console, transient=True, disable=not is_terminal(console))
    batches = (images.take(part).to(opened.settings.torch_device) for part in shown)
    diagnoses = [measure(opened.net, batch, opened.settings.label_smoothing) for batch in batches]
    return replace(one, chosen=chosen, diagnoses=diagnoses)


def render(reported: Sequence[Reported]) -> str:
    """Return the page."""
    folder = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    pages.filters |= {"percent": percent, "commas": lambda count: f"{int(count):,}"}
    eps, runs = {one.run.settings.eps for one in reported}, {one.name: one.epochs for one in reported}
    own = dict.fromkeys(name for one in reported for epoch in one.epochs for name in epoch.metrics)
    tables = {"train": "metrics", "validation": "validation_metrics"}
    metrics = [(name, {kind: f"{table}.{name}" for kind, table in tables.items()}, "") for name in own]
    return pages.get_template(PAGE).render(
        runs=reported,
        settings=[one.run.settings.to_dict() for one in reported],
        learning=curves(runs, [*LEARNING, *metrics]),
        solves=curves(runs, SOLVES, eps=eps.pop() if len(eps) == 1 else None),
        histogram=histogram,
        verdict=verdict,
        written=provenance(),
    )


def percent(share: float, digits: int = 2) -> str:
    """Return a share as text; only all of them are 100%."""
    return "100%" if share == 1 else f"{min(share, 1 - 10.0 ** -(digits + 2)):.{digits}%}"
