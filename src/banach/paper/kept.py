"""Files that studies keep beside their runs: one sentence where one of them is not what was written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from banach.train.run import RunError

_WRONG = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong in the block is the file's fault."""
    try:
        yield
    except RunError:
        raise
    except _WRONG as error:
        said = f"{type(error).__name__}: {error}"
        raise RunError(f"{path} cannot be read ({said[:200]}); delete it, and run the command again") from None


def read(path: Path) -> Any:
    with reading(path):
        return json.loads(path.read_text(encoding="utf-8"))
