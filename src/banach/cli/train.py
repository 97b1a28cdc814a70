"""`banach train`: train a network from nothing, or resume a run; the test set is read once, at the end."""

import inspect
import math
import re
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import torch
import typer
from torch import nn

from banach import data as registry
from banach.cli.console import console, table
from banach.cli.progress import Progress
from banach.cli.shared import DataDir, Imports, lenient, option, own_run, recorded, show_plot
from banach.data import Images
from banach.data.dataset import find, roots
from banach.provenance import numbers, plain, provenance
from banach.train import Epoch, History, Position, Run, Scorer, Settings, Totals, evaluate, fit, words
from banach.train.distributed import Ranks, joined
from banach.train.plot import Board, plot_history
from banach.train.run import PLOT

BOARD = "tensorboard"
EPILOG = """Switches have a --no- form, such as --no-monitor. A settings file (--config) holds the same names:
epochs = 5, schedule = "steps:10,15:0.1"

\b
Examples:
  banach train                           scikit-learn's digits, on a CPU
  banach train --data mnist --epochs 3 --data-dir ~/data
  banach train --data cifar10 --backward implicit:anderson --device cuda
  banach train --resume runs/digits-1    continue where it stopped"""

METHODS = ("cg", "gmres", "picard", "anderson", "broyden")
IMPLICIT = " | ".join(f"implicit:{method}" for method in METHODS) + ", each [:RTOL[:STEPS]]"
# Every setting is a flag: in groups, what it means, and the name of its value.
FLAGS: dict[str, dict[str, tuple[str, str | None]]] = {
    "Data": {
        "data": ("digits | mnist | svhn | cifar10 | folder:PATH | FILE.npz  [digits]", "NAME"),
        "subset": ("Train on N images, stratified by class.", "N"),
        "whole": ("Train on the validation images too; nothing is validated.", None),
        "augment": (f"{words.AUGMENTS}.", None),
        "normalise": ("Scale pixels to mean 0 and deviation 1; without it to [0, 1].  [on]", None),
    },
    "Network": {
        "model": ("See: banach models.  [the model named like the data]", "NAME"),
        "recipe": ("Settings the model was tuned with; see: banach models NAME.", "NAME"),
        "batch_norm": ("Batch norm in R; without it for Jacobian-based modes.", None),
        "solver": (f"{words.SOLVERS}.  [picard]", None),
        "backward": (f"jfb | neumann:ORDER | unroll:STEPS[:DAMPING] | {IMPLICIT}.  [jfb]", None),
        "eps": ("Stop a solve at a residual of X.", "X"),
        "rtol": ("The residual may also be X times the norm of T(u).  [0]", "X"),
        "norm": (f"Norm of the residual: {words.NORMS}.", None),
        "max_steps": ("Steps of a solve at most; 0 is the explicit twin.", "N"),
    },
    "Training": {
        "epochs": ("Passes over the data.", "N"),
        "batch_size": ("Images per step.", "N"),
        "accumulate": ("A batch goes through the network in N parts, for less memory.  [1]", "N"),
        "optimizer": ("adam | adamw | sgd.", None),
        "lr": ("Learning rate.", "X"),
        "momentum": ("Momentum of sgd.", "X"),
        "weight_decay": ("Added to the gradient; by adamw subtracted from the weights.", "X"),
        "schedule": (f"Of the learning rate: {words.SCHEDULES}.", None),
        "label_smoothing": ("Share of the target that goes to all classes.", "X"),
        "clip": ("Bound on the norm of the gradient.", "X"),
        "ema": ("Decay of averaged weights, which are then evaluated.", "X"),
        "precision": ("fp32 | tf32 | bf16.  [fp32]", None),
        "pretrain": ("The first N steps unroll R ten times instead of solving.  [0]", "N"),
        "tune": ("Let modules choose their step size during training.", None),
        "seed": ("For weights, order and dropout.  [0]", "N"),
    },
    "Penalties": {
        "jacobian_penalty": ("Add X times the mean squared singular value of dT/du.", "X"),
        "finite_difference": ("Compute it by a difference, for an R without second derivatives.", None),
        "correction": ("Add X times the losses at earlier iterates.", "X"),
        "correction_steps": ("Which iterates these are.  [2,5]", "N,N"),
    },
    "Run": {
        "device": ("auto | cpu | cuda | cuda:N.  [auto]", None),
        "threads": ("CPU threads; another number rounds differently.", "N"),
        "fast": ("Captured steps on a GPU, channels_last on a CPU.  [on]", None),
        "compile": ("Compile Q, R and S on a GPU.  [off]", None),
        "sharded": ("With torchrun: shard the weights over the GPUs (FSDP2).  [off]", None),
        "monitor": ("Measure the contraction after every epoch.  [on]", None),
        "checkpoint_every": ("Also checkpoint every N steps.  [0: after epochs only]", "N"),
        "keep": ("Checkpoints to keep besides the best one.  [2]", "N"),
        "on_nonfinite": ("At NaN or infinity: stop | skip | rewind.  [stop]", None),
    },
}


