"""`banach evaluate`: accuracy, loss, depth and residual of a trained network on a split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from banach.cli.console import console, table
from banach.cli.opened import open_run
from banach.cli.train import figures, record
from banach.network import ImplicitNetwork
from banach.provenance import write_json
from banach.train import evaluate as measure
from banach.train import words

EPILOG = """\b
Examples:
  banach evaluate runs/digits-1
  banach evaluate runs/mnist-1 --split validation --eps 1e-4 --max-steps 500
  banach evaluate runs/cifar10-1 --solver anderson --device cuda"""


def evaluate(
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    split: Annotated[str, typer.Option(help="test | validation | train.")] = "test",
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data.", show_default=False)] = None,
    solver: Annotated[str | None, typer.Option(help=words.SOLVERS + ".", show_default=False)] = None,
    eps: Annotated[
        float | None, typer.Option(help="Stop at a residual of eps; alone, rtol is 0.", show_default=False)
    ] = None,
    rtol: Annotated[
        float | None, typer.Option(help="Or at one relative to the latent, plus eps.", show_default=False)
    ] = None,
    norm: Annotated[str | None, typer.Option(help=words.NORMS + ".", show_default=False)] = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps at most.", show_default=False)] = None,
    batch_size: Annotated[int, typer.Option(help="Images at a time; changes no answer.")] = 400,
    precision: Annotated[str | None, typer.Option(help="fp32 | tf32 | bf16.  [the run's]")] = None,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N.")] = "auto",
) -> None:
    """Evaluate a run's newest weights: eval mode, clean images, each image once.

    Options that are not given are those of training. The figures go to evaluation-SPLIT.json in the run.
    """
    opened = open_run(run, device)
    tolerance = {"eps": eps, "rtol": rtol, "norm": norm, "max_steps": max_steps}
    changes = {"solver": solver, **tolerance, "precision": precision}
    given: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    if eps is not None and rtol is None and isinstance(opened.net, ImplicitNetwork) and opened.net.tolerance.rtol:
        given["rtol"] = 0.0  # else rtol could stop earlier than eps
    settings = replace(opened.settings, **given)
    net = opened.net
    if isinstance(net, ImplicitNetwork):
        net.solver = words.solver(settings.solver or "picard")
        net.tolerance = settings.tolerance(net.tolerance)
    elif set(given) - {"precision"}:
        raise ValueError(f"{settings.model} has no fixed point; leave out {', '.join(given)}")
    if opened.position.epoch < settings.epochs:
        done = f"{opened.position.epoch} of {settings.epochs} epochs"
        console.print(f"the run is not finished ({done}): do not choose anything by its test set")
    if settings.whole and split == "validation":
        raise ValueError("this run was trained on the validation images too (whole); choose --split test or train")
    images = settings.load(split, data_dir).to(opened.device)
    totals = measure(net, images, batch_size=batch_size, precision=settings.precision)
    rows = [(name.replace("test", split), value) for name, value in figures(totals).items() if value is not None]
    console.print(table(f"{images.title}: {len(images):,} {split} images", ("", "value"), rows))
    position = {"epochs": opened.position.epoch, "steps": opened.position.step}
    content = record(totals, images, split, settings) | position
    console.print(f"figures: {write_json(run / f'evaluation-{split}.json', content)}")
