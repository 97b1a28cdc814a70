"""Hypothesis strategies: damaged copies of good files, and settings files that were never good."""

import struct
from collections.abc import Sequence
from dataclasses import fields

from hypothesis import strategies as st

from banach.train import Settings

Edit = tuple[str, int, bytes]

_NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 73_257, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_TELLING = [struct.pack(order + "I", number) for number in _NUMBERS for order in "<>"]
_POSITIONS = st.one_of(st.integers(0, 300), st.integers(0, 2**16))  # headers are damaged most often
_BYTES = st.one_of(st.sampled_from(_TELLING), st.binary(min_size=1, max_size=8))
_EDITS = st.lists(
    st.tuples(st.sampled_from(["write", "write", "insert", "delete", "repeat", "cut"]), _POSITIONS, _BYTES),
    max_size=6,
)


def mutated(content: bytes, edits: Sequence[Edit]) -> bytes:
    """Return `content` with these edits; positions wrap around."""
    data = bytearray(content)
    for kind, position, value in edits:
        at = position % (len(data) + 1)
        if kind == "write":
            data[at : at + len(value)] = value
        elif kind == "insert":
            data[at:at] = value
        elif kind == "delete":
            del data[at : at + len(value)]
        elif kind == "repeat":
            data[at:at] = data[at : at + 64 * len(value)]
        else:
            del data[at:]
    return bytes(data)


def damaged(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return damaged copies of `seeds`, and at times other bytes altogether."""
    copies = st.builds(mutated, st.sampled_from(list(seeds)), _EDITS)
    return st.one_of(copies, copies, copies, st.binary(max_size=400))


_ARGUMENTS = ("0", "1", "5", "-1", "0.5", "1e-3", "1e999", "nan", "99999999999", "1,2,3", "", " ", "cg", "gmres")


def word(*kinds: str) -> st.SearchStrategy[str]:
    """Return words of the settings, such as anderson:5 and flip+crop:4, right and wrong."""
    arguments = st.lists(st.sampled_from(_ARGUMENTS), max_size=2)
    one = st.builds(lambda kind, rest: ":".join([kind, *rest]), st.sampled_from(kinds), arguments)
    return st.one_of(one, st.lists(one, min_size=1, max_size=3).map("+".join), st.text(max_size=20))


_LITERALS = (
    "true",
    "[]",
    "[2, 5]",
    "{}",
    "{kind = 'steps', at = [1], factor = 0.1}",
    "1979-05-27",
    "inf",
    "nan",
    "-0.0",
)
_VALUES = st.one_of(
    st.sampled_from(_LITERALS),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(repr),
    word(
        "picard", "anderson", "jfb", "unroll", "rms", "flip", "crop", "cosine", "sgd", "bf16", "cuda", "mnist"
    ).map(lambda text: "'" + "".join(c for c in text if c.isprintable() and c != "'") + "'"),
)
_KEYS = st.sampled_from([field.name for field in fields(Settings)] + ["no-such-key", "batch-size"])
toml = st.dictionaries(_KEYS, _VALUES, max_size=6).map(
    lambda table: "\n".join(f"{key} = {value}" for key, value in table.items()).encode(errors="replace")
)
