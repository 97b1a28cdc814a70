"""What commands share: options, models and data sets of other packages, a run with its trained network."""

import functools
import importlib
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from banach import data, models
from banach.cli.console import console
from banach.data import DataSet, Images
from banach.data.own import own
from banach.fast.plan import arithmetic
from banach.network import ImplicitNetwork
from banach.train import Position, Run, RunError, Scorer, Settings
from banach.train.plot import Chart, draw
from banach.train.settings import FIXED_POINT
from banach.train.state import DIGEST, check_identity, described, load_weights

GROUP = "banach"  # of entry points
SCORED = 400  # images at a time


def option(help: str, *names: str, **options: Any) -> Any:
    """Return an option whose help states the default itself."""
    return typer.Option(*names, help=help, **{"show_default": False, **options})


def argument(help: str) -> Any:
    """Return an argument without a default."""
    return typer.Argument(help=help, show_default=False)


def number(kind: type[int] | type[float], help: str, **options: Any) -> Any:
    """Return an option for a number. Other text stays as it is: the checks of the command then refuse it."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text

    return option(help, parser=read, metavar="N" if kind is int else "X", **options)


def import_modules(modules: Sequence[str] | None) -> list[str]:
    """Import modules, which register their models and data sets. Older versions of typer need a list back.

    They may be in the working directory. It is on the path only with --import, since a file there could pass for
    an optional package that is missing; and last, so that it hides no installed one.
    """
    if modules and not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())
    for module in modules or ():
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a module raises
            said = f"{type(error).__name__}: {error}"
            missing = isinstance(error, ModuleNotFoundError)
            advice = "install it, or go to its folder; names have no .py" if missing else "correct the module"
            raise ValueError(f"--import: the module {module!r} cannot be imported ({said}); {advice}") from error
    return list(modules or ())


RunDir = Annotated[Path, argument("The run directory.")]
DataDir = Annotated[Path | None, option("Folder of the data.  [BANACH_DATA, then the cache]")]
Device = Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N.")]
_MODULE = "Import a module that registers models or data sets; may be repeated."
Imports = Annotated[list[str] | None, option(_MODULE, "--import", metavar="MODULE", callback=import_modules)]


@functools.cache
def load_entry_points() -> list[object]:
    """Import what packages have registered, once; return the data sets and models that need no --import."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # another package's bug must not stop every command
            warnings.warn(f"the entry point {point.value} of {GROUP} cannot be loaded: {error}", stacklevel=2)
    return [*map(data.get, data.names()), *map(models.get, models.names())]


def recorded(settings: Settings, modules: Sequence[str] | None) -> Settings:
    """Return the settings as a run stores them: enough to find its data again, and to say which modules it needs.

    Names that --import registered or replaced become MODULE:NAME, and paths of your data absolute.
    """
    mine = own(str(settings.data))
    given = {"data": mine.name if mine else str(settings.data), "model": str(settings.model)}
    for key, room in (("data", data), ("model", models)):
        registered = given[key] in room.names()
        if modules and registered and all(room.get(given[key]) is not one for one in load_entry_points()):
            given[key] = f"{','.join(modules)}:{given[key]}"
    return settings.changed(given)


def parameters(net: nn.Module) -> dict[str, int]:
    """Return the number of parameters of Q, R and S, if the network has these parts, and of all."""
    parts = {name: part for name, part in net.named_children() if name in ("Q", "R", "S")}
    return {name: sum(p.numel() for p in part.parameters()) for name, part in {**parts, "all": net}.items()}


def show_plot(make: Callable[[], Sequence[Chart]], path: Path, **options: Any) -> None:
    """Write a plot, and print where it is or why there is none."""
    try:
        console.print(f"plot: {draw(make(), path, **options)}")
    except ValueError as error:
        console.print(f"no plot: {error}")


def check_out(out: Path, expected: str, ending: str, kind: str, first: bytes) -> None:
    """Refuse to overwrite anything but a file of that kind, whose first bytes are known."""
    if out.suffix.lower() != ending:
        raise ValueError(f"{expected}, got --out {out}; use a name that ends in {ending}")
    if out.exists() and not out.read_bytes().startswith(first):  # for a folder this raises an OSError
        raise ValueError(f"{out} exists and is not {kind}; choose another --out, it will not be overwritten")


@dataclass(frozen=True, eq=False)
class Opened:
    """A run and its network: in eval mode, on its device, with the newest weights, averaged ones if any."""

    run: Run
    settings: Settings
    net: nn.Module
    dataset: DataSet
    position: Position
    identity: Mapping[str, str]

    def load(self, split: str, data_dir: Path | None) -> Images:
        """Return a split. Refuse one of other training images, since it may hold some that the run has seen."""
        images = self.settings.load(split, data_dir)
        known: Mapping[str, Any] = (self.run.test() or {}) if split == "test" else self.identity
        if known.get(DIGEST, images.sha256) != images.sha256:
            text = f"the images of {images.title} ({split}) are not those of the run: they have changed"
            if split != "test":
                raise RunError(f"{text}; restore them")
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return images

    def answers(self, images: Images) -> tuple[Tensor, Tensor]:
        """Return probabilities, and a row (steps, residual, converged) per image, zeros without a fixed point.

        The network runs in the precision of the run; the results are float64, on the CPU.
        """
        chances, ends, images = [], [], images.to(self.settings.torch_device)
        scorer = Scorer(self.net, self.settings.precision, fast=False)
        # The commands say which solves did not converge.
        with arithmetic(self.settings.precision, images.device), warnings.catch_warnings(action="ignore"):
            for part in images.pixels.split(SCORED):
                output, found = scorer(images.normalise(part))
                chances.append(output.double().softmax(1).cpu())
                none = torch.zeros(len(part))
                solves = (none, none, none) if found is None else (found.steps, found.residual, found.converged)
                ends.append(torch.stack([one.double().cpu() for one in solves], 1))
        return torch.cat(chances), torch.cat(ends)


def own_run(path: Path) -> Run:
    """Open a run that a command can use: one made from Python does not name its data and model."""
    run = Run.open(path)
    if run.settings.data is None or run.settings.model is None:
        raise RunError(f"{path} was made from Python, and does not name its data and model; use it from Python")
    return run


def open_run(path: Path, device: str = "auto", **given: Any) -> Opened:
    """Load the network of a run from its newest checkpoint; `given` are other settings of its solves."""
    run = own_run(path)
    settings = run.settings.changed({**given, "device": device})
    where, checkpoint = settings.usable_device(), run.latest()
    if checkpoint is None:
        raise RunError(f"{path} has no checkpoint yet; train it: banach train --resume {shlex.quote(str(path))}")
    net = run.settings.changed({"device": device}).build()
    load_weights(net, checkpoint)
    now, identity = described(net, run.settings), checkpoint.state["identity"]
    check_identity({name: kept for name, kept in identity.items() if name in now}, now)
    if isinstance(net, ImplicitNetwork):
        settings.configure(net)
    elif named := [name for name in FIXED_POINT if given.get(name) is not None]:
        flags = ", ".join("--" + name.replace("_", "-") for name in named)
        raise ValueError(f"{settings.model} has no fixed point; leave out {flags}")
    dataset = data.get(str(settings.data))
    return Opened(run, settings, net.to(where).eval(), dataset, checkpoint.position, identity)
