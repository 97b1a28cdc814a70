"""Dataclasses as lines of JSON, and back: the only format in which results are stored."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from banach.provenance import plain, whole_file
from banach.train import RunError

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return the value as JSON holds it: dataclasses as objects, NaN and infinities as strings."""
    return plain(dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value)  # type: ignore[arg-type]


def decode(kind: Any, value: Any) -> Any:
    """Return the object of type `kind` that `encode` wrote.

    Supported: dataclasses, tuples of one type, dictionaries, unions, numbers, strings, None, Any. Keys that a
    dataclass does not have are ignored, so that records may hold more than a study reads; missing keys take their
    defaults. Of a union the first type that fits is taken.

    Raises:
        ValueError, TypeError: if a number is not one, or a dataclass misses keys.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union) and value is not None:
        for one in [one for one in inner if one is not type(None)]:
            with suppress(TypeError, ValueError):
                return decode(one, value)
        raise ValueError(f"expected {kind}, got {str(value)[:80]!r}")
    if origin is tuple:
        return tuple(decode(inner[0], part) for part in value)
    if origin is dict:
        return {key: decode(inner[1], part) for key, part in value.items()}
    if dataclasses.is_dataclass(kind):
        kinds = {name: one for name, one in get_type_hints(kind).items() if name in value}
        return kind(**{name: decode(one, value[name]) for name, one in kinds.items()})  # type: ignore[operator]
    return float(value) if kind is float else value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines, an empty list if there is no file.

    A last line without its line break was cut off by a kill and is left out.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    try:
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}; restore the file, or delete it and run again") from None


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file, completely or not at all."""
    with whole_file(path) as file:
        file.writelines(json.dumps(plain(line), allow_nan=False) + "\n" for line in lines)


def read(kind: type[T], path: Path) -> list[T]:
    """Return the objects of a file of JSON lines, as dataclasses of type `kind`."""
    try:
        return [decode(kind, line) for line in read_lines(path)]
    except (TypeError, ValueError) as error:
        raise RunError(f"{path} does not fit: {error}; restore the file, or delete it and run again") from None
