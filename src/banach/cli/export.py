"""`banach export`: the network of a run as one file for onnxruntime or PyTorch, with a model card."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from banach import checks
from banach.cli.console import console
from banach.cli.shared import Imports, RunDir, open_run, option
from banach.export import ENDING
from banach.export import export as write
from banach.train import words

EPILOG = """\b
Examples:
  banach export runs/digits-1                     runs/digits-1/model.onnx
  banach export runs/digits-1 --format torch      runs/digits-1/model.pt2
  banach export runs/mnist-1 --solver anderson --out mnist.onnx"""


def export(
    run: RunDir,
    format: Annotated[str, typer.Option(help="onnx | torch.")] = "onnx",
    out: Annotated[Path | None, option("File to write.  [model.onnx or model.pt2 in the run]")] = None,
    solver: Annotated[str | None, option(f"{words.SOLVERS}.  [the run's]")] = None,
    modules: Imports = None,
) -> None:
    """Export a run's newest weights: any batch size, every image stops at its own step.

    The model card is written to FILE.json: how to load the file, how to scale images, where the weights come from.
    """
    ending = ENDING[checks.nearest("format", format, ENDING)]
    path = out or run / f"model{ending}"
    if path.suffix != ending or path.is_dir():
        raise ValueError(f"expected a file that ends in {ending}, got {path}; pass --out {path.stem}{ending}")
    opened = open_run(run, "cpu", solver=solver)
    dataset, trained = opened.dataset, opened.run.settings
    card = {
        "model": trained.model,
        "weights": {"run": run.resolve(), "epochs": opened.position.epoch, "settings": trained.to_dict()},
        "data": dataset.title,
        "classes": dataset.classes,
        "normalisation": "(pixels / 255 - mean) / std" if trained.normalise else "pixels / 255",
        "mean": dataset.mean,
        "std": dataset.std,
    }
    write(opened.net, torch.zeros(2, *dataset.shape), path, format=format, card=card)
    console.print(f"{format} file: {path}\nmodel card, with the line that loads it: {path}.json")
