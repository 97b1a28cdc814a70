"""`banach train`: train a network from nothing, or resume a run; the test set is read once, at the end."""

import dataclasses
import inspect
import math
import re
import shlex
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from banach import data as registry
from banach.cli.console import console, table
from banach.cli.progress import Progress
from banach.cli.shared import DataDir, Imports, number, option, own_run, parameters, recorded, show_plot
from banach.data import Images
from banach.data.dataset import find, roots
from banach.provenance import from_plain, plain, provenance
from banach.train import Epoch, History, Position, Run, Scorer, Settings, Totals, evaluate, fit
from banach.train.distributed import Ranks, joined
from banach.train.plot import LEARNING, SOLVES, board, curves
from banach.train.run import PLOT
from banach.train.settings import GROUPS
from banach.train.state import DIGEST

BOARD = "tensorboard"
EPILOG = """Switches have a --no- form, such as --no-monitor. A settings file (--config) holds the same names:
epochs = 5, schedule = "steps:10,15:0.1"

\b
Examples:
  banach train                           scikit-learn's digits, on a CPU
  banach train --data mnist --epochs 3 --data-dir ~/data
  banach train --data cifar10 --backward implicit:anderson --device cuda
  banach train --resume runs/digits-1    continue where it stopped"""

KINDS = {"int": int, "float": float, "bool": bool}  # other settings are strings


def with_flags(command: Callable[..., int]) -> Callable[..., int]:
    """Replace **flags in the signature, which typer reads, by one option per setting."""
    *parameters, _ = inspect.signature(command, eval_str=True).parameters.values()
    group, keyword = "", inspect.Parameter.KEYWORD_ONLY
    for field in dataclasses.fields(Settings):
        group, about = GROUPS.get(field.name, group), field.metadata
        kind = KINDS.get(str(field.type).removesuffix(" | None"), str)
        if kind in (int, float):
            made: Any = Annotated[str | None, number(kind, about["help"], rich_help_panel=group)]
        else:
            made = Annotated[kind | None, option(about["help"], metavar=about["metavar"], rich_help_panel=group)]
        parameters.append(inspect.Parameter(field.name, keyword, default=None, annotation=made))
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@with_flags
def train(
    *,
    resume: Annotated[
        Path | None, option("Continue this run; on a CPU bit for bit the same.", metavar="RUN")
    ] = None,
    out: Annotated[Path | None, option("The run directory.  [runs/DATA-N, the next N]")] = None,
    config: Annotated[Path | None, option("A TOML file of settings; flags override it.")] = None,
    data_dir: DataDir = None,
    modules: Imports = None,
    tensorboard: Annotated[bool, typer.Option(help="Write curves for TensorBoard.")] = True,
    **flags: Any,
) -> int:
    """Train an implicit network; the test set is read once, at the end.

    Settings are those of the model's recipe (banach models NAME), then of --config, then flags.
    """
    if resume is None:
        made, settings = None, recorded(Settings.choose(flags, config), modules)
    elif out or config:
        raise ValueError(f"{resume} has its directory and its settings already; leave out --out and --config")
    else:
        made = own_run(resume)
        settings = made.settings.changed(flags)
        made.check(settings)  # only a few settings may differ
    with joined(settings) as ranks:
        console.quiet = not ranks.first
        # Before the directory is made: a refused command leaves nothing.
        net, images, validation = _parts(settings, data_dir)
        ranks.check(net, len(images), settings)
        name = str(settings.data)
        path = made.path if made else ranks.from_first(lambda: Run.create(out or _next_free(name), settings).path)
        run = Run(path, settings)
        history = _fit(run, net, images, validation, run.path / BOARD if tensorboard and ranks.first else None)
        if history.stopped_by is None:
            finish(run, net, images.title, history, data_dir, ranks)
            return 0
        if ranks.first:
            _say_stopped(run, data_dir)
        return 128 + history.stopped_by


def _parts(settings: Settings, data_dir: Path | None) -> tuple[nn.Module, Images, Images | None]:
    """Return the network, and the training and validation images."""
    settings.usable_device()
    train = settings.load("train", data_dir)
    validation = None if settings.whole else settings.load("validation", data_dir)
    dataset = registry.get(str(settings.data))
    find(dataset, "test", roots(dataset, data_dir))  # missing test data is better reported before training
    net = settings.build()
    if settings.torch_device.type == "cpu":
        with warnings.catch_warnings(action="ignore"):  # fresh weights need not converge
            evaluate(net, train.take(train.labels.topk(min(2, len(train))).indices))  # refuses too few outputs
    return net, train, validation


