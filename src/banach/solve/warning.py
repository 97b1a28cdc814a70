"""Warnings about solves that failed, shown at the user's own line."""

import sys
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from banach.solve.mixing import probe
from banach.solve.solution import Solution, Status
from banach.solve.solver import Map

_INSIDE = tuple(str(Path(file).parent) for file in (str(Path(__file__).parent), torch.__file__))


class ConvergenceWarning(RuntimeWarning):
    """A fixed point was not found: some samples did not meet the tolerance."""


class AdjointWarning(RuntimeWarning):
    """The gradient is not exact: the equation of `Implicit` missed its tolerance, or T changed in between."""


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the innermost line outside banach and torch.

    Python's default filter shows a text once per line, so `text` must be constant: numbers are in
    `Solution.summary()`. (Python 3.11 has no `skip_file_prefixes`.)
    """
    warn = torch.compiler.disable(_warn) if torch.compiler.is_compiling() else _warn  # Dynamo traces no frames
    warn(text, category)


def _warn(text: str, category: type[Warning]) -> None:
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


# R and T that were probed after a failed solve, and found to be in order: they are not probed again.
_independent: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def warn_unconverged(found: Solution, T: Map, inputs: tuple[Any, ...], *, coupled: bool, owner: Any) -> Solution:
    """Warn that host checks saw samples that did not converge, `found.failures`, in constant words.

    T that mixes samples or draws at random may be the cause, so T is probed here, once for every `owner`: T's R
    where T is made for one pass, the code of a function.

    Returns:
        The solution, with the fault that the probe found.
    """
    if not (found.fault or coupled or id(owner) in _independent):
        look = torch.compiler.disable(probe) if torch.compiler.is_compiling() else probe
        found = found.changed(fault=look(T, found.value, inputs))
        with suppress(TypeError):  # an owner that cannot be referenced weakly
            if found.fault is None:
                _independent[id(owner)] = owner
    causes = "; ".join(status.value for status in Status if status in found.failures)
    text = found.fault.value if found.fault else f"{causes}; pass solution=True and print Solution.summary()"
    warn_user(f"the fixed point was not found for all samples: {text}", ConvergenceWarning)
    return found
