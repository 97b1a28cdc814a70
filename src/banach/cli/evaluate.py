"""`banach evaluate`: accuracy, loss, depth and residual of a trained network on a split."""

from typing import Annotated

import typer

from banach.cli.console import console, table
from banach.cli.shared import DataDir, Device, Imports, RunDir, number, open_run, option
from banach.cli.train import figures, record
from banach.provenance import write_json
from banach.train import evaluate as measure
from banach.train import words

EPILOG = """\b
Examples:
  banach evaluate runs/digits-1
  banach evaluate runs/mnist-1 --split validation --eps 1e-4 --max-steps 500
  banach evaluate runs/cifar10-1 --solver anderson --device cuda"""


def evaluate(
    run: RunDir,
    split: Annotated[str, typer.Option(help="test | validation | train.")] = "test",
    data_dir: DataDir = None,
    solver: Annotated[str | None, option(words.SOLVERS + ".")] = None,
    eps: Annotated[float | None, number(float, "Stop at a residual of X. Without --rtol, rtol is then 0.")] = None,
    rtol: Annotated[float | None, number(float, "Relative tolerance: eps plus X times the norm of T(u).")] = None,
    norm: Annotated[str | None, option(words.NORMS + ".")] = None,
    max_steps: Annotated[int | None, number(int, "Stop a solve after N steps.")] = None,
    batch_size: Annotated[int, number(int, "Images at a time; changes no figure.", show_default=True)] = 400,
    precision: Annotated[str | None, option("fp32 | tf32 | bf16.  [the run's]")] = None,
    device: Device = "auto",
    modules: Imports = None,
) -> None:
    """Evaluate a run's newest weights: eval mode, clean images, each image once.

    Options that are not given are those of training. The figures go to evaluation-SPLIT.json in the run.
    """
    given = {"solver": solver, "eps": eps, "rtol": rtol, "norm": norm, "max_steps": max_steps}
    opened = open_run(run, device, **given, precision=precision)
    net, settings, position = opened.net, opened.settings, opened.position
    if position.epoch < settings.epochs:
        done = f"{position.epoch} of {settings.epochs} epochs"
        console.print(f"the run is not finished ({done}): do not choose anything by its test set")
    if settings.whole and split == "validation":
        raise ValueError("this run was trained on the validation images too (whole); choose --split test or train")
    images = opened.load(split, data_dir).to(settings.torch_device)
    totals = measure(net, images, batch_size=batch_size, precision=settings.precision)
    title = f"{images.title}: {len(images):,} {split} images"
    console.print(table(title, ("figure", "value"), figures(totals, split)))
    content = record(totals, images, split, settings) | {"epochs": position.epoch, "steps": position.step}
    console.print(f"figures: {write_json(run / f'evaluation-{split}.json', content)}")