def with_flags(command: Callable[..., int]) -> Callable[..., int]:
    """Replace **flags in the signature, which typer reads, by one option per setting."""
    *parameters, _ = inspect.signature(command, eval_str=True).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    for group, part in FLAGS.items():
        for name, (help, metavar) in part.items():
            made = _option(name, help=help, metavar=metavar, rich_help_panel=group)
            parameters.append(inspect.Parameter(name, keyword, default=None, annotation=made))
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _option(name: str, **options: Any) -> Any:
    kind, word = get_type_hints(Settings)[name], name.replace("_", "-")
    if kind is bool:
        return Annotated[bool | None, typer.Option(f"--{word}/--no-{word}", show_default=False, **options)]
    read = next((one for one in (int, float) if one in (kind, *get_args(kind))), None)
    if read and name not in words.READERS:
        options["parser"] = lenient(read)
    return Annotated[str | None, typer.Option(f"--{word}", show_default=False, **options)]


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

    Settings: the recipe of the model, then --config, then flags.
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
        parts = _parts(settings, data_dir)  # before the directory is made: a refused command leaves nothing
        ranks.check(parts[0], len(parts[1]), settings)
        name = str(settings.data)
        path = made.path if made else ranks.from_first(lambda: Run.create(out or _next_free(name), settings).path)
        return Session(Run(path, settings), *parts, data_dir, ranks).train(tensorboard=tensorboard)


def _parts(settings: Settings, data_dir: Path | None) -> tuple[nn.Module, Images, Images | None]:
    """Return the network, and the training and validation images."""
    settings.usable_device()
    train = settings.load("train", data_dir)
    validation = None if settings.whole else settings.load("validation", data_dir)
    dataset = registry.get(str(settings.data))
    find(dataset, "test", roots(dataset, data_dir))  # missing test data is better reported before training
    return settings.build(), train, validation


def _next_free(data: str) -> Path:
    """Make and return the first of runs/DATA-1, runs/DATA-2, ... that does not exist."""
    name, number = re.sub(r"[^\w.-]+", "-", re.split("[:/]", data)[-1]), 1
    while True:
        path = Path("runs") / f"{name}-{number}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1


