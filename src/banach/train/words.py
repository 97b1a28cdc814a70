"""Strings to objects, for settings and the command line: "anderson:5" is Anderson(memory=5)."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

from banach.backward import GMRES, JFB, Implicit, Mode, Neumann, NormalCG, Unroll
from banach.checks import nearest, whole
from banach.data import Affine, Augmentation, Chain, Crop, Erase, Flip, paper_cifar10
from banach.models import Constant, Cosine, OneCycle, Schedule, Steps
from banach.solve import RMS, Anderson, Broyden, Euclidean, Norm, Picard, Solver, Tolerance, WorstPixel

SOLVERS = "picard[:DAMPING] | anderson[:MEMORY] | broyden[:MEMORY]"
BACKWARDS = (
    "jfb | neumann:ORDER | unroll:STEPS[:DAMPING] | implicit:cg | implicit:gmres | implicit:picard | "
    "implicit:anderson | implicit:broyden, each [:RTOL[:STEPS]]"
)
NORMS = "rms | euclidean | worst-pixel"
SCHEDULES = "constant | cosine | one-cycle | steps:EPOCH,EPOCH,..:FACTOR"
AUGMENTS = "none | paper | flip | crop:PIXELS | erase | affine, joined by +"

_NORMS: dict[str, type[Any]] = {"rms": RMS, "euclidean": Euclidean, "worst-pixel": WorstPixel}
_SCHEDULES: dict[str, type[Any]] = {"constant": Constant, "steps": Steps, "cosine": Cosine, "one-cycle": OneCycle}
_METHODS = {"cg": NormalCG, "gmres": GMRES, "picard": Picard, "anderson": Anderson, "broyden": Broyden}


def name_of_norm(norm: Norm) -> str:
    """Return the word for a norm."""
    return _name_of(norm, _NORMS, "be chosen by a word")


def augment(word: str) -> Augmentation | None:
    """Return the augmentation of `none`, `paper` (the authors' for CIFAR-10) or `flip+crop:4+erase`."""
    parts = [_make("augment", AUGMENTS, part) for part in word.split("+")]
    kept = [part for part in parts if part is not None]
    return Chain(*kept) if len(kept) > 1 else (kept[0] if kept else None)


def schedule(given: Any) -> Schedule:
    """Return the schedule of `constant`, `cosine`, `one-cycle` or `steps:100,150:0.1`, or of a table."""
    if isinstance(given, str):
        return cast(Schedule, _make("schedule", SCHEDULES, given))
    if not isinstance(given, Mapping) or "kind" not in given:
        raise ValueError(f'a schedule is {{"kind": ...}} with one of {", ".join(_SCHEDULES)}, got {given!r}')
    rest = {key: tuple(v) if isinstance(v, list) else v for key, v in given.items() if key != "kind"}
    made = _SCHEDULES[nearest("schedule", given["kind"], _SCHEDULES)]
    try:
        return cast(Schedule, made(**rest))
    except TypeError as error:  # of an unknown key too
        raise ValueError(f"the schedule {given['kind']} cannot be made of {[*rest]}: {error}") from None


def schedule_to_dict(schedule: Any) -> dict[str, Any]:
    """Return a schedule as a table of plain values: {"kind": "steps", "at": [..], "factor": ..}."""
    kind = _name_of(schedule, _SCHEDULES, "be stored in a file")
    values = dataclasses.asdict(schedule)
    return {"kind": kind, **{key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}}


def integers(given: Any) -> Any:
    """Return the numbers of `2,5` or of a list as a tuple, and anything else as it is."""
    if isinstance(given, str):
        return tuple(_read(given, int, part) for part in given.split(","))
    return tuple(given) if isinstance(given, list) else given


def _implicit(method: str = "cg", rtol: float = 1e-3, steps: int = 500) -> Implicit:
    """In training three digits of the adjoint are enough: fp32 cannot always do better, and bf16 never does."""
    made: Any = _METHODS[nearest("method of implicit", method, _METHODS)]()
    if not 0 < rtol < 1:
        raise ValueError(f"the relative tolerance of implicit must be between 0 and 1, got {rtol:g}")
    return Implicit(made, Tolerance(atol=0, rtol=rtol, max_steps=whole("steps", steps, 1)))


_KEPT = range(1, 101)  # latents that a solver keeps
# What KIND:ARGUMENT:.. calls, and one reader per argument. Latents that a solver keeps, and steps in an autograd
# graph, are bounded: more would fill the memory of the device.
_MAKERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "solver": {"picard": (Picard, float), "anderson": (Anderson, _KEPT), "broyden": (Broyden, _KEPT)},
    "backward": {
        "jfb": (JFB,),
        "neumann": (Neumann, range(10_001)),
        "unroll": (Unroll, range(1, 10_001), float),
        "implicit": (_implicit, str, float, int),
    },
    "norm": {name: (made,) for name, made in _NORMS.items()},
    "augment": {
        "none": (lambda: None,),
        "paper": (paper_cifar10,),
        "flip": (Flip,),
        "crop": (Crop, int),
        "erase": (Erase,),
        "affine": (Affine,),
    },
    "schedule": {
        **{name: (made,) for name, made in _SCHEDULES.items()},
        "steps": (lambda at, factor=0.1: Steps(at, factor), integers, float),
    },
}


def _make(what: str, grammar: str, word: str) -> Any:
    """Return what a word stands for: `solver("picard:0.3")` is Picard(damping=0.3)."""
    kind, *texts = str(word).strip().lower().split(":")
    maker, *readers = _MAKERS[what][nearest(what, kind, _MAKERS[what])]
    with suppress(TypeError):  # an argument is missing
        if len(texts) <= len(readers):
            return maker(*(_read(word, reader, text) for reader, text in zip(readers, texts, strict=False)))
    raise ValueError(f"{what} {word!r} is not understood; expected {grammar}")


solver: Callable[[str], Solver] = partial(_make, "solver", SOLVERS)
backward: Callable[[str], Mode] = partial(_make, "backward", BACKWARDS)
norm: Callable[[str], Norm] = partial(_make, "norm", NORMS)


def _read(word: str, reader: Any, text: str) -> Any:
    """Return reader(text); a range reads one of its numbers."""
    if reader not in (int, float) and not isinstance(reader, range):
        return reader(text)
    with suppress(ValueError):
        number = float(text) if reader is float else int(text)
        if not isinstance(reader, range) or number in reader:
            return number
    kind = "a number" if reader is float else "a whole number"
    kind += f" from {reader[0]} to {reader[-1]}" if isinstance(reader, range) else ""
    raise ValueError(f"{word!r} needs {kind}, got {text!r}")


def _name_of(value: Any, known: Mapping[str, type[Any]], purpose: str) -> str:
    """Return the name of an object's class."""
    found = {made: name for name, made in known.items()}
    if type(value) in found:
        return found[type(value)]
    names = ", ".join(one.__name__ for one in known.values())
    raise ValueError(f"expected one of {names} to {purpose}, got {value!r}")
