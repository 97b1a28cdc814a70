"""Checks of arguments that several rooms share: counts, numbers, names."""

import difflib
import sys
from collections.abc import Iterable
from numbers import Real
from typing import Any


def whole(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """Return `value` if it is an int (not a bool) between `least` and `most`, else raise a ValueError."""
    sound = isinstance(value, int) and not isinstance(value, bool)
    if not sound or value < least or (most is not None and value > most):
        upto = "" if most is None else f" and at most {most}"
        raise ValueError(f"{name} must be a whole number, at least {least}{upto}, got {value!r}")
    return value


def number(
    name: str, value: Any, least: float = 0, most: float = sys.float_info.max, *, below: float | None = None
) -> float:
    """Return `value` if it is a number from `least` to `most` and less than `below`, else raise a ValueError."""
    sound = isinstance(value, Real) and not isinstance(value, bool)
    if not sound or not least <= value <= most or (below is not None and value >= below):
        upto = f"below {below:g}" if below is not None else "finite"
        upto = f"at most {most:g}" if most < sys.float_info.max else upto
        raise ValueError(f"{name} must be a number, at least {least:g} and {upto}, got {value!r}")
    return float(value)


def above_zero(name: str, value: float) -> float:
    """Return `value` as a float if it is above 0 and finite, else raise a ValueError."""
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be above 0 and finite, got {value}")
    return float(value)


def nearest(what: str, name: Any, known: Iterable[str]) -> str:
    """Return `name` if it is one of `known`, else raise a ValueError that suggests the closest name."""
    known = list(known)
    if name in known:
        return str(name)
    lower = {key.lower(): key for key in known}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.4)
    advice = f"did you mean {lower[near[0]]!r}? " if near else ""
    raise ValueError(f"unknown {what}: {name!r}; {advice}choose from {', '.join(known) or 'none'}")


def own_name(name: str) -> str:
    """Return the name in "package.module:name" (several modules are joined by commas), if they have been imported.

    Else raise a ValueError: a file of a run can name modules, but only the user's --import imports them.
    """
    modules, found, own = name.partition(":")
    missing = [module for module in modules.split(",") if module not in sys.modules] if found else []
    if missing:
        flags = " ".join(f"--import {module}" for module in missing)
        raise ValueError(f"{own!r} comes from {', '.join(missing)}, which is not imported by itself; add {flags}")
    return own if found else name
