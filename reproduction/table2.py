"""JFB trains faster than Jacobian-based backpropagation, without a J-product, and is at least as accurate.

The paper's second table and its figures of accuracy against time, in fp32. Jacobian-based: w by conjugate
gradients (CG) on the normal equations, with the released settings for it (recipe "jacobian"). A pair of rows
differs in the backward mode only. Words in the names of rows: "pair", on all images, captured, CG to a relative
1e-3; "trained-bn", from weights of the first table, with batch norm in R, on 10,000 images, with host checks.
pages/table2.md explains earlier rows, such as CG as released ("absolute"): they are records only.
"""

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from banach import Implicit, NormalCG, Picard, Tolerance, models
from reproduction import table1
from reproduction.intervals import UNTESTED, Claim, Interval, percent, verdict
from reproduction.jobs import Job, settings
from reproduction.study import table
from reproduction.trainings import Training, learning_curves, of_group, runs_table, trained

RECORDS = "table2.jsonl"
Row = Training
PAPER = {"mnist": 28.4 / 17.6, "svhn": 92.8 / 36.9, "cifar10": 530.9 / 146.6}  # time of an epoch, CG against JFB
GAIN = {"mnist": 99.4 - 99.2, "svhn": 94.1 - 90.1, "cifar10": 93.67 - 87.9}  # points, JFB minus CG
DATA = (*PAPER, "digits")
PAIRS = {  # row that is timed -> the JFB row that differs in the backward mode only
    "cg-pair": "jfb-pair",
    "cg-captured-plain": "jfb-captured-plain",
    "cg-relative-plain": "jfb-plain",
    "cg-absolute-plain": "jfb-plain",
    "cg-printed-plain": "jfb-plain",
    "cg-relative-bn": "jfb-few-bn",
    "cg-absolute-bn": "jfb-few-bn",
    "cg-relative-plain-late": "jfb-plain-late",
    "cg-absolute-plain-late": "jfb-plain-late",
}
CHOSEN = ("cg-pair", "cg-captured-plain", "cg-relative-plain")  # on the page: the one with most runs
EPOCHS = {"mnist": 15, "svhn": 5, "cifar10": 3, "digits": 2}  # of the pair
# JFB as a linear solve of no steps: `JFB()` has a faster path of its own, which CG cannot take.
SAME_PATH = Implicit(Picard(), Tolerance(atol=0, rtol=0, max_steps=0, check_every=0))
START = {job.name: job for job in (*table1.JOBS, *table1.QUICK)}


def _job(data: str, row: str, seed: int = 0) -> Job:
    pair, recipe = "pair" in row, None if data == "digits" else "jacobian"
    # As in the paper CG may make as many steps as the forward pass.
    limit = Tolerance(atol=0, rtol=1e-3, max_steps=models.recipe(data, recipe).max_steps)
    return Job(
        name=f"table2-{data}-{row}-seed{seed}",
        settings=settings(
            data,
            recipe=recipe,
            seed=seed,
            batch_norm="bn" in row,
            subset=256 if data == "digits" else None if pair else 10_000,
            fast=pair,
            epochs=EPOCHS[data] if pair else 2 if data in ("digits", "cifar10") else 3,
            augment="paper" if data == "cifar10" else None,
        ),
        backward=Implicit(NormalCG(), limit) if row.startswith("cg") else SAME_PATH if pair else None,
        after=START[f"{data}-jfb-seed{seed}"] if "trained" in row else None,
    )


def _jobs(data: str) -> list[Job]:
    pairs = [_job(data, row, seed) for seed in range(3) for row in ("jfb-pair", "cg-pair")]
    seeds = range(1 if data == "digits" else 3)
    return pairs + [_job(data, row, seed) for seed in seeds for row in ("jfb-trained-bn", "cg-trained-bn")]


QUICK = _jobs("digits")
JOBS = [job for data in PAPER for job in _jobs(data)]
run = partial(trained, JOBS, QUICK)


def runs_of(rows: Sequence[Training], data: str, tag: str) -> list[Training]:
    """Return the runs of one row."""
    return of_group(rows, f"table2-{data}-{tag}")


def ratios(some: Sequence[Training], base: Sequence[Training]) -> list[float]:
    """Return the time per training image relative to `base`, for the seeds that both have."""
    known = {row.seed: row.seconds / row.images for row in base}
    return [row.seconds / row.images / known[row.seed] for row in some if row.seed in known]


