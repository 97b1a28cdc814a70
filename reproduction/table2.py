"""JFB trains faster than Jacobian-based backpropagation, without a J-product, and is at least as accurate.

The paper's second table, in fp32. Jacobian-based: w by conjugate gradients (CG) on the normal equations, with the
released settings for it (recipe "jacobian"). A pair of rows differs in the backward mode only. Words in the names
of rows: "pair", on all images; "bn" and "plain", R with and without batch norm; "relative", CG to a relative 1e-3;
"trained", from weights of the first table. Rows without "pair" run on 10,000 images, with a host check in every
solve. pages/table2.md explains earlier rows, such as CG as released ("absolute"): they are records only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from torch import Tensor

from banach import JFB, Implicit, Mode, NormalCG, Status, Tolerance, models
from reproduction import table1
from reproduction.intervals import Interval, verdict
from reproduction.jobs import Job
from reproduction.study import Options, panels, table
from reproduction.trainings import Training, trained

RECORDS = "table2.jsonl"
Row = Training
PAPER = {"mnist": 28.4 / 17.6, "svhn": 92.8 / 36.9, "cifar10": 530.9 / 146.6}  # time of an epoch, CG against JFB
DATA = (*PAPER, "digits")
PAIRS = {  # row -> the JFB row that differs in the backward mode only
    "cg-pair": "jfb-pair",
    "cg-captured-plain": "jfb-captured-plain",
    "cg-relative-plain": "jfb-plain",
    "cg-absolute-plain": "jfb-plain",
    "cg-printed-plain": "jfb-plain",
    "cg-relative-bn": "jfb-few-bn",
    "cg-absolute-bn": "jfb-few-bn",
    "cg-relative-plain-late": "jfb-plain-late",
    "cg-absolute-plain-late": "jfb-plain-late",
    "cg-trained-bn": "jfb-trained-bn",
}
CHOSEN = ("cg-pair", "cg-captured-plain", "cg-relative-plain")  # on the page: the one with most runs
ONCE = ("jfb-plain", "cg-relative-plain", "jfb-trained-bn", "cg-trained-bn")
EPOCHS = {"mnist": 15, "svhn": 5, "cifar10": 3, "digits": 2}  # of the pair


class Adjoints(Counter[str]):
    """A `report` for `Implicit` that counts how the samples' adjoint equations ended."""

    def __call__(self, products: int, residual: Tensor, status: tuple[Status, ...]) -> None:
        self.update(f"adjoint {end.name}" for end in status)


def mode(data: str, row: str) -> Mode:
    """Return the backward mode of a row."""
    if "jfb" in row:
        return JFB()
    cap = models.recipe(data, _recipe(data)).max_steps
    return Implicit(NormalCG(), Tolerance(atol=0, rtol=1e-3, max_steps=cap), report=Adjoints())


def _recipe(data: str) -> str | None:
    return None if data == "digits" else "jacobian"


def _job(data: str, row: str, seed: int = 0) -> Job:
    pair = "pair" in row
    start = next(job for job in (*table1.JOBS, *table1.QUICK) if job.name == f"{data}-jfb-seed0")
    return Job(
        name=f"table2-{data}-{row}-seed{seed}",
        data=data,
        model=data,
        seed=seed,
        recipe=_recipe(data),
        batch_norm="bn" in row,
        backward=partial(mode, data, row),
        subset=256 if data == "digits" else None if pair else 10_000,
        fast=pair,
        epochs=EPOCHS[data] if pair else 2 if data in ("digits", "cifar10") else 3,
        augment="paper" if data == "cifar10" else None,
        after=start if "trained" in row else None,
    )


def _jobs(data: str) -> list[Job]:
    pairs = [_job(data, row, seed) for seed in range(3) for row in ("jfb-pair", "cg-pair")]
    return pairs + [_job(data, row) for row in ONCE]


QUICK = _jobs("digits")
JOBS = [job for data in PAPER for job in _jobs(data)]


def run(options: Options) -> list[Training]:
    """Train what the records lack, and return all records of the table."""
    return trained(QUICK if options.quick else JOBS, options)


def runs_of(rows: Sequence[Training], data: str, tag: str) -> list[Training]:
    """Return the runs of one row, by seed."""
    return [row for row in rows if row.group == f"table2-{data}-{tag}"]


def ratios(some: Sequence[Training], base: Sequence[Training]) -> list[float]:
    """Return the time per training image relative to `base`, for the seeds that both have."""
    return [(a.seconds / a.images) / (b.seconds / b.images) for a, b in zip(some, base, strict=False)]


