"""The runner: python -m benchmarks [cpu|gpu] [NAME ...] [--quick] [--out DIR] [--list]."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from banach.provenance import source_commit
from benchmarks.results import Benchmark, earlier

FILES = ("solving", "memory", "onestep", "training_step")
BENCHMARKS = {one.name: one for file in FILES for one in import_module(f"benchmarks.{file}").BENCHMARKS}
FOLDERS = {"cpu": Path("results"), "gpu": Path("results/gpu")}
QUICK = Path("build/benchmarks")  # figures at tiny sizes are not results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run benchmarks, print their tables and write one JSON file each. Figures of the file before are shown too.

    Returns:
        1 if a target was missed at full size, else 0.
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    wanted = _wanted(parser, chosen)
    if chosen.list:
        for one in wanted:
            print(f"{one.group:4} {one.name:14} {one.question}")
        return 0
    if chosen.quick or any(one.group == "cpu" for one in wanted):
        torch.set_num_threads(1)
    source_commit()  # before the first result is written, which would make the tree dirty
    missed = 0
    changes = {key: getattr(chosen, key) for key in ("device", "data_dir", "out", "only", "processes", "seconds")}
    for one in wanted:
        settings = one.settings(quick=chosen.quick, **changes)
        report = one.run(settings)
        before = earlier(FOLDERS[one.group] / f"{one.name}.json")
        written = one.write(report, settings, chosen.out or (QUICK if chosen.quick else FOLDERS[one.group]))
        one.show(report, {} if chosen.quick else before)  # after it is written: a GPU machine may not have rich
        print(f"  written to {written}")
        missed += sum(not target.met for target in report.targets)
    print(f"targets missed: {missed}" + (", which means nothing at this size" if chosen.quick else ""))
    return int(missed > 0 and not chosen.quick)


def _wanted(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> list[Benchmark]:
    """Return the benchmarks that the names select; a group alone selects all of it, nothing selects cpu."""
    groups = [name for name in chosen.names if name in FOLDERS]
    names = [name for name in chosen.names if name not in FOLDERS]
    if not chosen.names and not chosen.list:
        groups = ["cpu"]
    known = {one.name: one for one in BENCHMARKS.values() if one.group in groups or not groups}
    for name in names:
        if name not in known:
            parser.error(f"no benchmark is called {name}; expected one of {', '.join(known)}")
    wanted = [known[name] for name in names or known]
    try:
        torch.empty(0, device=chosen.device or "cpu")
    except (RuntimeError, AssertionError):  # the latter where torch was built without CUDA
        parser.error(f"expected cpu, cuda or cuda:N of this machine as --device, got {chosen.device}")
    if chosen.data_dir is not None and not chosen.data_dir.is_dir():
        parser.error(f"expected a folder as --data-dir, got {chosen.data_dir}")
    needs = [one.name for one in wanted if one.group == "gpu"]
    if needs and not (chosen.quick or chosen.list or torch.cuda.is_available()):
        parser.error(f"{needs[0]} needs a CUDA GPU; give --quick to run it at a tiny size on a CPU")
    return wanted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="measure banach against its peers")
    parser.add_argument("names", nargs="*", metavar="NAME", help="cpu, gpu or benchmarks; default cpu")
    parser.add_argument("--list", action="store_true", help="print the benchmarks and what they ask")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, on a CPU: shows that everything runs")
    where = "folder of the JSON files; default results, results/gpu, or build/benchmarks if quick"
    parser.add_argument("--out", type=Path, help=where)
    parser.add_argument("--device", help="such as cuda:1; default: what each benchmark is for")
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets; default: BANACH_DATA, the cache")
    commas = lambda given: tuple(name for name in given.split(",") if name)  # noqa: E731
    parser.add_argument("--only", type=commas, help="of training-step: beginnings of jobs, such as step/mlp,depth")
    parser.add_argument("--processes", type=int, help="of training-step, per contender; default 3")
    seconds = "of training-step: end in time (default 500); the next call goes on"
    parser.add_argument("--seconds", type=float, help=seconds)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