def chosen(rows: Sequence[Training], data: str) -> tuple[list[Training], list[Training]]:
    """Return the runs of the pair that the page shows, CG and JFB, with the seeds that both have."""
    found = []
    for tag in CHOSEN:
        cg, jfb = runs_of(rows, data, tag), runs_of(rows, data, PAIRS[tag])
        seeds = {row.seed for row in cg} & {row.seed for row in jfb}
        found.append(([row for row in cg if row.seed in seeds], [row for row in jfb if row.seed in seeds]))
    return max(found, key=lambda pair: len(pair[0]))


def values(rows: Sequence[Training]) -> dict[str, Any]:
    """Return by data set the claims on time (DATA) and accuracy (DATA.gain), solved adjoints, and tables."""
    found: dict[str, Any] = {"timing": _timing(rows), "runs": runs_table(rows)}
    lines = []
    for data in DATA:
        cg, jfb = chosen(rows, data)
        found |= _claims(data, cg, jfb)
        lines += [_line(data, found[f"{data}.gain"], cg, jfb)] if cg else []
        for key in ("relative-bn", "trained-bn"):
            shares = [row.solved for row in runs_of(rows, data, f"cg-{key}")]
            found[f"{data}.{key}"] = percent(shares) if shares else UNTESTED
    columns = "data|time, CG / JFB: paper|ours|range|n|JFB %|CG %|JFB - CG|J-products per image|met eps|length"
    return found | {"table": table(lines, columns)}


def _claims(data: str, cg: Sequence[Training], jfb: Sequence[Training]) -> dict[str, Claim]:
    """On the cost a short training decides, since an epoch is an epoch; on the accuracy it does not."""
    printed, more = PAPER.get(data, 1.0), GAIN.get(data, 0.0)
    if not cg:
        return {data: Claim(f"{printed:.1f}"), f"{data}.gain": Claim(f"{more:+.1f}")}
    times = Interval.of(ratios(cg, jfb))
    gain = Interval.of(row.clean for row in jfb).minus(Interval.of(row.clean for row in cg))
    length, judged = cg[0].length, verdict(gain, more, full=False)
    return {
        data: Claim(f"{printed:.1f}", f"{times:.2f}", times.count, length, verdict(times, printed)),
        f"{data}.gain": Claim(f"{more:+.1f}", f"{gain:+.2f}", gain.count, length, judged),
    }


def _line(data: str, gain: Claim, cg: Sequence[Training], jfb: Sequence[Training]) -> tuple[Any, ...]:
    times, products = ratios(cg, jfb), fmean(row.epochs[-1].products / row.images for row in cg)
    accuracy = [f"{Interval.of(row.clean for row in some):.2f}" for some in (jfb, cg)]
    met = percent(row.epochs[-1].converged for row in (*cg, *jfb))
    first = table1.TITLES[data], f"{PAPER[data]:.1f}" if data in PAPER else None, f"{Interval.of(times):.2f}"
    spread = f"{min(times):.2f} to {max(times):.2f}"
    return *first, spread, gain.n, *accuracy, gain.ours, products or None, met, gain.length


def _timing(rows: Sequence[Training]) -> str:
    """Return the time of every pair, earlier ones too."""
    lines = []
    for data in DATA:
        for cg, jfb in PAIRS.items():
            runs, base = runs_of(rows, data, cg), runs_of(rows, data, jfb)
            scaled = any("R scaled down" in part.get("counts", {}) for run in runs for part in run.segments)
            if (times := ratios(runs, base)) and not scaled:  # a scaled R is another R
                lines.append((table1.TITLES[data], cg, jfb, len(times), f"{Interval.of(times):.2f}"))
    return table(lines, "data|row|against|n|time of an epoch, divided")


def figures(rows: Sequence[Training]) -> dict[str, Any]:
    """Draw accuracy against time: the like-for-like pair, and JFB with batch norm, which CG cannot have."""
    shown: dict[str, dict[str, Sequence[Training]]] = {}
    for data in DATA:
        cg, jfb = chosen(rows, data)
        if cg:
            drawn = {"CG, R without batch norm": cg, "JFB, the same R": jfb}
            drawn["JFB, batch norm in R"] = runs_of(rows, data, "jfb-captured-bn")
            shown[table1.TITLES[data]] = {label: runs for label, runs in drawn.items() if runs}
    return {"table2": learning_curves(shown)}
