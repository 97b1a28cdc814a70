"""A run with its trained network, as evaluate, predict and diagnose use it; and options that commands share."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from banach import data
from banach.cli.console import console
from banach.data import DataSet
from banach.train import Position, Run, RunError, Settings
from banach.train.plot import PlotError
from banach.train.state import check_identity, described, load_weights


def option(help: str, **options: Any) -> Any:
    """Return an option whose help states the default itself."""
    return typer.Option(help=help, **{"show_default": False, **options})


def argument(help: str) -> Any:
    """Return an argument without a default."""
    return typer.Argument(help=help, show_default=False)


def lenient(kind: type[int] | type[float]) -> Callable[[str], Any]:
    """Return a reader of numbers that leaves other text as it is: the checks of the command then refuse it."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text

    return read


def number(kind: type[int] | type[float], help: str, *, show_default: bool = False) -> Any:
    """Return an option for a number."""
    return option(help, parser=lenient(kind), metavar="N" if kind is int else "X", show_default=show_default)


RunDir = Annotated[Path, argument("The run directory.")]
DataDir = Annotated[Path | None, option("Folder of the data.  [BANACH_DATA, then the cache]")]
Device = Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N.")]


def show_plot(draw: Callable[..., Path], *arguments: Any, **options: Any) -> None:
    """Write a plot, and print where it is or why there is none."""
    try:
        console.print(f"plot: {draw(*arguments, **options)}")
    except PlotError as error:
        console.print(f"no plot: {error}")


@dataclass(frozen=True, eq=False)
class Opened:
    """A run and its network: in eval mode, on its device, with the newest weights, averaged ones if any."""

    run: Run
    settings: Settings
    net: nn.Module
    dataset: DataSet
    device: torch.device
    position: Position


def open_run(path: Path, device: str = "auto") -> Opened:
    """Load the network of a run from its newest checkpoint."""
    run = Run.open(path)
    if run.settings.data is None or run.settings.model is None:
        raise RunError(f"{path} was made from Python, and does not name its data and model; use it from Python")
    settings = replace(run.settings, device=device)
    where, checkpoint = settings.usable_device(), run.latest()
    if checkpoint is None:
        command = f"banach train --resume {shlex.quote(str(path))}"
        raise RunError(f"{path} has no checkpoint yet; train it first: {command}")
    net = settings.build()
    load_weights(net, checkpoint, averaged=True)
    now = described(net, run.settings)
    check_identity({name: kept for name, kept in checkpoint.state["identity"].items() if name in now}, now)
    return Opened(run, settings, net.to(where).eval(), data.get(run.settings.data), where, checkpoint.position)
