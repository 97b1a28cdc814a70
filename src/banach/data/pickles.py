"""load_arrays(): read an untrusted pickle of arrays; nothing in it can be called, imported or changed.

There are two barriers. The opcodes are read first, without being run; only those that build dictionaries, lists,
strings, numbers and arrays may occur. Then each of the few NumPy names that an array needs becomes a stand-in that
only stores its arguments. (NumPy's dtype and ndarray would do for honest files, but a forged dtype state can make
NumPy read bytes as pointers.)
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from banach.data.dataset import Damaged

LIMIT = 2**28  # bytes: ten times a batch of CIFAR-10

_ALLOWED = (
    "PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 "
    "STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET "
    "GLOBAL STACK_GLOBAL REDUCE BUILD"
)
_OPCODES = frozenset(_ALLOWED.split())
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")


class _Refused(Exception):
    """Something that a pickle of arrays does not need."""


class _Dtype:
    def __init__(self, code: Any = None, *rest: Any) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and the like: uint8, the only accepted type, has none."""


class _Array:
    """The stored state of an array: its shape, its type and its bytes."""

    def __init__(self) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.state = tuple(state)

    def build(self) -> np.ndarray:
        _, shape, dtype, fortran, raw = self.state
        data = raw.encode("latin1") if isinstance(raw, str) else raw
        if not isinstance(dtype, _Dtype) or dtype.code not in ("u1", "|u1"):
            raise _Refused(f"it holds an array of type {getattr(dtype, 'code', dtype)!r}, expected 'u1'")
        if not isinstance(data, (bytes, bytearray)) or len(data) != math.prod(shape):
            raise _Refused("it holds an array whose bytes do not fill its shape")
        return np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Maker:
    """A name in the pickle. Calling it makes a stand-in; a pickle cannot change its state."""

    __slots__ = ("make",)
    make: Callable[..., Any]

    def __init__(self, make: Callable[..., Any]) -> None:
        object.__setattr__(self, "make", make)

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)

    def __setstate__(self, state: Any) -> None:
        raise _Refused("it changes a function")

    def __setattr__(self, name: str, value: Any) -> None:
        raise _Refused("it changes a function")


def _encode(text: Any, encoding: Any) -> bytes:
    """Decode Python 2 byte strings as newer pickles store them."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise _Refused(f"it encodes text as {encoding!r}")
    return text.encode("latin1")


def _frombuffer(raw: Any, dtype: Any, shape: Any, order: Any, *rest: Any) -> _Array:
    array = _Array()
    array.state = (None, shape, dtype, order == "F", raw)
    return array


def _no_call(*args: Any) -> None:
    raise _Refused("it calls numpy.ndarray")


def _names() -> dict[tuple[str, str], _Maker]:
    names = {("numpy", "ndarray"): _Maker(_no_call), ("numpy", "dtype"): _Maker(_Dtype)}
    for codecs in ("_codecs", "codecs"):
        names[codecs, "encode"] = _Maker(_encode)
    for core in ("numpy.core", "numpy._core"):
        names[f"{core}.multiarray", "_reconstruct"] = _Maker(lambda *args: _Array())
        names[f"{core}.numeric", "_frombuffer"] = _Maker(_frombuffer)
    return names


class _ArraysOnly(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.names = _names()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.names:
            raise _Refused(f"it asks for {module}.{name}, and only arrays are allowed")
        return self.names[module, name]


def load_arrays(path: Path) -> dict[str, Any]:
    """Return the dictionary in a pickle: text keys; uint8 arrays, lists, strings and numbers as values.

    Raises:
        Damaged: if it holds anything else.
    """
    if path.stat().st_size > LIMIT:
        raise Damaged(path, f"it holds {path.stat().st_size:,} bytes, expected at most {LIMIT:,}")
    data = path.read_bytes()
    try:
        _check_opcodes(data)
        top = _ArraysOnly(data).load()
        if not isinstance(top, dict):
            raise _Refused(f"it holds a {type(top).__name__}, expected a dictionary")
        return {_text(key): _finished(value) for key, value in top.items()}
    except _Refused as error:
        raise Damaged(path, f"{error}; nothing in it was run") from error
    except Exception as error:  # a broken pickle can raise anything
        raise Damaged(path, f"it is not a readable pickle ({type(error).__name__}: {error})") from error


def _check_opcodes(data: bytes) -> None:
    for opcode, argument, position in pickletools.genops(data):
        if opcode.name not in _OPCODES:
            raise _Refused(f"it uses {opcode.name} at byte {position}, and only arrays are allowed")
        # The unpickler allocates every index below the largest one, so a forged index could take all memory.
        if opcode.name in _PUTS and not 0 <= int(argument or 0) <= (position or 0):
            raise _Refused(f"it uses the memo index {argument} at byte {position}")


def _finished(value: Any) -> Any:
    return value.build() if isinstance(value, _Array) else value


def _text(key: Any) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)
