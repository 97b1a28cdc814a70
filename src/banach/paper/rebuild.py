"""A dataclass from the JSON it was kept as, by the types of its fields.

`write_json` of `asdict(made)` makes lists of tuples, and strings of NaN and infinities; here they are what they
were. A file of another version, with other fields, does not fit: nothing is guessed, no default taken.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_WORDS = ("nan", "inf", "-inf")  # of numbers that JSON has not
_EXACT = 2**53  # up to there a whole number is a float
_LEAVES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", NoneType: "null"}


def rebuild(kind: type[T], value: Any) -> T:
    """The object that was written; `ValueError` names what does not fit."""
    made: T = _made(kind, value, kind.__name__)
    return made


def _made(kind: Any, value: Any, at: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass(kind, value, at)
    if origin is UnionType:
        return _first(inner, value, at)
    if origin is tuple:
        return tuple(_items(inner, value, at))
    if origin is dict and inner[0] is str:
        parts = _checked(dict, value, "an object", at)
        return {key: _made(inner[1], part, f"{at}[{key!r}]") for key, part in parts.items()}
    if kind in _LEAVES:
        return _leaf(kind, value, at)
    raise TypeError(f"{at} is of a type that cannot be rebuilt: {kind}")


def _dataclass(kind: Any, value: Any, at: str) -> Any:
    parts = _checked(dict, value, "an object", at)
    wanted, kinds = [field.name for field in fields(kind)], get_type_hints(kind)
    if set(parts) != set(wanted):
        raise ValueError(f"{at} must have {', '.join(wanted)}; got {', '.join(parts) or 'nothing'}")
    return kind(**{name: _made(kinds[name], parts[name], f"{at}.{name}") for name in wanted})


def _items(inner: tuple[Any, ...], value: Any, at: str) -> list[Any]:
    """`inner`: one type for each, or one for all and an ellipsis."""
    parts = _checked(list, value, "a list", at)
    kinds = inner[:1] * len(parts) if inner[1:] == (...,) else inner
    if len(parts) != len(kinds):
        raise ValueError(f"{at} must have {len(kinds)} items, got {len(parts)}")
    return [_made(kind, part, f"{at}[{i}]") for i, (kind, part) in enumerate(zip(kinds, parts, strict=True))]


def _first(kinds: tuple[Any, ...], value: Any, at: str) -> Any:
    """The first kind that fits."""
    said = []
    for kind in kinds:
        try:
            return _made(kind, value, at)
        except ValueError as error:
            said.append(str(error))
    raise ValueError("; or ".join(said))


def _leaf(kind: Any, value: Any, at: str) -> Any:
    if kind is not float:
        fits = type(value) is kind  # a bool is no int here
        return value if fits else _refuse(_LEAVES[kind], value, at)
    whole = type(value) is int and abs(value) <= _EXACT
    if whole or type(value) is float or (type(value) is str and value in _WORDS):
        return float(value)
    return _refuse(_LEAVES[kind], value, at)


def _checked(kind: Any, value: Any, expected: str, at: str) -> Any:
    return value if isinstance(value, kind) else _refuse(expected, value, at)


def _refuse(expected: str, value: Any, at: str) -> Any:
    raise ValueError(f"{at} must be {expected}, got {repr(value)[:80]}")