def _next_free(data: str) -> Path:
    """Make and return the first of runs/DATA-1, runs/DATA-2, ... that does not exist."""
    name, number = re.sub(r"[^\w.-]+", "-", re.split("[:/]", data)[-1]), 1
    while True:
        path = Path("runs") / f"{name}-{number}"
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        number += 1


def _fit(run: Run, net: nn.Module, images: Images, validation: Images | None, folder: Path | None) -> History:
    """Train the run to its end, or until a signal; show its progress, also to TensorBoard if there is a folder."""
    settings, weights = run.settings, parameters(net)["all"]
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    method = f", {settings.solver}, {settings.backward}" if settings.backward else ""
    data = f"{len(images):,} images of {images.title}, {settings.torch_device}, seed {settings.seed}"
    console.print(f"{settings.model} ({weights:,} parameters{method}) on {data}\nrun: {run.path}")
    progress = Progress(settings.epochs, math.ceil(len(images) / settings.batch_size))
    shown: list[Callable[[Epoch], None]] = [progress.epoch]

    def on_epoch(epoch: Epoch) -> None:
        for show in shown:
            show(epoch)

    with progress, ExitStack() as stack:
        if folder is not None:
            try:
                shown.append(stack.enter_context(board(folder)))
            except ValueError as error:
                console.print(str(error))
        how: Any = {"augment": settings.augmentation(), "run": run, "on_epoch": on_epoch}
        how |= {"on_step": progress.step, "on_plan": lambda plan: console.print(str(plan))}
        return fit(net, images, validation, settings, **how)


def _say_stopped(run: Run, data_dir: Path | None) -> None:
    """Print where the run stopped, and the command that resumes it."""
    command = ["banach", "train", "--resume", str(run.path)]
    command += [] if data_dir is None else ["--data-dir", str(data_dir)]
    checkpoint = run.latest()
    at = Position(0, 0) if checkpoint is None else checkpoint.position
    steps = f" and {at.step} steps" if at.step else ""
    said = f"stopped after epoch {at.epoch} of {run.settings.epochs}{steps}"
    console.print(f"{said}; resume with: {shlex.join(command)}")


def finish(run: Run, net: nn.Module, title: str, history: History, data_dir: Path | None, ranks: Ranks) -> None:
    """Evaluate the test set, once in the life of a run; print a table, write a plot."""
    settings, content = run.settings, run.test()
    if content is None:
        images = settings.load("test", data_dir).to(settings.torch_device)
        scorer = Scorer(net, settings.precision, fast=False, ranks=ranks)
        totals = evaluate(net, images, precision=settings.precision, scorer=scorer)
        content = record(totals, images, "test", settings)
        if ranks.first:
            run.write_test(content)
    if not ranks.first:
        return
    rows = figures(Totals(**from_plain(content["totals"])), "test")
    if history.epochs and history.last.validation_accuracy is not None:
        rows.insert(0, ("validation accuracy", f"{history.last.validation_accuracy:.2%}"))
    rows.append(("J-products", f"{sum(epoch.products for epoch in history.epochs):,}"))
    rows.append(("seconds of training", f"{sum(epoch.seconds for epoch in history.epochs):.1f}"))
    console.print()
    console.print(table(f"{content['title']}: {content['count']:,} test images", ("figure", "value"), rows))
    title = f"{settings.model} on {title}, {settings.backward or 'explicit'}"
    if settings.label_smoothing:  # the validation loss has none
        title += f", training loss with label smoothing {settings.label_smoothing:g}"
    panels, path = (*LEARNING, *SOLVES), run.path / PLOT
    show_plot(lambda: curves({"": history.epochs}, panels, eps=settings.eps), path, title=title)


def record(totals: Totals, images: Images, split: str, settings: Settings) -> dict[str, Any]:
    """Return the figures of an evaluation with their provenance, for JSON."""
    about = {"split": split, "title": images.title, DIGEST: images.sha256, "count": len(images)}
    return about | {"totals": plain(vars(totals))} | provenance(settings.to_dict(), device=images.device)


def figures(totals: Totals, split: str) -> list[tuple[str, str]]:
    """Return the figures of an evaluation as text, by name."""
    rows = [(f"{split} accuracy", f"{totals.accuracy:.2%}"), (f"{split} loss", f"{totals.loss:.4f}")]
    if totals.residual is not None:  # there is a fixed point
        rows += [("mean solver steps", f"{totals.depth:.1f}"), ("most solver steps", str(totals.max_depth))]
        rows += [("mean residual", f"{totals.residual:.2e}"), ("largest residual", f"{totals.max_residual:.2e}")]
        rows += [("samples converged", f"{totals.converged:.1%}")]
    return rows