def values(rows: Sequence[Training]) -> dict[str, Any]:
    """Return by data set the like-for-like pair (ratio, gain, n, length, verdicts) and the table."""
    found: dict[str, Any] = {"table": _table(rows)}
    for data in DATA:
        tag = max(CHOSEN, key=lambda tag: len(runs_of(rows, data, tag)))
        cg, jfb = runs_of(rows, data, tag), runs_of(rows, data, PAIRS.get(tag, ""))
        found |= {f"{data}.{key}": value for key, value in _pair(cg, jfb, PAPER.get(data, math.nan)).items()}
        for key in ("relative-plain", "relative-bn", "trained-bn"):
            found[f"{data}.{key}.solved"] = _percent([_solved(row) for row in runs_of(rows, data, f"cg-{key}")])
    return found


def _pair(cg: Sequence[Training], jfb: Sequence[Training], printed: float) -> dict[str, Any]:
    if not cg or not jfb:
        return dict.fromkeys(("ratio", "range", "gain", "n", "length"), "-") | _verdicts(None, None, printed)
    times = ratios(cg, jfb)
    gain = Interval.of(row.clean for row in jfb).minus(Interval.of(row.clean for row in cg))
    return {
        "ratio": Interval.of(times),
        "range": f"{min(times):.2f} to {max(times):.2f}",
        "gain": f"{gain:+.2f}",
        "n": len(times),
        "length": f"{len(cg[0].epochs)} epochs, {cg[0].images:,} images",
        "met": _percent([row.epochs[-1].converged for row in (*cg, *jfb)]),
        **_verdicts(Interval.of(times), gain, printed),
    }


def _verdicts(times: Interval | None, gain: Interval | None, printed: float) -> dict[str, Any]:
    """On the cost a short training decides, since an epoch is an epoch; on the accuracy it does not."""
    return {
        "paper": printed,
        "ratio_verdict": verdict(times, printed),
        "gain_verdict": verdict(gain, 0.0, full=False),
    }


def _percent(shares: Sequence[float | None]) -> str:
    """Return the least share. Anything short of all is shown as such, never rounded to 100%."""
    known = [share for share in shares if share is not None]
    if not known:
        return "-"
    least = min(known)
    return "100%" if least == 1 else f"{min(100 * least, 99.99):.2f}%"


def _solved(row: Training) -> float | None:
    """Return the share of adjoint equations that met the tolerance."""
    all_of_them = row.count("adjoint ")
    return row.count("adjoint CONVERGED") / all_of_them if all_of_them else None


def _table(rows: Sequence[Training]) -> str:
    columns = "data|row|n|epochs|images|s per epoch|like for like|J-products per image|adjoints solved"
    lines = []
    for data in DATA:
        prefix = f"table2-{data}-"
        for tag in dict.fromkeys(row.group.removeprefix(prefix) for row in rows if row.group.startswith(prefix)):
            runs, base = runs_of(rows, data, tag), runs_of(rows, data, PAIRS.get(tag, ""))
            one, last = runs[0], runs[0].epochs[-1]
            same = base and not one.count("R scaled down")  # as earlier released rows did: that is another R
            like = Interval.of(ratios(runs, base)) if same else None
            lines.append((
                data, tag, len(runs), len(one.epochs), one.images, fmean(run.seconds for run in runs), like,
                last.products / one.images, _percent([_solved(run) for run in runs]),
                last.depth, _percent([last.converged]), Interval.of(run.clean for run in runs),
            ))  # fmt: skip
    return table(lines, [*columns.split("|"), "forward depth", "forward converged", "clean %"])


def figures(rows: Sequence[Training]) -> dict[str, Any]:
    """Draw the time per training image of every like-for-like pair, by data set."""
    names = [data for data in DATA if any(runs_of(rows, data, tag) for tag in PAIRS)]
    figure, axes = panels(len(names), width=4.5)
    for one, data in zip(axes, names, strict=True):
        tags = [tag for cg, jfb in PAIRS.items() for tag in (jfb, cg) if runs_of(rows, data, cg)]
        tags = list(dict.fromkeys(tags))
        times = [1e3 * fmean(row.seconds / row.images for row in runs_of(rows, data, tag)) for tag in tags]
        one.barh(tags, times, color=["C0" if "jfb" in tag else "C1" for tag in tags])
        one.set(title=data, xlabel="ms per training image")
        one.invert_yaxis()
    return {"table2": figure}
