"""What is shown and written: a table per point, one over all points, targets, and JSON files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from banach.provenance import write_json
from benchmarks.gpu.measure import ENOUGH, Measured, Plan
from benchmarks.gpu.points import Point
from benchmarks.gpu.roofline import Counted, Floor, Rates, floor
from benchmarks.report import Result, Row, Target, cell

FAST, FAST_TWIN = "banach-fast", "explicit-fast"
MEMORY = 1.05  # times the memory of the explicit twin, at most
RULE = "floor: bytes or FLOPs of the step over the rates measured here; its rule is in benchmarks/gpu/roofline.py"


@dataclass(frozen=True)
class Settings:
    """What a result was measured with."""

    point: Point
    plan: Plan
    images: str
    cudnn_benchmark: bool


@dataclass(frozen=True)
class Outcome:
    """One point, measured."""

    settings: Settings
    measured: list[Measured]
    notes: list[str]
    counted: Counted
    rates: Rates
    device: str

    @property
    def point(self) -> Point:
        return self.settings.point

    def floor(self, one: Measured) -> Floor:
        return floor(self.counted, self.rates, one.precision, one.passes)

    def named(self, name: str) -> Measured | None:
        return next((one for one in self.measured if one.contender == name), None)

    def best(self, role: str) -> Measured | None:
        return min((one for one in self.measured if one.role == role), key=lambda one: one.ms, default=None)

    def result(self) -> Result:
        question = (
            f"ms per training step, {self.settings.images}, batch {self.point.batch}, eps {self.point.eps:g}"
        )
        rows = [_row(one, self.floor(one)) for one in self.measured]
        return Result(
            self.point.name, question, rows, targets(self), [*self.notes, RULE], self.settings, self.device
        )

    def write(self, folder: Path) -> Path:
        full = [
            {**one.as_dict(), "floor": asdict(self.floor(one)), "times_floor": one.ms / self.floor(one).ms}
            for one in self.measured
        ]
        content = {**self.result().as_dict(), "measured": full, "counted": asdict(self.counted)}
        return write_json(folder / f"{self.point.name}.json", {**content, "rates": asdict(self.rates)})


def _row(one: Measured, limit: Floor) -> Row:
    return {
        "contender": one.contender,
        "in": one.precision,
        "ms": one.ms,
        "10-90%": f"{cell(one.ms_10)}-{cell(one.ms_90)}",
        "img/s": one.images_per_second,
        "MB": None if one.peak_bytes is None else round(one.peak_bytes / 2**20),
        "depth": round(one.depth, 1),
        "resid": one.residual,
        "met %": None if one.met is None else round(100 * one.met),
        "syncs": one.host_syncs,
        "floor": limit.ms,
        "x floor": one.ms / limit.ms,
    }


def targets(outcome: Outcome) -> list[Target]:
    """The promised figures, where the fast path and a GPU are there to be held to them."""
    promise, fast, twin = outcome.point.promise, outcome.named(FAST), outcome.named(FAST_TWIN)
    if promise is None or fast is None or torch.device(outcome.device).type != "cuda":
        return []
    made = [Target(f"{FAST}, ms", fast.ms, promise.ms)]
    peer = outcome.best("peer")
    if peer is not None:
        times = peer.ms / fast.ms
        made.append(
            Target(f"times faster than the best peer, {peer.contender}", times, promise.against_peer, True)
        )
    if twin is not None:
        made.append(Target(f"times as long as {FAST_TWIN}", fast.ms / twin.ms, promise.against_twin))
        if fast.peak_bytes and twin.peak_bytes:
            ratio = fast.peak_bytes / twin.peak_bytes
            made.append(Target(f"peak memory, times that of {FAST_TWIN}", ratio, MEMORY))
    if fast.met is not None:
        made.append(Target(f"{FAST}, share of steps that meet eps", fast.met, ENOUGH, True))
    ladder = outcome.best("ladder")
    if ladder is not None and ladder.met is not None:
        made.append(Target(f"{ladder.contender}, share of steps that meet eps", ladder.met, ENOUGH, True))
    return made


def overview(outcomes: Mapping[str, Outcome]) -> Result:
    """One table: ms and precision of every contender at every point, then what they come to beside each other."""
    names = list(dict.fromkeys(one.contender for outcome in outcomes.values() for one in outcome.measured))
    rows: list[Row] = [
        {"contender": name, **{key: _short(outcome.named(name)) for key, outcome in outcomes.items()}}
        for name in names
    ]
    for title, figure in (
        ("best peer", _best_peer),
        ("best peer / best of banach", _gain),
        ("best of banach / best twin", _price),
        ("best of banach / floor", _distance),
    ):
        rows.append({"contender": title, **{key: figure(outcome) for key, outcome in outcomes.items()}})
    notes = ["ms per training step (precision), median; peers solve to the same eps in the same norm"]
    settings = next((outcome.settings for outcome in outcomes.values()), None)
    device = next((outcome.device for outcome in outcomes.values()), "cpu")
    return Result("overview", "what does a training step cost?", rows, [], notes, settings, device)


def _short(one: Measured | None) -> str:
    return "" if one is None else f"{cell(one.ms)} ({one.precision})"


def _best_peer(outcome: Outcome) -> str:
    peer = outcome.best("peer")
    return "" if peer is None else peer.contender


def _gain(outcome: Outcome) -> str:
    return _quotient(outcome.best("peer"), outcome.best("ours"))


def _price(outcome: Outcome) -> str:
    return _quotient(outcome.best("ours"), outcome.best("twin"))


def _distance(outcome: Outcome) -> str:
    ours = outcome.best("ours")
    return "" if ours is None else cell(ours.ms / outcome.floor(ours).ms)


def _quotient(above: Measured | None, below: Measured | None) -> str:
    return "" if above is None or below is None else cell(above.ms / below.ms)


def profile_rows(profiles: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The share of every kind of work, in per cent, for each contender."""
    kinds = list(dict.fromkeys(kind for one in profiles.values() for kind in one["shares"]))
    return [
        {
            "contender": name,
            "ms": one["wall_ms"],
            "kernels": one["kernels"],
            **{kind: round(100 * one["shares"].get(kind, 0.0), 1) for kind in kinds},
        }
        for name, one in profiles.items()
    ]
