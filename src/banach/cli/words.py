"""The words of the command line: "anderson:5" is Anderson(memory=5), "implicit:gmres" is Implicit(GMRES())."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from banach.backward import GMRES, JFB, Implicit, Mode, Neumann, NormalCG, Unroll
from banach.data import Affine, Augmentation, Chain, Crop, Erase, Flip, paper_cifar10
from banach.models import Constant, Cosine, Schedule, Steps
from banach.solve import RMS, Anderson, Broyden, Euclidean, Norm, Picard, Solver, Tolerance, WorstPixel
from banach.train import OneCycle
from banach.train.schedule import nearest

# In training an adjoint solved to three digits does: fp32 cannot always do better, and bf16 never does.
ADJOINT_RTOL, ADJOINT_STEPS = 1e-3, 500

SOLVERS = "picard[:DAMPING] | anderson[:MEMORY] | broyden[:MEMORY]"
BACKWARDS = "jfb | neumann:ORDER | unroll:STEPS | implicit:cg|gmres|picard|anderson|broyden[:RTOL]"
NORMS = "rms | euclidean | worst-pixel"
SCHEDULES = "constant | cosine | one-cycle | steps:EPOCH,EPOCH,..:FACTOR"
AUGMENTS = "none | paper | flip | crop:PIXELS | erase | affine, joined by +"
_NORMS: dict[str, type[Any]] = {"rms": RMS, "euclidean": Euclidean, "worst-pixel": WorstPixel}


def solver(word: str) -> Solver:
    """`picard`, `picard:0.3`, `anderson:5`, `broyden:10`."""
    makers: dict[str, Callable[..., Any]] = {
        "picard": lambda damping="0": Picard(damping=_number(word, damping)),
        "anderson": lambda memory="5": Anderson(memory=_whole(word, memory)),
        "broyden": lambda memory="10": Broyden(memory=_whole(word, memory)),
    }
    made: Solver = _made("solver", word, makers, SOLVERS)
    return made


def backward(word: str) -> Mode:
    """`jfb`, `neumann:5`, `unroll:3`, `implicit:cg`, `implicit:gmres:1e-4`."""
    makers: dict[str, Callable[..., Any]] = {
        "jfb": JFB,
        "neumann": lambda order="5": Neumann(_whole(word, order)),
        "unroll": lambda steps="1": Unroll(_whole(word, steps)),
        "implicit": lambda method="cg", rtol=ADJOINT_RTOL: _implicit(method, _number(word, rtol)),
    }
    made: Mode = _made("backward", word, makers, BACKWARDS)
    return made


def _implicit(method: str, rtol: float) -> Implicit:
    methods = {"cg": NormalCG, "gmres": GMRES, "picard": Picard, "anderson": Anderson, "broyden": Broyden}
    made: Any = methods[nearest("method of implicit", method, methods)]()
    if not 0 < rtol < 1:
        raise ValueError(f"the relative tolerance of implicit must lie between 0 and 1, got {rtol:g}")
    return Implicit(made, Tolerance(atol=0, rtol=rtol, max_steps=ADJOINT_STEPS))


def norm(word: str) -> Norm:
    """`rms`, `euclidean`, `worst-pixel`; also `WorstPixel()`, as runs that were begun from Python have it."""
    written = {str(made()): name for name, made in _NORMS.items()}
    made: Norm = _made("norm", written.get(word, word), _NORMS, NORMS)
    return made


def name_of_norm(norm: Norm) -> str:
    """The word for a norm; a norm of one's own has none."""
    for word, made in _NORMS.items():
        if type(norm) is made:
            return word
    raise ValueError(f"the command line has no word for the norm {norm!r}; choose one with --norm: {NORMS}")


def schedule(word: str) -> Schedule:
    """`constant`, `cosine`, `one-cycle`, `steps:100,150:0.1`."""
    makers: dict[str, Callable[..., Any]] = {
        "constant": Constant,
        "cosine": Cosine,
        "one-cycle": lambda: OneCycle(),
        "steps": lambda at, factor="0.1": Steps(whole_numbers(at), _number(word, factor)),
    }
    made: Schedule = _made("schedule", word, makers, SCHEDULES)
    return made


def augment(word: str) -> Augmentation | None:
    """`none`, `paper` (the authors' for CIFAR-10), `flip+crop:4+erase`."""
    makers: dict[str, Callable[..., Any]] = {
        "none": lambda: None,
        "paper": paper_cifar10,
        "flip": Flip,
        "crop": lambda pad="4": Crop(_whole(word, pad)),
        "erase": Erase,
        "affine": Affine,
    }
    parts = [_made("augment", part, makers, AUGMENTS) for part in word.split("+")]
    kept = [part for part in parts if part is not None]
    return Chain(*kept) if len(kept) > 1 else (kept[0] if kept else None)


def whole_numbers(word: str) -> tuple[int, ...]:
    """`2,5`."""
    return tuple(_whole(word, part) for part in word.split(","))


def _made(what: str, word: str, makers: Mapping[str, Callable[..., Any]], grammar: str) -> Any:
    kind, *rest = str(word).strip().lower().split(":")
    maker = makers[nearest(what, kind, makers)]
    try:
        return maker(*rest)
    except TypeError:
        raise ValueError(f"{what} {word!r} is not understood; expected {grammar}") from None


def _whole(word: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{word!r} needs a whole number, got {text!r}") from None


def _number(word: str, text: Any) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{word!r} needs a number, got {text!r}") from None
