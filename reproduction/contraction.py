"""T contracts during training, even with batch norm: "this warning was never called".

The paper's check of its first Assumption, made on real images: after some epochs of the first table's JFB runs,
sigma_max(dT/du) and the observed rate of the iteration on 100 training images, in fp32 (see measure.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from reproduction import table1
from reproduction.intervals import NOT_REPRODUCED, REPRODUCED, Claim
from reproduction.study import table
from reproduction.trainings import Training

RECORDS, Row, run = table1.RECORDS, Training, table1.run


def _measured(rows: Sequence[Training]) -> dict[str, table1.Group]:
    """Return by data set the longest JFB runs that were measured."""
    groups = table1.groups([row for row in rows if row.contraction])
    longest = {group.name.removesuffix("-jfb"): group for group in groups}
    return {data: longest[data] for data in table1.TITLES if data in longest}


def _lines(group: table1.Group) -> list[dict[str, Any]]:
    return [line for run in group.runs for line in run.contraction]


def _numbers(line: dict[str, Any], key: str) -> list[float]:
    """Return what was measured in eval mode, per image; an image without a fixed point has no number."""
    return [x for x in map(float, line["eval"][key]) if not math.isnan(x)]


def values(rows: Sequence[Training]) -> dict[str, Any]:
    """Return the claim, extremes, how often sigma_max >= 1 on batches in training mode, and the table."""
    groups = _measured(rows)
    lines = [line for group in groups.values() for line in _lines(group)]
    images, fired = sum(line["images"] for line in lines), sum(line["eval"]["violations"] for line in lines)
    held, runs = f"{images - fired:,} of {images:,}", sum(len(group.runs) for group in groups.values())
    shown = [
        (table1.TITLES[data], group.length, line["epoch"], line["images"], line["eval"]["violations"],
         *(f"{f(_numbers(line, key)):.2f}" for key in ("sigma", "rate") for f in (fmean, max)))
        for data, group in groups.items() for line in group.runs[0].contraction
    ]  # fmt: skip
    columns = "data|run|epoch|images|sigma_max >= 1|sigma_max, mean|largest|rate, mean|largest"
    return {
        "claim": Claim("always", held, runs, "over training", NOT_REPRODUCED if fired else REPRODUCED),
        "highest": max((x for line in lines for x in _numbers(line, "sigma")), default=math.nan),
        "rate": max((x for line in lines for x in _numbers(line, "rate")), default=math.nan),
        "batches_fired": sum(line["train"]["sigma"][0] >= 1 for line in lines),
        "batches": len(lines),
        "table": table(shown, columns),
    }


def figures(rows: Sequence[Training]) -> dict[str, Any]:
    """Return none: the figure of the theory study shows both over training."""
    return {}