@dataclass(frozen=True, eq=False)
class Session:
    """One process that trains a run: the network and its images."""

    run: Run
    net: nn.Module
    train_images: Images
    validation: Images | None
    data_dir: Path | None
    ranks: Ranks = Ranks()

    def train(self, *, tensorboard: bool) -> int:
        """Train the run to its end, or until a signal; return the exit code."""
        settings, weights = self.run.settings, sum(p.numel() for p in self.net.parameters())
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        how = f", {settings.solver}, {settings.backward}" if settings.backward else ""
        images = f"{len(self.train_images):,} images of {self.train_images.title}"
        where = f"{settings.torch_device}, seed {settings.seed}"
        console.print(f"{settings.model} ({weights:,} parameters{how}) on {images}, {where}\nrun: {self.run.path}")
        history = self._fit(tensorboard)
        if history.stopped_by is None:
            self.finish(history)
            return 0
        if self.ranks.first:
            self._say_stopped()
        return 128 + history.stopped_by

    def _fit(self, tensorboard: bool) -> History:
        """Call fit() with a progress bar and TensorBoard."""
        settings, board = self.run.settings, None
        progress = Progress(settings.epochs, math.ceil(len(self.train_images) / settings.batch_size))
        if tensorboard and self.ranks.first:
            try:
                board = Board(self.run.path / BOARD)
            except RuntimeError as error:
                console.print(str(error))

        def on_epoch(epoch: Epoch) -> None:
            progress.epoch(epoch)
            if board is not None:
                board.write(epoch)

        with progress, board or nullcontext():
            return fit(
                self.net,
                self.train_images,
                self.validation,
                settings,
                augment=settings.augmentation(),
                run=self.run,
                on_epoch=on_epoch,
                on_step=progress.step,
                on_plan=lambda plan: console.print(str(plan), highlight=False),
            )

    def _say_stopped(self) -> None:
        """Print where the run stopped, and the command that resumes it."""
        command = ["banach", "train", "--resume", str(self.run.path)]
        command += [] if self.data_dir is None else ["--data-dir", str(self.data_dir)]
        checkpoint = self.run.latest()
        at = Position(0, 0) if checkpoint is None else checkpoint.position
        said = f"stopped after epoch {at.epoch} of {self.run.settings.epochs}"
        said += f" and {at.step} steps" if at.step else ""
        console.print(f"{said}; resume with: {shlex.join(command)}")

    def finish(self, history: History) -> None:
        """Evaluate the test set, once in the life of a run; print a table, write a plot."""
        settings, content = self.run.settings, self.run.test()
        if content is None:
            images = settings.load("test", self.data_dir).to(settings.torch_device)
            scorer = Scorer(self.net, settings.precision, fast=False, ranks=self.ranks)
            totals = evaluate(self.net, images, precision=settings.precision, scorer=scorer)
            content = record(totals, images, "test", settings)
            if self.ranks.first:
                self.run.write_test(content)
        if not self.ranks.first:
            return
        rows = figures(Totals(**numbers(content["totals"])), "test")
        if history.epochs and history.last.validation_accuracy is not None:
            rows.insert(0, ("validation accuracy", f"{history.last.validation_accuracy:.2%}"))
        rows.append(("J-products", f"{sum(epoch.products for epoch in history.epochs):,}"))
        rows.append(("seconds of training", f"{sum(epoch.seconds for epoch in history.epochs):.1f}"))
        console.print()
        console.print(table(f"{content['title']}: {content['count']:,} test images", ("figure", "value"), rows))
        title = f"{settings.model} on {self.train_images.title}, {settings.backward or 'explicit'}"
        options = {"title": title, "eps": settings.eps, "label_smoothing": settings.label_smoothing}
        show_plot(plot_history, history.epochs, self.run.path / PLOT, **options)


def record(totals: Totals, images: Images, split: str, settings: Settings) -> dict[str, Any]:
    """Return the figures of an evaluation with their provenance, for JSON."""
    about = {"split": split, "title": images.title, "count": len(images), "totals": plain(vars(totals))}
    return about | provenance(settings.to_dict(), device=images.device)


def figures(totals: Totals, split: str) -> list[tuple[str, str]]:
    """Return the figures of an evaluation as text, by name."""
    rows = [(f"{split} accuracy", f"{totals.accuracy:.2%}"), (f"{split} loss", f"{totals.loss:.4f}")]
    if totals.residual is not None:  # there is a fixed point
        rows += [("mean solver steps", f"{totals.depth:.1f}"), ("most solver steps", str(totals.max_depth))]
        rows += [("mean residual", f"{totals.residual:.2e}"), ("largest residual", f"{totals.max_residual:.2e}")]
        rows += [("samples converged", f"{totals.converged:.1%}")]
    return rows
