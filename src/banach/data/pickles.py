"""load_arrays(): read an untrusted pickle of arrays; nothing in it is called, imported or changed.

There are two barriers. The opcodes are read first, without being run; only those that build dictionaries, lists,
strings, numbers and arrays may occur. Then each of the few NumPy names that an array needs becomes a record of the
call, and the arrays are made here. (NumPy's dtype and ndarray would do for honest files, but a forged dtype state
can make NumPy read bytes as pointers.)
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from banach.data.dataset import Damaged

LIMIT = 2**26  # bytes: a batch of CIFAR-10 has 31 million; 46 million as protocol 2 of newer Pythons
OPCODES = 2**18  # each may make an object of many bytes; a batch of CIFAR-10 has about 60,000

_ALLOWED = (
    "PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 "
    "STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET "
    "GLOBAL STACK_GLOBAL REDUCE BUILD"
)
_OPCODES = frozenset(_ALLOWED.split())
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_NAMES = {"numpy.ndarray", "numpy.dtype", "_codecs.encode", "codecs.encode"} | {
    f"numpy.{core}.{name}"
    for core in ("core", "_core")
    for name in ("multiarray._reconstruct", "numeric._frombuffer")
}


class _Refused(Exception):
    """Something that a pickle of arrays does not need."""


class _Call:
    """A name in the pickle, the arguments it was called with and the state it was given. Nothing is run."""

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name, self.args = name, args
        self.state: Any = ()

    def __call__(self, *args: Any) -> _Call:
        return _Call(self.name, args)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Recorder(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> _Call:
        if f"{module}.{name}" not in _NAMES or "." in name:
            raise _Refused(f"it asks for {module}.{name}, and only arrays are allowed")
        return _Call(name)


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
        top = _Recorder(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(top, dict):
            raise _Refused(f"it holds a {type(top).__name__}, expected a dictionary")
        return _finished(top, len(data))
    except _Refused as error:
        raise Damaged(path, f"{error}; nothing in it was run") from error
    except Exception as error:  # a broken pickle can raise anything
        raise Damaged(path, f"it is not a readable pickle ({type(error).__name__}: {error})") from error


def _check_opcodes(data: bytes) -> None:
    for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
        if count == OPCODES:
            raise _Refused(f"it has more than {OPCODES:,} opcodes")
        if opcode.name not in _OPCODES:
            raise _Refused(f"it uses {opcode.name} at byte {position}, and only arrays are allowed")
        # The unpickler allocates every index below the largest one, so a forged index could take all memory.
        if opcode.name in _PUTS and not 0 <= int(argument or 0) <= (position or 0):
            raise _Refused(f"it uses the memo index {argument} at byte {position}")


def _finished(top: dict[Any, Any], limit: int) -> dict[str, Any]:
    """Make the arrays, of at most `limit` bytes in sum: one text in the file may be the content of many."""
    made = {}
    for key, value in top.items():
        if isinstance(value, _Call):
            value = _array(value, limit)
            limit -= value.size
        made[_text(key)] = value
    return made


def _array(call: _Call, limit: int) -> np.ndarray:
    """Return the array that a call was to make."""
    if call.name == "_frombuffer":
        raw, dtype, shape, order = call.args[:4]
    elif call.name == "_reconstruct":
        _, shape, dtype, fortran, raw = call.state
        order = "F" if fortran else "C"
    else:
        raise _Refused(f"it calls {call.name}, which makes no array")
    code = _text(dtype.args[0]) if isinstance(dtype, _Call) and dtype.name == "dtype" else repr(dtype)
    if code not in ("u1", "|u1"):
        raise _Refused(f"it holds an array of type {code!r}, expected 'u1'")
    if math.prod(shape) > limit:
        raise _Refused("it holds arrays of more bytes than the file")
    if isinstance(raw, _Call) and raw.args[1:] == ("latin1",):  # bytes, as newer Pythons store them for older ones
        raw = raw.args[0].encode("latin1")
    if not isinstance(raw, (bytes, bytearray)) or len(raw) != math.prod(shape):
        raise _Refused("it holds an array whose bytes do not fill its shape")
    return np.frombuffer(raw, np.uint8).reshape(shape, order=order)


def _text(key: Any) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)
