"""Strings to objects, for settings and the command line: "anderson:5" is Anderson(memory=5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from banach.backward import GMRES, JFB, Implicit, Mode, Neumann, NormalCG, Unroll
from banach.checks import nearest
from banach.data import Affine, Augmentation, Chain, Crop, Erase, Flip, paper_cifar10
from banach.models import Constant, Cosine, OneCycle, Schedule, Steps
from banach.solve import RMS, Anderson, Broyden, Euclidean, Norm, Picard, Solver, Tolerance, WorstPixel

# In training three digits of the adjoint are enough: fp32 cannot always do better, and bf16 never does.
ADJOINT_RTOL, ADJOINT_STEPS = 1e-3, 500

SOLVERS = "picard[:DAMPING] | anderson[:MEMORY] | broyden[:MEMORY]"
BACKWARDS = "jfb | neumann:ORDER | unroll:STEPS | implicit:cg|gmres|picard|anderson|broyden[:RTOL]"
NORMS = "rms | euclidean | worst-pixel"
SCHEDULES = "constant | cosine | one-cycle | steps:EPOCH,EPOCH,..:FACTOR"
AUGMENTS = "none | paper | flip | crop:PIXELS | erase | affine, joined by +"

_NORMS: dict[str, type[Any]] = {"rms": RMS, "euclidean": Euclidean, "worst-pixel": WorstPixel}
_SCHEDULES: dict[str, type[Any]] = {"constant": Constant, "steps": Steps, "cosine": Cosine, "one-cycle": OneCycle}


def solver(word: str) -> Solver:
    """Return the solver of `picard`, `picard:0.3`, `anderson:5` or `broyden:10`."""
    makers: dict[str, tuple[Any, ...]] = {
        "picard": (Picard, float),
        "anderson": (lambda memory=5: Anderson(memory=memory), int),
        "broyden": (lambda memory=10: Broyden(memory=memory), int),
    }
    made: Solver = _make("solver", word, makers, SOLVERS)
    return made


def backward(word: str) -> Mode:
    """Return the backward mode of `jfb`, `neumann:5`, `unroll:3`, `implicit:cg` or `implicit:gmres:1e-4`."""
    makers: dict[str, tuple[Any, ...]] = {
        "jfb": (JFB,),
        "neumann": (Neumann, int),
        "unroll": (Unroll, int),
        "implicit": (_implicit, str, float),
    }
    made: Mode = _make("backward", word, makers, BACKWARDS)
    return made


def _implicit(method: str = "cg", rtol: float = ADJOINT_RTOL) -> Implicit:
    methods = {"cg": NormalCG, "gmres": GMRES, "picard": Picard, "anderson": Anderson, "broyden": Broyden}
    made: Any = methods[nearest("method of implicit", method, methods)]()
    if not 0 < rtol < 1:
        raise ValueError(f"the relative tolerance of implicit must be between 0 and 1, got {rtol:g}")
    return Implicit(made, Tolerance(atol=0, rtol=rtol, max_steps=ADJOINT_STEPS))


def norm(word: str) -> Norm:
    """Return the norm of `rms`, `euclidean` or `worst-pixel`; also of `WorstPixel()`, as `of_recipe` writes it."""
    written = {str(made()): name for name, made in _NORMS.items()}
    made: Norm = _make("norm", written.get(word, word), {name: (made,) for name, made in _NORMS.items()}, NORMS)
    return made


def name_of_norm(norm: Norm) -> str:
    """Return the word for a norm."""
    for word, made in _NORMS.items():
        if type(norm) is made:
            return word
    raise ValueError(f"there is no word for the norm {norm!r}; choose one with --norm: {NORMS}")


def augment(word: str) -> Augmentation | None:
    """Return the augmentation of `none`, `paper` (the authors' for CIFAR-10) or `flip+crop:4+erase`."""
    makers: dict[str, tuple[Any, ...]] = {
        "none": (lambda: None,),
        "paper": (paper_cifar10,),
        "flip": (Flip,),
        "crop": (Crop, int),
        "erase": (Erase,),
        "affine": (Affine,),
    }
    parts = [_make("augment", part, makers, AUGMENTS) for part in word.split("+")]
    kept = [part for part in parts if part is not None]
    return Chain(*kept) if len(kept) > 1 else (kept[0] if kept else None)


def schedule(word: str) -> Schedule:
    """Return the schedule of `constant`, `cosine`, `one-cycle` or `steps:100,150:0.1`."""
    makers: dict[str, tuple[Any, ...]] = {name: (made,) for name, made in _SCHEDULES.items()}
    makers["steps"] = (lambda at, factor=0.1: Steps(at, factor), integers, float)
    made: Schedule = _make("schedule", word, makers, SCHEDULES)
    return made


def schedule_to_dict(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule as plain values: {"kind": "steps", "at": [..], "factor": ..}."""
    for kind, made in _SCHEDULES.items():
        if type(schedule) is made:
            values = dataclasses.asdict(schedule)  # type: ignore[call-overload]
            return {"kind": kind, **{key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}}
    known = ", ".join(made.__name__ for made in _SCHEDULES.values())
    raise TypeError(f"schedule must be one of {known} to be stored in a file, got {schedule!r}")


def schedule_from_dict(values: Any) -> Schedule:
    """Return the schedule that `schedule_to_dict` wrote."""
    if not isinstance(values, Mapping) or "kind" not in values:
        raise ValueError(f'a schedule is {{"kind": ...}} with one of {", ".join(_SCHEDULES)}, got {values!r}')
    rest = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key != "kind"}
    made = _SCHEDULES[nearest("schedule", values["kind"], _SCHEDULES)]
    for key in rest:
        nearest(f"setting of the schedule {values['kind']}", key, [f.name for f in dataclasses.fields(made)])
    try:
        schedule: Schedule = made(**rest)
    except TypeError as error:
        raise ValueError(f"the schedule {values['kind']} cannot be made of {rest}: {error}") from None
    return schedule


def integers(word: str) -> tuple[int, ...]:
    """Return the numbers of `2,5`."""
    return tuple(_read(word, int, part) for part in word.split(","))


def _make(what: str, word: str, makers: Mapping[str, tuple[Any, ...]], grammar: str) -> Any:
    """Call the maker of KIND in `KIND:ARGUMENT:..`; a maker comes with one reader per argument."""
    kind, *texts = str(word).strip().lower().split(":")
    maker, *readers = makers[nearest(what, kind, makers)]
    try:
        if len(texts) <= len(readers):
            return maker(*(_read(word, reader, text) for reader, text in zip(readers, texts, strict=False)))
    except TypeError:  # an argument is missing
        pass
    raise ValueError(f"{what} {word!r} is not understood; expected {grammar}")


def _read(word: str, reader: Callable[[str], Any], text: str) -> Any:
    if reader not in (int, float):
        return reader(text)
    try:
        return reader(text)
    except ValueError:
        kind = "a whole number" if reader is int else "a number"
        raise ValueError(f"{word!r} needs {kind}, got {text!r}") from None
