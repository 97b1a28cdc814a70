"""`banach paper STUDY...`: every table, figure and claim of the paper, measured; `report` puts them on a page."""

from __future__ import annotations

import itertools
import tempfile
import textwrap
from pathlib import Path
from typing import Annotated

import torch
import typer

from banach.cli import assemble
from banach.cli.console import console, fits, table
from banach.paper import Findings, Options, Study
from banach.paper.study import cell
from banach.train.schedule import nearest

INDENT = 4 * " "
EPILOG = """\b
Examples:
  banach paper toy                        one study
  banach paper all --quick                every study on digits, on a CPU, in minutes
  banach paper table1 --data-dir ~/data --device cuda
  banach paper report                     docs/reproduction.md and .html from results/paper/"""


def paper(
    studies: Annotated[list[str], typer.Argument(help="Names of studies, or all, or report.", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="On digits, on a CPU, in minutes.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data lies.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="For JSON and figures.  [results/paper; quick: runs/paper-quick]")
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(help="For run directories, which resume.  [runs/paper; quick: runs/paper-quick]")
    ] = None,
    at_once: Annotated[
        int,
        typer.Option(min=1, help="Trainings that share the device, where time is not the point: table1, theory."),
    ] = 1,
    page: Annotated[
        Path | None, typer.Option(help="What the report writes, beside an .html.  [docs/reproduction.md]")
    ] = None,
) -> None:
    """Reproduce the paper: table1, table2, neumann, figures, accelerate, toy, theory, memory.

    Each writes its figures with provenance and prints a table: the paper's number beside ours.
    """
    from banach.paper.all import STUDIES
    from banach.paper.beforehand import check_data
    from banach.paper.report import write_report

    base = Path("runs/paper-quick") if quick else Path("results/paper")
    options = Options(
        quick=quick,
        data_dir=data_dir,
        device="cpu" if quick and device == "auto" else device,
        out=out or base,
        runs=runs or (Path("runs/paper-quick") if quick else Path("runs/paper")),
        at_once=at_once,
        say=lambda text: console.print(f"  {text}"),
    )
    assemble.usable(_device(options), options.device)
    names = [nearest("study", name, [*STUDIES, "all", "report"]) for name in studies]
    if set(names) != {"report"}:
        _check_writable(options.out)
    chosen = list(dict.fromkeys(n for asked in names for n in (STUDIES if asked == "all" else [asked])))
    check_data([STUDIES[name] for name in chosen if name != "report"], options)
    try:
        for name in chosen:
            if name == "report":
                console.print(f"report: {write_report(options.out, _page(options) if page is None else page)}")
            else:
                _carry_out(STUDIES[name], options)
    except KeyboardInterrupt:
        console.print("what was trained is kept: the same command goes on from there")
        raise


def _check_writable(folder: Path) -> None:
    """Before hours of work, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        said = f"--out {folder} cannot be written to ({error.strerror}); choose another folder"
        raise ValueError(said) from None


def _device(options: Options) -> torch.device:
    try:
        return options.torch_device
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {options.device!r}") from None


def _page(options: Options) -> Path:
    """A quick one does not take the place of the real one."""
    return options.out / "reproduction.md" if options.quick else Path("docs/reproduction.md")


def _carry_out(study: Study, options: Options) -> None:
    console.print(f"{study.name}: {study.claim}")
    if options.at_once > 1:
        _parts(study, options)
    found = study.run(options)
    written = found.write(options)  # before it is shown: nothing is lost by what is wrong with a terminal
    _print_rows(found)
    for note in found.notes:
        console.print(f"  {note}")
    console.print("written: " + ", ".join(str(path) for path in written) + "\n")


def _parts(study: Study, options: Options) -> None:
    """Those that may run at once, with a bar."""
    from rich.progress import Progress

    from banach.paper.together import carry_out_together

    parts = study.parts(options)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("trainings", total=len(parts))
        carry_out_together(parts, options, lambda done: bar.update(task, completed=done))


def _print_rows(found: Findings) -> None:
    """As a table; row by row where the terminal is too narrow for it."""
    columns = list(dict.fromkeys(key for row in found.rows for key in row))
    made = table("", columns, [[cell(row.get(column)) for column in columns] for row in found.rows])
    if fits(made):
        console.print(made)
        return
    for row in found.rows:
        words = list(itertools.takewhile(lambda value: isinstance(value, str), row.values()))
        figures = list(row.items())[len(words) :]
        rest = [f"{key} {cell(value)}" for key, value in figures if value is not None]
        console.print(textwrap.fill(", ".join(words), console.width))
        text = textwrap.fill("; ".join(rest), console.width, initial_indent=INDENT, subsequent_indent=INDENT)
        console.print(text)
