"""`python -m benchmarks.gpu [--points ...] [--profile] [--more]`: measure, print, write results/gpu/*.json."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from banach.provenance import source_commit, write_json
from benchmarks.gpu import fast, more, roofline
from benchmarks.gpu.measure import QUICK, Plan, Start, attempt, measure, trained
from benchmarks.gpu.peers import Contender, contenders
from benchmarks.gpu.points import POINTS, Feed, feed
from benchmarks.gpu.precision import searched, switches
from benchmarks.gpu.profile import profile
from benchmarks.gpu.tables import Outcome, Settings, overview, profile_rows
from benchmarks.report import Result, is_here

WIDTH = 120
fast.register_all()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 1 if a target was missed."""
    chosen = _parse(arguments)
    device = torch.device(chosen.device)
    plan = replace(QUICK if chosen.quick else Plan(), seed=chosen.seed)
    source_commit()  # before the first result is written, which would make the tree dirty
    console = Console(width=WIDTH)
    outcomes: dict[str, Outcome] = {}
    with searched(device, chosen.cudnn_benchmark):
        rates = roofline.measure_rates(device, quick=chosen.quick)
        for name in chosen.points:
            point = replace(POINTS[name], batch=4) if chosen.quick else POINTS[name]
            images = feed(point, device, chosen.data_dir, many=4 if chosen.quick else 64)
            start = trained(point, iter(images), device, plan)
            outcomes[name] = run(start, images, chosen.contenders, plan, rates)
            outcomes[name].result().show(console)
            outcomes[name].write(chosen.out)  # at once: what comes later may not come to its end
            if chosen.profile:
                _profile(outcomes[name], start, images, chosen, console)
    table = overview(outcomes)
    table.show(console)
    table.write(chosen.out)
    missed = sum(not target.met for outcome in outcomes.values() for target in outcome.result().targets)
    console.print(f"targets missed: {missed}; written to {chosen.out}/", soft_wrap=True)
    if chosen.more:
        where = [] if chosen.data_dir is None else ["--data-dir", str(chosen.data_dir)]
        missed += more.main([*more.NAMES, "--out", str(chosen.out), *where])
    return int(missed > 0)


def run(start: Start, images: Feed, chosen: list[Contender], plan: Plan, rates: roofline.Rates) -> Outcome:
    """One point: every contender, and the limit beside them."""
    point, device = start.setting.point, start.setting.device
    if point.relative:
        chosen = [contender for contender in chosen if contender.role in ("ours", "twin")]
    measured, notes = measure(start, images, chosen, plan)
    settings = Settings(point, plan, images.title, torch.backends.cudnn.benchmark)
    return Outcome(settings, measured, notes, roofline.count(point), rates, str(device))


def _profile(outcome: Outcome, start: Start, images: Feed, chosen: argparse.Namespace, console: Console) -> None:
    """Profiles of the contenders that were asked for, each in the precision it was measured in."""
    profiles: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for contender in chosen.contenders:
        one = outcome.named(contender.name)
        if one is None or (chosen.profile is not True and contender.name not in chosen.profile):
            continue
        own = Start(start.warm, replace(start.setting, precision=one.precision))
        got = attempt(contender.name, notes, partial(_one_profile, contender, own, images, chosen.quick))
        if got is not None:
            profiles[contender.name] = {"precision": one.precision, **got}
    name, rows, device = f"profile-{outcome.point.name}", profile_rows(profiles), str(start.setting.device)
    result = Result(name, "where does the time go? %", rows, [], notes, outcome.settings, device)
    result.show(console)
    write_json(chosen.out / f"{name}.json", {**result.as_dict(), "profiles": profiles})


def _one_profile(contender: Contender, start: Start, images: Feed, quick: bool) -> dict[str, Any]:
    device, batches = start.setting.device, iter(images)
    with switches(start.setting.precision, device):
        step = contender.build(start.setting, start.warm)
        for batch in islice(batches, 1 if quick else contender.settle):
            step(*batch)
        return profile(step, batches, device, steps=1 if quick else 5).as_dict()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = contenders()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="training steps of banach and its peers, in one run"
    )
    parser.add_argument(
        "--points", default=",".join(POINTS), help="which of them, with commas; all of them if not given"
    )
    parser.add_argument(
        "--contenders", default=",".join(known), help="which of them, with commas; all if not given"
    )
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="folder for the JSON files")
    parser.add_argument("--quick", action="store_true", help="batch 4 and a few steps: does it run?")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--data-dir", type=Path, help="where the data sets lie; random images where there are none"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the network's weights")
    parser.add_argument(
        "--no-cudnn-benchmark", dest="cudnn_benchmark", action="store_false", help="cuDNN's own choice"
    )
    parser.add_argument(
        "--profile", nargs="?", const=True, help="also where the time goes, of all or of these contenders"
    )
    parser.add_argument("--more", action="store_true", help=f"then {', '.join(more.NAMES)}")
    chosen = parser.parse_args(arguments)
    chosen.points = _names(parser, "point", chosen.points, POINTS)
    chosen.contenders = [known[name] for name in _names(parser, "contender", chosen.contenders, known)]
    if isinstance(chosen.profile, str):
        chosen.profile = _names(parser, "contender", chosen.profile, known)
    if chosen.data_dir is not None and not chosen.data_dir.is_dir():
        parser.error(f"{chosen.data_dir} is not a folder; name one that is there, or leave out --data-dir")
    if chosen.device == "auto":
        chosen.device = "cuda" if torch.cuda.is_available() else "cpu"
    if not is_here(chosen.device):
        parser.error(f"there is no device {chosen.device}; name cpu, cuda or cuda:N that is here, or leave it out")
    if chosen.more and (chosen.quick or torch.device(chosen.device).type != "cuda"):
        parser.error("--more measures at full size on a GPU, got --quick or no GPU; leave out --more")
    return chosen


def _names(parser: argparse.ArgumentParser, what: str, given: str, known: Any) -> list[str]:
    names = [name for name in given.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        parser.error(f"no {what} is called {', '.join(unknown) or repr(given)}; there are {', '.join(known)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
