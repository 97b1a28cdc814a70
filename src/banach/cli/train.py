"""`banach train`: train a network from nothing, or resume a run; the test set is read once, at the end."""

from __future__ import annotations

import functools
import itertools
import math
import shlex
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer
from torch import nn

from banach import data as registry
from banach.cli.console import console, table
from banach.cli.progress import Progress
from banach.data import Images
from banach.data.files import find, roots
from banach.provenance import plain, provenance
from banach.train import (
    CheckpointError,
    Epoch,
    History,
    Position,
    Run,
    RunError,
    Settings,
    Totals,
    evaluate,
    fit,
    words,
)
from banach.train.board import MISSING, Board, open_board
from banach.train.plot import PlotError, plot_history

PLOT, BOARD = "training.png", "tensorboard"

EPILOG = """\b
Further flags: --recipe --whole --augment --batch-norm/--no-batch-norm --rtol --optimizer
  --momentum --weight-decay --schedule --label-smoothing --clip --ema --accumulate
  --jacobian-penalty --finite-difference --correction --correction-steps
  --monitor/--no-monitor --checkpoint-every --threads --fast/--no-fast --compile
  --tensorboard/--no-tensorboard
A settings file holds the same names: epochs = 5, schedule = "steps:10,15:0.1"
\b
Examples:
  banach train                                        the digits inside scikit-learn, on a CPU
  banach train --data mnist --epochs 3 --data-dir ~/data
  banach train --data cifar10 --backward implicit:cg --no-batch-norm --device cuda
  banach train --resume runs/digits-1                 continue where it stopped"""

Text: TypeAlias = str | None
Whole: TypeAlias = int | None
Real: TypeAlias = float | None
Switch: TypeAlias = bool | None


def flag(*names: str, help: str = "", hidden: bool = False, meta: str | None = None) -> Any:
    return typer.Option(*names, help=help, hidden=hidden, metavar=meta, show_default=False)


def train(
    run: Annotated[Path | None, typer.Argument(help="The run to resume.", show_default=False)] = None,
    data: Annotated[Text, flag(help="digits | mnist | svhn | cifar10.  [digits]", meta="NAME")] = None,
    data_dir: Annotated[Path | None, flag(help="Folder of the data; else BANACH_DATA, the cache.")] = None,
    subset: Annotated[Whole, flag(help="Train on this many images.", meta="N")] = None,
    model: Annotated[Text, flag(help="See: banach models.  [the model named like the data]", meta="NAME")] = None,
    solver: Annotated[Text, flag(help="picard[:DAMPING] | anderson[:M] | broyden[:M].  [picard]")] = None,
    backward: Annotated[
        Text, flag(help="jfb | neumann:5 | unroll:3 | implicit:cg | implicit:gmres.  [jfb]")
    ] = None,
    eps: Annotated[Real, flag(help="Stop at a residual of eps.", meta="X")] = None,
    norm: Annotated[Text, flag(help=f"Norm of the residual: {words.NORMS}.")] = None,
    max_steps: Annotated[Whole, flag(help="Steps at most; 0 is the explicit twin.", meta="N")] = None,
    epochs: Annotated[Whole, flag(help="Passes over the data.", meta="N")] = None,
    batch_size: Annotated[Whole, flag(help="Images per step.", meta="N")] = None,
    lr: Annotated[Real, flag(help="Learning rate.", meta="X")] = None,
    precision: Annotated[Text, flag(help="fp32 | tf32 | bf16.  [fp32]")] = None,
    seed: Annotated[Whole, flag(help="For weights, order and dropout.  [0]", meta="N")] = None,
    device: Annotated[Text, flag(help="auto | cpu | cuda | cuda:N.  [auto]")] = None,
    out: Annotated[Path | None, flag(help="The run directory.  [runs/DATA-N, the next N]")] = None,
    config: Annotated[Path | None, flag("--config", "--settings", help="A TOML file; flags override it.")] = None,
    resume: Annotated[bool, flag("--resume", help="Continue RUN or --out; on a CPU bit by bit the same.")] = False,
    recipe: Annotated[Text, flag(hidden=True)] = None,
    whole: Annotated[Switch, flag("--whole/--no-whole", hidden=True)] = None,
    augment: Annotated[Text, flag(hidden=True)] = None,
    batch_norm: Annotated[Switch, flag("--batch-norm/--no-batch-norm", hidden=True)] = None,
    rtol: Annotated[Real, flag(hidden=True)] = None,
    optimizer: Annotated[Text, flag(hidden=True)] = None,
    momentum: Annotated[Real, flag(hidden=True)] = None,
    weight_decay: Annotated[Real, flag(hidden=True)] = None,
    schedule: Annotated[Text, flag(hidden=True)] = None,
    label_smoothing: Annotated[Real, flag(hidden=True)] = None,
    jacobian_penalty: Annotated[Real, flag(hidden=True)] = None,
    finite_difference: Annotated[Switch, flag("--finite-difference/--no-finite-difference", hidden=True)] = None,
    correction: Annotated[Real, flag(hidden=True)] = None,
    correction_steps: Annotated[Text, flag(hidden=True)] = None,
    clip: Annotated[Real, flag(hidden=True)] = None,
    ema: Annotated[Real, flag(hidden=True)] = None,
    accumulate: Annotated[Whole, flag(hidden=True)] = None,
    monitor: Annotated[Switch, flag("--monitor/--no-monitor", hidden=True)] = None,
    checkpoint_every: Annotated[Whole, flag(hidden=True)] = None,
    threads: Annotated[Whole, flag(hidden=True)] = None,
    fast: Annotated[Switch, flag("--fast/--no-fast", hidden=True)] = None,
    compile: Annotated[Switch, flag("--compile/--no-compile", hidden=True)] = None,
    tensorboard: Annotated[bool, flag("--tensorboard/--no-tensorboard", hidden=True)] = True,
) -> int:
    """Train an implicit network; the test set is read once, at the end.

    Settings: the recipe of the model, then --config, then flags.
    """
    given = dict(locals())
    for name in ("run", "data_dir", "out", "config", "resume", "tensorboard"):
        del given[name]
    flags = {name: value for name, value in given.items() if value is not None}
    if resume:
        session = _resumed(_named(run, out, config), flags, data_dir)
    elif run is not None:
        raise ValueError(f"{run} is given without --resume; pass --resume to continue it, or --out for a new run")
    else:
        session = Session.begin(Settings.choose(flags, config), out, data_dir)
    if session.settings.threads is not None:
        torch.set_num_threads(session.settings.threads)
    console.print(session.opening())
    history = session.train(tensorboard=tensorboard)
    if not history.finished:
        console.print(f"stopped after {session.reached()}; resume with: {session.resume_command()}")
        return 128 + int(history.stopped_by or 0)
    session.finish(history)
    return 0


