"""What the first table says of one training: taken once, kept beside the run, read from there afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from banach.network import ImplicitNetwork
from banach.paper.common import unseen
from banach.paper.jobs import RELEASED_BATCH, Job, Outcome
from banach.paper.kept import read, reading
from banach.paper.records import read_kept, train, write_kept
from banach.paper.study import Options
from banach.provenance import provenance, write_json
from banach.solve import Tolerance
from banach.train import Totals, evaluate
from banach.train.run import SETTINGS

MARKS, TOGETHER = "marks.json", "at-once.json"
FINE, FINE_STEPS = 1e-4, 500


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Of the test images by the clean protocol: `own` at the settings' eps, `fine` at 1e-4, None without a solve.

    `released`: by the other protocol. `at_once`: how many trainings shared the device, so what `seconds`, of an
    epoch, are worth.
    """

    title: str
    parameters: int
    eps: float | None
    own: Totals
    fine: Totals | None
    released: float
    seconds: float
    at_once: int
    curve: list[dict[str, float]]
    heard: dict[str, int]
    commit: str | None
    device: str


def take(job: Job, options: Options) -> Marks:
    """Train, or go on, and measure; or read what was measured of this very job."""
    path = options.runs / job.name / MARKS
    kept = read_kept(path, job)
    if kept is not None:
        with reading(path):
            return _read(kept)
    try:
        one = train(job, options, released=True)
    finally:
        at_once = _keep_at_once(path.parent, options)
    record = one.record
    told = {"seconds": record.seconds, "at_once": at_once, "heard": dict(record.heard), "curve": record.curve}
    made = _measure(one.outcome, options) | told
    write_kept(path, job, made)
    return _read(made)


def _keep_at_once(run: Path, options: Options) -> int:
    """The most that shared the device while this run was trained, in one go or in several."""
    path = run / TOGETHER
    with reading(path):
        most = max(int(read(path)) if path.exists() else 1, options.at_once)
    if (run / SETTINGS).exists():  # the run was begun
        write_json(path, most)
    return most


def _measure(outcome: Outcome, options: Options) -> dict[str, Any]:
    net: Any = outcome.net
    test = unseen(outcome.job.data, options)
    source = provenance(device=options.torch_device)
    solves = isinstance(net, ImplicitNetwork) and net.tolerance.max_steps > 0
    own = evaluate(net, test, batch_size=RELEASED_BATCH, scorer=outcome.scorer)
    fine = None
    if solves:  # in the norm of the settings
        fine = outcome.at(Tolerance(atol=FINE, max_steps=FINE_STEPS, norm=net.tolerance.norm), test)
    return {
        "title": outcome.title,
        "parameters": outcome.parameters,
        "eps": net.tolerance.atol if solves else None,
        "own": asdict(own),
        "fine": None if fine is None else asdict(fine),
        "released": outcome.released,
        "commit": source["commit"],
        "device": source["device"],
    }


def _read(made: Mapping[str, Any]) -> Marks:
    totals = {name: None if made[name] is None else _totals(made[name]) for name in ("own", "fine")}
    return Marks(**{**made, **totals, "released": float(made["released"])})


def _totals(values: Mapping[str, Any]) -> Totals:
    """NaN and infinity are words in JSON."""
    read: dict[str, Any] = {key: float(v) if isinstance(v, str) else v for key, v in values.items()}
    return Totals(**read)
