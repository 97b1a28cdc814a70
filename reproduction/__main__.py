"""The command line: python -m reproduction train JOB [JOB ...] --minutes 9, and collect."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from reproduction import STARTED  # noqa: F401  (the clock starts here)

RECORDS = Path("results/reproduction/trainings.jsonl")
TRAIN = """\
Run training jobs one after the other, each in RUNS/JOB, until they are finished or the minutes are over.

The minutes count from the start of the process. A run stops at the end of an epoch; the same command resumes it.
On a CPU a resumed run is the same bit by bit; on a GPU it is statistically, not bitwise, the same.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code, 2 for input that cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        return _collect(options) if options.command == "collect" else _train(options)
    except _expected() as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reproduction", description="The paper, reproduced with banach."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="run training jobs, with a time budget",
        description=TRAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("jobs", nargs="*", metavar="JOB", help="names of jobs; --list prints them")
    train.add_argument("--list", action="store_true", help="print the names of all jobs and exit")
    train.add_argument("--minutes", type=float, default=math.inf, help="stop in time (default: no limit)")
    train.add_argument("--runs", type=Path, default=Path("runs"), help="folder of run directories (runs)")
    train.add_argument("--data-dir", type=Path, help="folder of the data sets")
    train.add_argument("--pack", type=Path, metavar="FOLDER", help="write JOB.tar there, also every few minutes")
    train.add_argument(
        "--unpack", type=Path, metavar="FOLDER", help="take JOB.tar from there if it is ahead of RUNS"
    )
    train.add_argument("--resume", action="store_true", help="refuse to start a job from its beginning")
    train.add_argument("--device", default="auto", help="auto, cpu or cuda")
    train.add_argument("--changed-sources", action="store_true", help="resume a run that other sources began")
    collect = commands.add_parser(
        "collect", help="gather the records of finished runs in one file", description="Write one line per run."
    )
    collect.add_argument("runs", type=Path, help="folder of run directories")
    collect.add_argument("--out", type=Path, default=RECORDS, help=f"the file ({RECORDS}); other runs in it stay")
    return parser


def _collect(given: argparse.Namespace) -> int:
    from reproduction.collect import collect

    names = collect(given.runs, given.out)
    print(f"{given.out}: {len(names)} finished runs")
    return 0


def _train(given: argparse.Namespace) -> int:
    from reproduction import jobs
    from reproduction.train import Options, train

    if given.list:
        print("\n".join(jobs.JOBS))
        return 0
    if not given.jobs:
        raise ValueError("name at least one job; `train --list` prints all jobs")
    if not given.minutes >= 0:
        raise ValueError(f"--minutes must be a number of at least 0, got {given.minutes}")
    chosen = [jobs.get(name) for name in given.jobs]
    names = ("minutes", "runs", "data_dir", "pack", "unpack", "device", "resume", "changed_sources")
    train(chosen, Options(**{name: getattr(given, name) for name in names}))
    return 0


def _expected() -> tuple[type[Exception], ...]:
    """Errors whose sentence is for the user."""
    from banach.train import CheckpointError, RunError

    return ValueError, OSError, RunError, CheckpointError  # DataError is a ValueError


if __name__ == "__main__":
    sys.exit(main())
