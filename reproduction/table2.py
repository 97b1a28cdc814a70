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

from banach import Implicit, NormalCG, Tolerance, models
from reproduction import table1
from reproduction.jobs import Job, neumann, settings
from reproduction.study import UNTESTED, Claim, Interval, percent, table
from reproduction.trainings import Training, learning_curves, of_groups, runs_table, trained

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
START = {job.name: job for job in (*table1.JOBS, *table1.QUICK)}


def _job(data: str, row: str, seed: int = 0) -> Job:
    pair, recipe = "pair" in row, None if data == "digits" else "jacobian"
    subset = 256 if data == "digits" else None if pair else 10_000
    epochs = EPOCHS[data] if pair else 2 if data in ("digits", "cifar10") else 3
    augment = "paper" if data == "cifar10" else None
    values: dict[str, Any] = {"batch_norm": "bn" in row, "fast": pair, "subset": subset, "epochs": epochs}
    chosen = settings(data, recipe=recipe, seed=seed, augment=augment, **values)
    # As in the paper CG may make as many steps as the forward pass.
    cg = Implicit(NormalCG(), Tolerance(atol=0, rtol=1e-3, max_steps=models.recipe(data, recipe).max_steps))
    # JFB as a linear solve of no steps: `JFB()` has a faster path of its own, which CG cannot take.
    mode = cg if row.startswith("cg") else neumann(0) if pair else None
    start = START[f"{data}-jfb-seed{seed}"] if "trained" in row else None
    return Job(name=f"table2-{data}-{row}-seed{seed}", settings=chosen, backward=mode, after=start)


def _jobs(data: str) -> list[Job]:
    pairs = [_job(data, row, seed) for seed in range(3) for row in ("jfb-pair", "cg-pair")]
    seeds = range(1 if data == "digits" else 3)
    return pairs + [_job(data, row, seed) for seed in seeds for row in ("jfb-trained-bn", "cg-trained-bn")]


QUICK = _jobs("digits")
JOBS = [job for data in PAPER for job in _jobs(data)]
RECORDS, Row, run = "table2.jsonl", Training, partial(trained, JOBS, QUICK)


def pairs(rows: Sequence[Training], row: str, base: str) -> list[tuple[Training, Training]]:
    """Return the finished runs of two groups that have the same seed."""
    done = [run for run in rows if run.final]
    known = {run.seed: run for run in done if run.group == base}
    return [(run, known[run.seed]) for run in done if run.group == row and run.seed in known]


def ratios(some: Sequence[tuple[Training, Training]]) -> list[float]:
    """Return the time per training image, first run of a pair against second."""
    return [run.seconds / run.images / (base.seconds / base.images) for run, base in some]


def _pairs(rows: Sequence[Training], data: str) -> dict[str, list[tuple[Training, Training]]]:
    """Return by the name of the timed row its pairs, CG and JFB."""
    return {cg: pairs(rows, f"table2-{data}-{cg}", f"table2-{data}-{jfb}") for cg, jfb in PAIRS.items()}


def _chosen(rows: Sequence[Training], data: str) -> list[tuple[Training, Training]]:
    """Return the pairs that the page shows."""
    known = _pairs(rows, data)
    return max((known[row] for row in CHOSEN), key=len)


def values(rows: Sequence[Training]) -> dict[str, Any]:
    """Return by data set the claims on time (DATA) and accuracy (DATA.gain), solved adjoints, and tables."""
    found: dict[str, Any] = {"timing": _timing(rows), "runs": runs_table(rows)}
    lines = []
    for data in DATA:
        chosen = _chosen(rows, data)
        times, length = ratios(chosen), chosen[0][0].length if chosen else "-"
        cg, jfb = (Interval.of(pair[side].clean for pair in chosen) for side in (0, 1))
        time, gain = Interval.of(times), jfb.minus(cg)
        if chosen:
            lines.append((
                table1.TITLES[data], f"{PAPER[data]:.1f}" if data in PAPER else None, f"{time:.2f}",
                gain.count, f"{jfb:.2f}", f"{cg:.2f}", f"{gain:+.2f}",
                fmean(run.epochs[-1].products / run.images for run, _ in chosen) or None,
                percent(run.epochs[-1].converged for pair in chosen for run in pair), length,
            ))  # fmt: skip
        # On the cost a short training decides, since an epoch is an epoch; on the accuracy it does not. Earlier
        # pairs make as many steps of CG as we chose: they decide nothing.
        as_printed = all("-pair-" in run.job for run, _ in chosen)
        found[data] = Claim.of(PAPER.get(data, 1.0), time, length, full=as_printed)
        found[f"{data}.gain"] = Claim.of(GAIN.get(data, 0.0), gain, length, sign="+", full=False)
        for key in ("relative-bn", "trained-bn"):
            shares = [run.solved for run in rows if run.group == f"table2-{data}-cg-{key}"]
            found[f"{data}.{key}"] = percent(shares) if shares else UNTESTED
        trained_on = pairs(rows, f"table2-{data}-cg-trained-bn", f"table2-{data}-jfb-trained-bn")
        for side, name in enumerate(("cg", "jfb")):
            found[f"{data}.trained-bn.{name}"] = str(Interval.of(pair[side].clean for pair in trained_on))
    columns = "data|time, CG / JFB: paper|ours|n|JFB %|CG %|JFB - CG|J-products per image|met eps|length"
    return found | {"table": table(lines, columns)}


def _timing(rows: Sequence[Training]) -> str:
    """Return the time of every pair, earlier ones too."""
    lines = []
    for data in DATA:
        for row, some in _pairs(rows, data).items():
            scaled = any("R scaled down" in part.get("counts", {}) for run, _ in some for part in run.segments)
            if some and not scaled:  # a scaled R is another R
                times = Interval.of(ratios(some))
                lines.append((table1.TITLES[data], row, PAIRS[row], times.count, f"{times:.2f}"))
    return table(lines, "data|row|against|n|time of an epoch, divided")


def figures(rows: Sequence[Training]) -> dict[str, Any]:
    """Draw accuracy against time: the like-for-like pair, and JFB with batch norm, which CG cannot have."""
    shown: dict[str, dict[str, Sequence[Training]]] = {}
    for data in DATA:
        if chosen := _chosen(rows, data):
            cg, jfb = zip(*chosen, strict=True)
            drawn = {"JFB, R without batch norm": jfb, "CG, the same R": cg}
            others = of_groups(rows, {"JFB, batch norm in R": f"table2-{data}-jfb-captured-bn"})
            shown[table1.TITLES[data]] = {**drawn, **others}
    return {"table2": learning_curves(shown)}
