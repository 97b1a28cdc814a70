"""What goes wrong with data: one sentence each, saying what was got, what was expected and what to do."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """Data that cannot be used. The message is one sentence that a user can act on."""


class Damaged(DataError):
    """A file that is not what its publisher wrote. Readers raise it; `load` adds what to do."""

    def __init__(self, path: Path, what: str) -> None:
        what = " ".join(what.split())  # what other libraries say may run over several lines
        super().__init__(f"{path} cannot be used: {what}")
        self.path, self.what = path, what


class Incomplete(DataError):
    """A part's files are not all here. `present`: those that are, none where there is only its folder."""

    def __init__(self, message: str, present: tuple[Path, ...]) -> None:
        super().__init__(message)
        self.present = present


def need(module: str, purpose: str) -> Any:
    """An optional module, imported when it is first needed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        package = {"sklearn": "scikit-learn"}.get(top, top)
        raise DataError(f"{purpose} needs {package}, which is missing; run: pip install 'banach[app]'") from error
