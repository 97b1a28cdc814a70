"""One sitting of training: what is trained on what, watched, measured once on the test set, plotted."""

from __future__ import annotations

import functools
import math
import shlex
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from banach import data
from banach.cli import assemble
from banach.cli.console import console, table
from banach.cli.progress import Progress
from banach.data import Images
from banach.data.files import find, roots
from banach.provenance import plain, provenance
from banach.train import Epoch, History, Position, Run, RunError, Settings, Totals, evaluate, fit
from banach.train.board import MISSING, Board, open_board
from banach.train.checkpoint import CheckpointError
from banach.train.plot import PlotError, plot_history

PLOT, BOARD = "training.png", "tensorboard"


@dataclass(frozen=True, eq=False)
class Session:
    """A run, the network it trains and the images it trains on."""

    run: Run
    net: nn.Module
    train_images: Images
    validation: Images | None
    data_dir: Path | None

    @staticmethod
    def begin(settings: Settings, out: Path | None, data_dir: Path | None) -> Session:
        """A new run. Its directory is made when all else is known to be there."""
        if out is not None and (out / "settings.json").exists():
            raise RunError(f"there is a run in {out} already; go on with --resume, or choose another --out")
        parts = _parts(settings, data_dir)
        path = _next_free(str(settings.data)) if out is None else out
        return Session(Run.create(path, settings), *parts, data_dir)

    @staticmethod
    def on(run: Run, data_dir: Path | None) -> Session:
        """A run that was begun before."""
        return Session(run, *_parts(run.settings, data_dir), data_dir)

    @property
    def settings(self) -> Settings:
        return self.run.settings

    def opening(self) -> str:
        """What is about to happen, in two lines."""
        settings, weights = self.settings, sum(p.numel() for p in self.net.parameters())
        how = f", {settings.solver}, {settings.backward}" if settings.backward else ""
        return (
            f"{settings.model} ({weights:,} parameters{how}) on {len(self.train_images):,} images of "
            f"{self.train_images.title}, {settings.torch_device}, seed {settings.seed}\nrun: {self.run.path}"
        )

    def train(self, *, tensorboard: bool = True) -> History:
        """fit(), with a progress bar and TensorBoard."""
        settings, before = self.settings, self._done()
        with ExitStack() as stack:
            steps = math.ceil(len(self.train_images) / settings.batch_size)
            progress = stack.enter_context(Progress(settings.epochs, steps, start=Position(len(before), 0)))

            @functools.cache
            def board() -> Board | None:
                """Opened once `fit` has begun: a run that is refused, or another's, is left as it is."""
                found = open_board(self.run.path / BOARD)
                if found is None:
                    console.print(MISSING)
                    return None
                stack.enter_context(found)
                for epoch in before:  # anew, so that none is missing and none is there twice
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
                augment=assemble.augmentation(settings),
                run=self.run,
                on_epoch=on_epoch,
                on_step=progress.step,
            )

    def _done(self) -> list[Epoch]:
        """The epochs of the newest checkpoint: a kill may have come before they were written anywhere else."""
        checkpoint = self.run.latest()
        if checkpoint is None:
            return []
        try:
            return [Epoch.from_dict(values) for values in checkpoint.state["done"]]
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{checkpoint.path} does not hold this run: {error}") from None

    def resume_command(self) -> str:
        """What to type to go on."""
        words = ["banach", "train", "--resume", str(self.run.path)]
        return shlex.join(words if self.data_dir is None else [*words, "--data-dir", str(self.data_dir)])

    def reached(self) -> str:
        checkpoint = self.run.latest()
        epoch, step = (0, 0) if checkpoint is None else (checkpoint.state["epoch"], checkpoint.state["step"])
        return f"epoch {epoch} of {self.settings.epochs}" + (f" and {step} steps" if step else "")

    def finish(self, history: History) -> None:
        """The test set, read once in the life of a run; a table; a plot."""
        content = self.run.test()
        if content is None:
            self.run.write_test(self._test())
            content = self.run.test()
            assert content is not None
        console.print()
        console.print(self._summary(history, content))
        self._plot(history)

    def _test(self) -> dict[str, Any]:
        settings = self.settings
        images = assemble.images(settings, "test", self.data_dir).to(settings.torch_device)
        totals = evaluate(self.net, images, precision=settings.precision)
        return {
            "split": "test",
            "title": images.title,
            "count": len(images),
            "totals": plain(vars(totals)),
            **provenance(settings.to_dict(), device=settings.torch_device),
        }

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


def figures(totals: Totals) -> dict[str, str | None]:
    """What an evaluation found, as text."""
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
    assemble.usable_device(settings)
    train = assemble.images(settings, "train", data_dir)
    validation = None if settings.whole else assemble.images(settings, "validation", data_dir)
    dataset = data.get(str(settings.data))
    find(dataset, "test", roots(dataset, data_dir))  # with which it ends: what is not there is better said before
    return assemble.network(settings), train, validation


def _next_free(data: str) -> Path:
    """runs/DATA-1, runs/DATA-2, ...: the first that is not there, made at once so that no one else takes it."""
    number = 1
    while True:
        path = Path("runs") / f"{data}-{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return path
