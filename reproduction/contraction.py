"""T contracts during training, even with batch norm: "this warning was never called".

The paper's check of its first Assumption, made on real images: after some epochs of the first table's JFB runs,
sigma_max(dT/du) and the observed rate of the iteration on 100 training images, in fp32 (see measure.py).
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from reproduction import table1
from reproduction.study import Claim, table
from reproduction.trainings import Training

RECORDS, Row, run = table1.RECORDS, Training, table1.run


def _numbers(line: dict[str, Any], key: str) -> list[float]:
    """Return what was measured in eval mode, per image; an image without a fixed point has no number."""
    return [x for x in map(float, line["eval"][key]) if not math.isnan(x)]


def values(rows: Sequence[Training]) -> dict[str, Any]:
    """Return the claim, extremes, the `last` epoch at which an image has sigma_max < 1, batches, and the table.

    They are over the longest JFB runs of each data set that were measured; the table shows the first run of each.
    """
    groups = table1.longest([row for row in rows if row.contraction])
    known = {title: groups[f"{data}-jfb"] for data, title in table1.TITLES.items() if f"{data}-jfb" in groups}
    runs = [run for some in known.values() for run in some]
    lines = [line for run in runs for line in run.contraction]
    images, fired = sum(line["images"] for line in lines), sum(line["eval"]["violations"] for line in lines)
    shown = [
        (title, first.progress, line["epoch"], line["images"], line["eval"]["violations"],
         *(f"{f(_numbers(line, key) or [math.nan]):.2f}" for key in ("sigma", "rate") for f in (fmean, max)))
        for title, (first, *_) in known.items() for line in first.contraction
    ]  # fmt: skip
    columns = "data|run|epoch|images|sigma_max >= 1|sigma_max, mean|largest|rate, mean|largest"
    return {
        "claim": Claim.always(images - fired, images, len(runs)),
        "highest": max((x for line in lines for x in _numbers(line, "sigma")), default=math.nan),
        "rate": max((x for line in lines for x in _numbers(line, "rate")), default=math.nan),
        "last": max((x["epoch"] for x in lines if x["eval"]["violations"] < x["images"]), default=0),
        "batches_fired": sum(line["train"]["sigma"][0] >= 1 for line in lines),
        "batches": len(lines),
        "table": table(shown, columns),
    }