def _named(run: Path | None, out: Path | None, config: Path | None) -> Path:
    """Return the run to resume: RUN, --out, or the newest under runs/."""
    if config is not None:
        raise ValueError(f"a resumed run has its settings already; leave out --config {config}")
    if run is not None and out is not None and run != out:
        raise ValueError(f"--resume names {run} and --out {out}; pass one")
    return run or out or _newest()


def _resumed(path: Path, flags: dict[str, Any], data_dir: Path | None) -> Session:
    """Resume a run. Flags must agree with its settings; only the device may differ."""
    opened = Run.open(path)
    given: dict[str, Any] = dict(flags)
    for name, meant in (("schedule", words.schedule), ("correction_steps", words.integers)):
        if name in given:
            given[name] = meant(given[name])
    settings = replace(opened.settings, **given)
    opened.check(settings)
    return Session.on(Run(opened.path, settings), data_dir)


def _newest() -> Path:
    runs = sorted(Path("runs").glob("*/settings.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise RunError("there is no run under runs/ to resume; pass one: banach train --resume RUN")
    return runs[-1].parent


@dataclass(frozen=True, eq=False)
class Session:
    """One process that trains a run: the network and its images."""

    run: Run
    net: nn.Module
    train_images: Images
    validation: Images | None
    data_dir: Path | None

    @staticmethod
    def begin(settings: Settings, out: Path | None, data_dir: Path | None) -> Session:
        """Start a new run. Its directory is made after data and network are there."""
        if out is not None and (out / "settings.json").exists():
            raise RunError(f"there is a run in {out} already; continue it with --resume, or choose another --out")
        parts = _parts(settings, data_dir)
        path = _next_free(str(settings.data)) if out is None else out
        return Session(Run.create(path, settings), *parts, data_dir)

    @staticmethod
    def on(run: Run, data_dir: Path | None) -> Session:
        """Resume a run."""
        return Session(run, *_parts(run.settings, data_dir), data_dir)

    @property
    def settings(self) -> Settings:
        return self.run.settings

    def opening(self) -> str:
        """Return what is trained on what, in two lines."""
        settings, weights = self.settings, sum(p.numel() for p in self.net.parameters())
        how = f", {settings.solver}, {settings.backward}" if settings.backward else ""
        return (
            f"{settings.model} ({weights:,} parameters{how}) on {len(self.train_images):,} images of "
            f"{self.train_images.title}, {settings.torch_device}, seed {settings.seed}\nrun: {self.run.path}"
        )

    def train(self, *, tensorboard: bool = True) -> History:
        """Call fit() with a progress bar and TensorBoard."""
        settings, before = self.settings, self._done()
        with ExitStack() as stack:
            steps = math.ceil(len(self.train_images) / settings.batch_size)
            progress = stack.enter_context(Progress(settings.epochs, steps, start=Position(len(before), 0)))

            @functools.cache
            def board() -> Board | None:
                """Open TensorBoard after the first epoch: a run that `fit` refuses is left unchanged."""
                found = open_board(self.run.path / BOARD)
                if found is None:
                    console.print(MISSING)
                    return None
                stack.enter_context(found)
                for epoch in before:  # again, so that each occurs once
                    found.write(epoch)
                return found

            def on_epoch(epoch: Epoch) -> None:
                progress.epoch(epoch)
                if tensorboard and (found := board()) is not None:
                    found.write(epoch)

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

    def _done(self) -> list[Epoch]:
        """Return the epochs of the newest checkpoint: after a kill other files may lack the last one."""
        checkpoint = self.run.latest()
        if checkpoint is None:
            return []
        try:
            return [Epoch.from_dict(values) for values in checkpoint.state["done"]]
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{checkpoint.path} does not hold this run: {error}") from None

    def resume_command(self) -> str:
        """Return the command that resumes the run."""
        command = ["banach", "train", "--resume", str(self.run.path)]
        return shlex.join(command if self.data_dir is None else [*command, "--data-dir", str(self.data_dir)])

    def reached(self) -> str:
        """Return the position of the newest checkpoint in words."""
        checkpoint = self.run.latest()
        epoch, step = (0, 0) if checkpoint is None else (checkpoint.state["epoch"], checkpoint.state["step"])
        return f"epoch {epoch} of {self.settings.epochs}" + (f" and {step} steps" if step else "")

    def finish(self, history: History) -> None:
        """Evaluate the test set, once in the life of a run; print a table, write a plot."""
        content = self.run.test()
        if content is None:
            self.run.write_test(self._test())
            content = self.run.test()
            assert content is not None
        console.print()
        console.print(self._summary(history, content))
        self._plot(history)

    def _test(self) -> dict[str, Any]:
        images = self.settings.load("test", self.data_dir).to(self.settings.torch_device)
        totals = evaluate(self.net, images, precision=self.settings.precision)
        return record(totals, images, "test", self.settings)

    def _summary(self, history: History, content: dict[str, Any]) -> Any:
        totals = Totals(**content["totals"])
        seconds = sum(epoch.seconds for epoch in history.epochs)
        rows = [(name, value) for name, value in figures(totals).items() if value is not None]
        if history.epochs and history.last.validation_accuracy is not None:
            rows.insert(0, ("validation accuracy", f"{history.last.validation_accuracy:.2%}"))
        rows.append(("J-products", f"{sum(epoch.products for epoch in history.epochs):,}"))
        rows.append(("seconds of training", f"{seconds:.1f}"))
        return table(f"{content['title']}: {content['count']:,} test images", ("", "value"), rows)

    def _plot(self, history: History) -> None:
        settings = self.settings
        title = f"{settings.model} on {self.train_images.title}, {settings.backward or 'explicit'}"
        try:
            path = plot_history(history.epochs, self.run.path / PLOT, title=title, eps=settings.eps)
        except PlotError as error:
            console.print(f"no plot: {error}")
        else:
            console.print(f"plot: {path}")


def record(totals: Totals, images: Images, split: str, settings: Settings) -> dict[str, Any]:
    """Return the figures of an evaluation with their provenance, for JSON."""
    about = {"split": split, "title": images.title, "count": len(images), "totals": plain(vars(totals))}
    return about | provenance(settings.to_dict(), device=images.device)


def figures(totals: Totals) -> dict[str, str | None]:
    """Return the figures of an evaluation as text."""
    sought = totals.residual is not None
    return {
        "test accuracy": f"{totals.accuracy:.2%}",
        "test loss": f"{totals.loss:.4f}",
        "mean depth": f"{totals.depth:.1f}" if sought else None,
        "largest depth": str(totals.max_depth) if sought else None,
        "mean residual": f"{totals.residual:.2e}" if sought else None,
        "largest residual": f"{totals.max_residual:.2e}" if sought else None,
        "converged": f"{totals.converged:.1%}" if sought else None,
    }


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
    for number in itertools.count(1):
        path = Path("runs") / f"{data}-{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")
