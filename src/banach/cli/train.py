"""`banach train`: from nothing to a trained network, or on from where a run stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer

from banach.cli import words
from banach.cli.choose import choose
from banach.cli.console import console
from banach.cli.session import Session
from banach.train import Run, RunError

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
  banach train --resume runs/digits-1                 go on where it stopped"""

Text: TypeAlias = str | None
Whole: TypeAlias = int | None
Real: TypeAlias = float | None
Switch: TypeAlias = bool | None


def flag(*names: str, help: str = "", hidden: bool = False, meta: str | None = None) -> Any:
    return typer.Option(*names, help=help, hidden=hidden, metavar=meta, show_default=False)


def train(
    run: Annotated[Path | None, typer.Argument(help="The run to resume.", show_default=False)] = None,
    data: Annotated[Text, flag(help="digits | mnist | svhn | cifar10.  [digits]", meta="NAME")] = None,
    data_dir: Annotated[Path | None, flag(help="Where the data lies; else BANACH_DATA, the cache.")] = None,
    subset: Annotated[Whole, flag(help="Train on that many images.", meta="N")] = None,
    model: Annotated[Text, flag(help="See: banach models.  [the one named as the data]", meta="NAME")] = None,
    solver: Annotated[Text, flag(help="picard[:DAMPING] | anderson[:M] | broyden[:M].  [picard]")] = None,
    backward: Annotated[
        Text, flag(help="jfb | neumann:5 | unroll:3 | implicit:cg | implicit:gmres.  [jfb]")
    ] = None,
    eps: Annotated[Real, flag(help="Stop at a residual of eps.", meta="X")] = None,
    norm: Annotated[Text, flag(help=f"Of the residual: {words.NORMS}.")] = None,
    max_steps: Annotated[Whole, flag(help="At most so many; 0 is the explicit twin.", meta="N")] = None,
    epochs: Annotated[Whole, flag(help="Passes over the data.", meta="N")] = None,
    batch_size: Annotated[Whole, flag(help="Images a step.", meta="N")] = None,
    lr: Annotated[Real, flag(help="Learning rate.", meta="X")] = None,
    precision: Annotated[Text, flag(help="fp32 | tf32 | bf16.  [fp32]")] = None,
    seed: Annotated[Whole, flag(help="Of weights, order and dropout.  [0]", meta="N")] = None,
    device: Annotated[Text, flag(help="auto | cpu | cuda | cuda:N.  [auto]")] = None,
    out: Annotated[Path | None, flag(help="The run directory.  [runs/DATA-N, the next N]")] = None,
    config: Annotated[Path | None, flag("--config", "--settings", help="A TOML file; flags override it.")] = None,
    resume: Annotated[bool, flag("--resume", help="Go on with RUN, or with --out, bit by bit on a CPU.")] = False,
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
        raise ValueError(f"{run} is named without --resume; say --resume to go on with it, or --out for a new run")
    else:
        session = Session.begin(choose(flags, config), out, data_dir)
    return _carry_out(session, tensorboard)


def _carry_out(session: Session, tensorboard: bool) -> int:
    settings = session.settings
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    console.print(session.opening())
    history = session.train(tensorboard=tensorboard)
    if not history.finished:
        console.print(f"stopped after {session.reached()}; go on with: {session.resume_command()}")
        return 128 + int(history.stopped_by or 0)
    session.finish(history)
    return 0


def _named(run: Path | None, out: Path | None, config: Path | None) -> Path:
    """The run to resume, by either way; without a name the newest under runs/."""
    if config is not None:
        raise ValueError(f"a resumed run goes on with its own settings; leave out --config {config}")
    if run is not None and out is not None and run != out:
        raise ValueError(f"--resume names {run} and --out {out}; name one")
    return run or out or _newest()


def _resumed(path: Path, flags: dict[str, Any], data_dir: Path | None) -> Session:
    """Flags that say what the run says already are welcome; only the device may differ."""
    opened = Run.open(path)
    given: dict[str, Any] = dict(flags)
    for name, meant in (("schedule", words.schedule), ("correction_steps", words.whole_numbers)):
        if name in given:
            given[name] = meant(given[name])
    settings = replace(opened.settings, **given)
    opened.check(settings)
    return Session.on(Run(opened.path, settings), data_dir)


def _newest() -> Path:
    runs = sorted(Path("runs").glob("*/settings.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise RunError("there is no run under runs/ to resume; name one: banach train --resume RUN")
    return runs[-1].parent
