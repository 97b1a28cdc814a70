"""`banach report`: the page says what the run wrote and what diagnose measures, and loads nothing."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from banach import ImplicitNetwork, data, models
from banach.cli.app import main
from banach.cli.diagnose import measure
from banach.cli.shared import open_run
from banach.diagnose import verdict
from banach.train import Run, Settings, fit
from cli.conftest import SMALL, refused
from train.parts_train import NO_FIXED_POINT, Contraction, epoch, totals

VOID = {"meta", "img", "br"}
WORDS = {"None": "-", "True": "yes", "False": "no"}
SECTIONS = ["Summary", "Learning curves", "Depth and residual over training", "Measured on the validation images"]


class Page(HTMLParser):
    """A page that is nested properly: its headings, the rows of its tables, its images and its other text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source, self.open = path.read_text(encoding="utf-8"), list[str]()
        self.headings, self.rows, self.images = list[str](), list[list[str]](), list[str]()
        self.labels, self.words = list[str](), ""
        self.feed(self.source)
        assert self.open == []
        self.text = " ".join(self.words.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.labels += [str(given["aria-label"])] if "aria-label" in given else []
        if tag == "img":
            self.images.append(f"{given['alt']}")
        if tag in VOID:
            return
        self.open.append(tag)
        self.headings += [""] if tag in ("h1", "h2", "h3") else []
        self.rows += [[]] if tag == "tr" else []
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag == "path"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words += f"{data} "
        if {"h1", "h2", "h3"} & {*self.open}:
            self.headings[-1] += data
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += " ".join(data.split()) + (" " if data.strip() else "")

    def row(self, name: str) -> list[str]:
        """Return the other cells of the first row that begins with a name."""
        return next([cell.strip() for cell in row[1:]] for row in self.rows if row and row[0].strip() == name)


def report(*arguments: Any, samples: int = 8) -> None:
    assert main(["report", *map(str, arguments), "--samples", str(samples), "--device", "cpu"]) == 0


def test_the_page_of_a_run(run: Path, capsys: Any) -> None:
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    report(run)
    assert capsys.readouterr() == (f"measuring run on 180 validation images\nreport: {run / 'report.html'}\n", "")
    assert {file: file.read_bytes() for file in before} == before
    page, opened = Page(run / "report.html"), open_run(run, "cpu")
    assert [one for one in page.headings if one in SECTIONS] == SECTIONS
    assert page.headings[0] == "run"

    test, last = json.loads((run / "test.json").read_text()), Run.open(run).metrics()[-1]
    right = round(test["totals"]["accuracy"] * 360)
    assert f"{test['totals']['accuracy']:.2%} {right} of 360 images Test accuracy" in page.text
    assert page.row("Loss, last epoch") == [f"{last.validation_loss:.4g} validation; train {last.loss:.4g}"]
    assert "The training loss includes label smoothing; the validation loss does not." in page.text
    net: Any = opened.net
    parts = [sum(p.numel() for p in part.parameters()) for part in (net, net.Q, net.R)]
    assert page.row("Parameters")[0].startswith("{:,} Q {:,}, R {:,}, S ".format(*parts))
    for name, value in opened.run.settings.to_dict().items():
        shown = page.row(name.replace("_", " "))
        assert shown == ["kind cosine" if name == "schedule" else WORDS.get(str(value), str(value))]
    assert page.row("CUDA graph") == ["no, the weights are on the CPU"]
    assert page.row("device")  # of the environment

    held = data.load("digits", "validation")
    with torch.no_grad():
        chances = net(held.normalise(held.pixels)).double().softmax(1)
    guesses, order = chances.argmax(1), chances[torch.arange(180), held.labels].argsort()
    for label in range(10):
        counts = [int(((held.labels == label) & (guesses == guess)).sum()) for guess in range(10)]
        assert page.row(str(label)) == [str(count or "·") for count in counts]
    assert [int(alt.split()[1].rstrip(",")) for alt in page.images][-10:] == order[:10].tolist()


def test_the_figures_are_those_of_diagnose(run: Path) -> None:
    report(run, samples=12)
    page, opened = Page(run / "report.html"), open_run(run, "cpu")
    found = measure(opened.net, data.load("digits", "validation").subset(12), opened.settings.label_smoothing)
    sigma, kept = found.contraction.sigma, 12 - found.contraction.violations
    shown = f"{float(sigma.max()):.3f} of 12 validation images; T contracts on {kept}"
    assert page.row("Largest singular value of dT/du") == [shown]
    assert verdict(found.contraction, found.gradients["JFB"]) in page.text
    for name, one in found.gradients.items():
        assert page.row(name) == [f"{one.cosine:.3f}", f"{one.cosine:.3f}", f"{one.ratio:.3g}"]
    steps = found.contraction.solution.steps
    assert f"{int(steps.min())} steps" in page.text
    assert f"{int(steps.max())} steps" in page.text
    label = next(one for one in page.labels if one.startswith("Residual by step; image "))
    easiest = found.trace[:, int(steps.argsort(stable=True)[0])]
    assert f" {float(easiest[0]):.3g} to {float(easiest[2 * int(steps.max()) - 1]):.3g};" in label


def test_several_batches_are_summed_up(run: Path) -> None:
    report(run, samples=20)
    page = Page(run / "report.html")
    assert "of 20 validation images" in page.row("Largest singular value of dT/du")[0]
    mean, least, _ = map(float, page.row("JFB"))
    assert least < mean
    assert f"{mean:.3f} JFB, mean of 2 batches, least {least:.3f}" in page.text


@pytest.mark.gpu
def test_a_gpu_measures_the_same(run: Path) -> None:
    report(run, "--out", "cpu.html")
    assert main(["report", str(run), "--samples", "8", "--out", "gpu.html", "--device", "cuda"]) == 0
    pages = [Page(Path(name)) for name in ("cpu.html", "gpu.html")]
    sigmas = [float(page.row("Largest singular value of dT/du")[0].split()[0]) for page in pages]
    assert sigmas[0] == pytest.approx(sigmas[1], abs=2e-3)
    assert pages[0].images == pages[1].images


def test_nothing_is_loaded_nothing_runs_and_nothing_is_diagnosed_if_not_wanted(run: Path) -> None:
    name = "<img src=x onerror=alert(1)>&\"'"
    hostile = run.rename(run.parent / name)
    report(hostile, samples=0)
    page = Page(hostile / "report.html")
    assert "<img src=x" not in page.source
    assert page.headings[0] == name
    assert "Contraction and gradient were not measured" in page.text
    assert {"Confusion matrix", "Hardest images"} <= {*page.headings}
    assert "Contraction" not in page.headings
    tags = re.sub(r"&lt;.*?&gt;", "", page.source)  # without that name, which is text
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link|<iframe|\son\w+=", tags)
    assert set(re.findall(r'src="([^"]{15})', page.source)) == {"data:image/png;"}
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page.source


def test_an_ode_has_steps_without_a_fixed_point(here: Path) -> None:
    made = Run.create("ode", Settings(epochs=2, device="cpu"))
    made.write_metrics([epoch(number, **{**NO_FIXED_POINT, "depth": 26.0, "max_depth": 32}) for number in (1, 2)])
    report("ode")
    labels = " ".join(Page(Path("ode/report.html")).labels)
    assert "Solver steps by epoch; train, mean 26 to 26; train, most 32 to 32" in labels
    assert "Residual" not in labels


def test_two_runs_are_compared(run: Path, capsys: Any) -> None:
    settings = Settings(data="digits", model="digits", max_steps=0, epochs=3, lr=0.125, device="cpu", whole=True)
    other = Run.create("twin", settings)
    other.write_metrics([epoch(number, **NO_FIXED_POINT) for number in (1, 2)])
    other.write_test({"totals": totals(converged=None), "title": "t", "count": 360})
    report(run, other.path, run)
    assert capsys.readouterr().out.endswith("report: report.html\n")
    page = Page(Path("report.html"))
    assert page.headings[0] == "run · twin"
    assert page.row("Test accuracy")[1] == "98.77% 356 of 360 images"
    assert page.row("Training time")[1] == "4.5 s 2 of 3 epochs, 2.25 s each"
    assert page.row("lr") == ["0.007", "0.125"]  # the first such row is in the table of what differs
    differing = page.rows[page.rows.index(["figure ", "run ", "twin "]) + 1 :]
    names = [row[0].strip() for row in differing[differing.index(["name ", "run ", "twin "]) + 1 :]]
    assert {"max steps", "lr", "whole"} <= {*names[: names.index("name")]}
    assert "model" not in names[: names.index("name")]
    assert page.row("Solver steps")[1] == "-"
    assert "explicit twin" in page.row("Tolerance")[1]
    assert re.search("Loss, validation by epoch; run .* to .*; twin 2.125 to 1.062", "\n".join(page.labels))
    assert "no run in" not in page.text
    assert "twin has no checkpoint yet" in page.text  # so nothing was measured


@pytest.mark.parametrize(("model", "flags"), [("digits", ["--max-steps", "0"]), ("linear", [])])
def test_explicit_networks(model: str, flags: list[str]) -> None:
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    models.register("linear", lambda image, classes: linear, description="for a test", image=(1, 8, 8))
    assert main([*SMALL, "--model", model, "--epochs", "1", *flags, "--out", "r"]) == 0
    report("r")
    page = Page(Path("r/report.html"))
    assert "The network is explicit: there is no fixed point to measure." in page.text
    assert {"Confusion matrix", "Hardest images"} <= {*page.headings}
    assert not {"Contraction", "Quality of the gradient", "Convergence of single images"} & {*page.headings}
    assert "There are no solves to show" in page.text
    assert not re.search(r"\d+ steps", page.text.partition("Hardest images")[2].partition("Settings")[0])


def test_without_the_data(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    report(run)
    page = Page(run / "report.html")
    assert "Nothing was measured: " in page.text
    assert "scikit-learn" in page.text
    assert page.images == []
    assert page.row("Parameters")[0].startswith("17,986 Q")
    assert "Loss by epoch" in " ".join(page.labels)


def test_a_run_of_fit_on_your_own_data_and_loss(here: Path) -> None:
    torch.manual_seed(0)
    net = ImplicitNetwork(nn.Linear(3, 12), Contraction(12), nn.Linear(12, 1))
    x = torch.randn(16, 3)
    batches = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    made = Run.create("mine", Settings(epochs=3, device="cpu"))
    metrics = {"largest <error>": lambda output, target: (output - target).abs().max()}
    done = fit(net, batches, batches, made.settings, loss=F.mse_loss, metrics=metrics, run=made)
    report("mine")
    page = Page(Path("mine/report.html"))
    assert "does not name its data and model" in page.text
    labels = " ".join(page.labels)
    first, last = done.epochs[0].metrics["largest <error>"], done.last.metrics["largest <error>"]
    assert f"largest <error> by epoch; train {first:.4g} to {last:.4g}" in labels
    assert "Accuracy" not in labels
    assert "Test accuracy" not in page.text


def test_almost_all_is_not_all(here: Path) -> None:
    made = Run.create("r", Settings(epochs=2, device="cpu"))
    made.write_metrics([epoch(1, loss=float("nan"), residual=float("inf"), converged=None), epoch(2)])
    made.write_test({"totals": totals(accuracy=0.99999, converged=0.99999), "title": "t", "count": 360_000})
    report("r")
    page = Page(Path("r/report.html"))
    assert "99.99% 359,996 of 360,000 images" in page.text
    assert "99.9% test images Samples converged" in page.text
    assert "100%" not in page.text.partition("Learning curves")[0]


def test_bad_input_is_refused_in_one_sentence(run: Path, capsys: Any) -> None:
    Path("notes.html").write_text("mine")
    Path("folder.html").mkdir()
    for arguments, said in (
        (["nowhere"], "no run in nowhere"),
        ([run, "--out", "page.png"], "use a name that ends in .html"),
        ([run, "--out", "notes.html"], "is not a report"),
        ([run, "--out", "folder.html"], "folder.html"),
        ([run, "--samples", "1"], "samples, unless 0, must be a whole number, at least 2, got 1"),
    ):
        assert refused(["report", *map(str, arguments)], capsys, said) == ""
    assert Path("notes.html").read_text() == "mine"
    assert not (run / "report.html").exists()


def test_a_damaged_environment_is_left_out(here: Path) -> None:
    made = Run.create("r", Settings(epochs=1, device="cpu"))
    for text in ("{", "[1]", '{"plan": "abc", "versions": [1, {}]}', "{}"):
        (made.path / "environment.json").write_text(text)
        report("r")
        assert "Plan" not in Page(Path("r/report.html")).source
