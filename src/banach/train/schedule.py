"""Schedules of the learning rate, as objects and as plain values for a settings file."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from banach.models.recipe import Constant, Cosine, Schedule, Steps, check_multiplier


@dataclass(frozen=True)
class OneCycle:
    """Up from `start` to 1 over the first `warm` share of the run, then down to `end`, each half a cosine."""

    warm: float = 0.3
    start: float = 0.04
    end: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("warm", "start", "end"):
            check_multiplier(name, getattr(self, name))
        if not 0 < self.warm < 1:
            raise ValueError(f"warm is the share of the run that goes up, between 0 and 1, got {self.warm!r}")

    def multiplier(self, epoch: float, epochs: int) -> float:
        done = epoch / epochs
        if done < self.warm:
            return _half_cosine(self.start, 1.0, done / self.warm)
        return _half_cosine(1.0, self.end, (done - self.warm) / (1 - self.warm))


def _half_cosine(first: float, last: float, share: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


SCHEDULES: dict[str, type[Any]] = {"constant": Constant, "steps": Steps, "cosine": Cosine, "one-cycle": OneCycle}


def schedule_to_dict(schedule: Schedule) -> dict[str, Any]:
    """{"kind": "steps", "at": [..], "factor": ..}: the schedule as plain values."""
    for kind, made in SCHEDULES.items():
        if type(schedule) is made:
            values = dataclasses.asdict(schedule)  # type: ignore[call-overload]
            return {"kind": kind, **{key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}}
    known = ", ".join(made.__name__ for made in SCHEDULES.values())
    raise TypeError(f"schedule must be one of {known} to be kept in a file, got {schedule!r}")


def schedule_from_dict(values: Mapping[str, Any]) -> Schedule:
    """The schedule that `schedule_to_dict` wrote."""
    if not isinstance(values, Mapping) or "kind" not in values:
        raise ValueError(f'a schedule is {{"kind": ...}} with one of {", ".join(SCHEDULES)}, got {values!r}')
    rest = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key != "kind"}
    made = SCHEDULES[nearest("schedule", values["kind"], SCHEDULES)]
    for key in rest:
        nearest(f"setting of the schedule {values['kind']}", key, [f.name for f in dataclasses.fields(made)])
    try:
        schedule: Schedule = made(**rest)
    except TypeError as error:
        raise ValueError(f"the schedule {values['kind']} cannot be made of {rest}: {error}") from None
    return schedule


def nearest(what: str, name: Any, known: Iterable[str]) -> str:
    """`name` if it is known; otherwise a ValueError that names the nearest one."""
    known = list(known)
    if name in known:
        return str(name)
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.4)
    advice = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown {what}: {name!r}; {advice}choose from {', '.join(known) or 'none'}")
