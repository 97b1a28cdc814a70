"""The command line: python -m reproduction STUDY | all | report | train | collect."""

import argparse
import importlib
import math
import sys
from pathlib import Path
from typing import Any

# What needs torch is imported in functions: --help does without.

# Modules of this package, in the order of the report; study.py describes what they offer.
STUDIES = {
    "table1": "accuracy of JFB and explicit networks (the first table)",
    "rivals": "Neural ODEs, monotone networks and multiscale DEQs",
    "table2": "time and accuracy against Jacobian-based training (the second table)",
    "neumann": "training time by order of the Neumann series",
    "accelerate": "training with Anderson and Broyden",
    "memory": "memory and time of a step by depth",
    "toy": "the toy example y = d + y^5",
    "contraction": "does T contract during training?",
    "theory": "Lemma, Theorem and Corollary on trained weights",
    "authors": "the authors' SVHN weights in our network",
}
QUICK = Path("runs/quick")
STUDY = """\
Train or compute what the study needs and its records lack, write the records, and print its table.
With --quick everything runs on digits, on a CPU, in minutes, and is written below runs/quick.
"""
TRAIN = """\
Run training jobs one after the other, each in RUNS/JOB, until they are finished or the minutes are over.

The minutes count from the start of the process. A run stops at the end of an epoch; the same command resumes it.
On a CPU a resumed run is the same bit by bit; on a GPU statistically: kernels add in another order.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code, 2 for input that cannot be used."""
    given = _parser().parse_args(arguments)
    from banach.train import CheckpointError, RunError

    try:
        {"train": _train, "collect": _collect}.get(given.command, _study)(given)
    except (ValueError, OSError, RunError, CheckpointError) as error:  # DataError is a ValueError
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    text, form = "The paper, reproduced with banach.", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m reproduction", description=text)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    records, runs = (argparse.ArgumentParser(add_help=False) for _ in range(2))
    records.add_argument("--records", type=Path, help="folder of the .jsonl files (results/reproduction)")
    runs.add_argument("--runs", type=Path, help="folder of run directories (runs)")
    runs.add_argument("--data-dir", type=Path, help="folder of the data sets")
    runs.add_argument("--device", default="auto", help="auto, cpu or cuda")

    def add(name: str, text: str, about: str, *more: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=text, description=about, formatter_class=form, parents=[records, *more]
        )

    for name in (*STUDIES, "all"):
        text = STUDIES.get(name, "all studies, then the report")
        study = add(name, text, STUDY, runs)
        study.add_argument("--quick", action="store_true", help="on digits, on a CPU, in minutes")
    report = add("report", "write docs/reproduction.md from the records", "Write the pages and figures.")
    report.add_argument("--docs", type=Path, default=Path("docs"), help="folder to write to (docs)")
    collect = add("collect", "add runs to the records", "Write one line per run, finished or in work.")
    collect.add_argument("runs", type=Path, help="folder of run directories")
    train = add("train", "run training jobs, with a time budget", TRAIN, runs)
    train.add_argument("jobs", nargs="*", metavar="JOB", help="names of jobs; --list prints them")
    train.add_argument("--list", action="store_true", help="print the names of all jobs and exit")
    train.add_argument("--minutes", type=float, default=math.inf, help="stop in time (default: no limit)")
    train.add_argument("--pack", type=Path, metavar="FOLDER", help="write JOB.tar there, also every few minutes")
    train.add_argument("--unpack", type=Path, metavar="FOLDER", help="take JOB.tar there if it is ahead of RUNS")
    return parser


def _options(given: argparse.Namespace) -> Any:
    """Return the options that were given; a quick run has its own folders and runs on the CPU."""
    from banach.train import Settings
    from reproduction.study import Options

    values = {name: value for name, value in vars(given).items() if value is not None}
    if values.get("quick"):
        values = {"records": QUICK, "runs": QUICK / "runs", **values}
        values["device"] = values["device"].replace("auto", "cpu")
    options = Options(**{name: values[name] for name in Options.__dataclass_fields__ if name in values})
    # Before hours of work, not after.
    Settings(device=options.device).usable_device()
    for folder in (options.records, options.runs, options.pack):
        if folder and folder.exists() and not folder.is_dir():
            raise ValueError(f"expected a folder, got the file {folder}")
    return options


def _modules() -> dict[str, Any]:
    """Import the studies, which a training does without."""
    return {name: importlib.import_module(f"reproduction.{name}") for name in STUDIES}


def _study(given: argparse.Namespace) -> None:
    from reproduction import report

    options, studies = _options(given), _modules()
    if given.command == "report" and not any(options.records.glob("*.jsonl")):
        raise ValueError(f"expected records (.jsonl files) in the folder {options.records}; see `collect --help`")
    for name in {"all": (*STUDIES,), "report": ()}.get(given.command, (given.command,)):
        options.say(f"{name}: {(studies[name].__doc__ or '').splitlines()[0]}")
        options.say(studies[name].values(studies[name].run(options))["table"] + "\n")
    if given.command in ("all", "report"):
        docs = QUICK / "docs" if options.quick else getattr(given, "docs", Path("docs"))
        options.say(f"written: {report.write(studies, options, docs)}")


def _collect(given: argparse.Namespace) -> None:
    from reproduction.trainings import collect

    folder = _options(given).records
    if not given.runs.is_dir():
        raise ValueError(f"expected a folder of run directories, got {given.runs}")
    print(f"{folder}: {len(collect(given.runs, folder))} finished runs")


def _train(given: argparse.Namespace) -> None:
    from reproduction import jobs
    from reproduction.train import train

    if given.list:
        print("\n".join(jobs.by_name()))
        return
    if not given.jobs:
        raise ValueError("name at least one job; `train --list` prints all jobs")
    if not given.minutes >= 0:
        raise ValueError(f"--minutes must be a number of at least 0, got {given.minutes}")
    train([jobs.get(name) for name in given.jobs], _options(given))


if __name__ == "__main__":
    sys.exit(main())
