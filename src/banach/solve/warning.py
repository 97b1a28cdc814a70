"""Warnings about solves that failed, shown at the user's own line."""

import sys
import warnings
from pathlib import Path

import torch

_INSIDE = tuple(str(Path(file).parent) for file in (str(Path(__file__).parent), torch.__file__))


class ConvergenceWarning(RuntimeWarning):
    """A fixed point was not found: some samples did not meet the tolerance."""


class AdjointWarning(RuntimeWarning):
    """The adjoint equation of `Implicit` was not solved to its tolerance: the gradient is not exact."""


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the innermost line outside banach and torch.

    Python's default filter shows a text once per line, so `text` must be constant: numbers are in
    `Solution.summary()`. (Python 3.11 has no `skip_file_prefixes`.)
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
