"""`banach compare`: the settings in which runs differ, their figures, and one plot."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from banach.cli.console import console, table
from banach.cli.shared import argument, check_out, option, show_plot
from banach.train import Epoch, Run
from banach.train.plot import Panel, curves

EPILOG = """\b
Examples:
  banach compare runs/digits-1 runs/digits-2
  banach compare runs/* --out jfb-and-others.png"""

PNG = b"\x89PNG\r\n\x1a\n"
ALWAYS = ("data", "model", "solver", "backward", "eps")  # settings that are shown even if they are the same


def compare(
    runs: Annotated[list[Path], argument("Run directories.")],
    out: Annotated[Path, option("The plot, a PNG.", show_default=True)] = Path("comparison.png"),
) -> None:
    """Compare runs: every setting that differs, their figures, and a plot of all of them.

    Validation accuracy, steps and residual are those of the last epoch; steps and residual are of the training
    solves. Test accuracy is what the run wrote when it ended ("-" before that): nothing is computed again.
    """
    check_out(out, "the plot is a PNG", ".png", "a PNG", PNG)
    found = {str(path): Run.open(path) for path in runs}
    epochs = {name: run.metrics() for name, run in found.items()}
    tests = {name: run.test() or {} for name, run in found.items()}
    console.print(table("", ("setting", *found), _settings(found.values())))
    console.print()
    figures = [_figures(run, epochs[name], tests[name]) for name, run in found.items()]
    console.print(table("", ("figure", *found), [(name, *(one[name] for one in figures)) for name in figures[0]]))
    titles = dict.fromkeys(test["title"] for test in tests.values() if test)
    if titles:
        console.print(f"data: {', '.join(titles)}")
    if len(titles) > 1 or len({run.settings.data for run in found.values()}) > 1:
        console.print("The runs use different data: their accuracies are not comparable.")
    accuracy: list[Panel] = [("Accuracy", {"validation": "validation_accuracy"}, "percent")]
    others: list[Panel] = [("Loss", {"train": "loss"}, ""), ("Solver steps", {"train, mean": "depth"}, "")]
    times: Any = {"across": "seconds"}
    show_plot(lambda: curves(epochs, accuracy) + curves(epochs, accuracy, **times) + curves(epochs, others), out)


def _settings(runs: Iterable[Run]) -> list[list[Any]]:
    """Return the rows of the settings in ALWAYS, then of those that differ."""
    chosen = [run.settings.to_dict() for run in runs]
    for settings in chosen:
        settings["schedule"] = " ".join(map(str, settings["schedule"].values()))
    rows = {key: [settings[key] for settings in chosen] for key in (*ALWAYS, *chosen[0])}
    shown = {key: row for key, row in rows.items() if key in ALWAYS or row != row[:1] * len(row)}
    return [[key.replace("_", "-"), *row] for key, row in shown.items()]


def _figures(run: Run, epochs: Sequence[Epoch], test: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the figures of a run by name, None for those that it does not have."""
    last, products = vars(epochs[-1]) if epochs else {}, sum(epoch.products for epoch in epochs)
    seconds = sum(epoch.seconds for epoch in epochs)
    figures = {
        "epochs done": ("{}", f"{len(epochs)}/{run.settings.epochs}"),
        "validation accuracy": ("{:.2%}", last.get("validation_accuracy")),
        "test accuracy": ("{:.2%}", test.get("totals", {}).get("accuracy")),
        "mean solver steps": ("{:.1f}", last.get("depth")),
        "mean residual": ("{:.1e}", last.get("residual")),
        "J-products": ("{:,}", products if epochs else None),
        "seconds": ("{:,.1f}", seconds if epochs else None),
        "seconds per epoch": ("{:,.2f}", seconds / len(epochs) if epochs else None),
    }
    return {name: None if value is None else pattern.format(value) for name, (pattern, value) in figures.items()}
