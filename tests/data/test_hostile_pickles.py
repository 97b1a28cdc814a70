"""Hostile pickles: each is refused by name with a sentence, and nothing in it runs."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from banach.data import CIFAR10
from banach.data.dataset import Damaged
from banach.data.pickles import load_arrays


class Touch:
    """Unpickled by Python's own unpickler, this makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def call(module: str, name: str, *arguments: object) -> bytes:
    """A pickle that calls module.name(*arguments)."""
    inner = b"".join(pickle.dumps(argument, protocol=2)[2:-1] for argument in arguments)
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + inner + b"tR."


NAMES: list[tuple[Any, ...]] = [
    ("os", "system", "true"),
    ("posix", "system", "true"),
    ("subprocess", "getoutput", "true"),
    ("builtins", "eval", "1"),
    ("builtins", "exec", "1"),
    ("builtins", "getattr", "x", "upper"),
    ("builtins", "__import__", "os"),
    ("numpy", "load", "/etc/passwd"),
    ("numpy", "memmap", "/tmp/x"),
    ("numpy", "fromfile", "/etc/passwd"),
    ("numpy.core.multiarray", "fromstring", "1"),
    ("numpy._core.multiarray", "scalar", "1"),
    ("numpy.testing._private.utils", "runstring", "1", {}),
    ("torch", "load", "/tmp/x"),
    ("codecs", "decode", "x", "rot13"),
    ("numpy", "core.multiarray._reconstruct", 1),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data_batch_1"


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(Damaged) as caught:
        load_arrays(path)
    assert "\n" not in str(caught.value)
    assert "data_batch_1" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("deep", [False, True])
def test_a_call_is_refused_and_not_made(tmp_path: Path, path: Path, protocol: int, deep: bool) -> None:
    marker = tmp_path / "marker"
    content: Any = {"labels": [0, {"x": (1, [Touch(marker)])}]} if deep else Touch(marker)
    data = pickle.dumps(content, protocol=protocol)
    assert "mkdir" in refused(path, data)
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists()  # so the attack was a real one


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ".".join(name[:2]))
def test_names_that_are_no_arrays(path: Path, name: tuple[Any, ...]) -> None:
    sentence = refused(path, call(*name))
    assert f"{name[0]}.{name[1]}" in sentence
    assert "only arrays" in sentence


def test_refused_in_a_data_set_with_advice(
    tmp_path: Path, small: Callable, refusal: Callable, random_arrays: Callable
) -> None:
    small(CIFAR10)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for k in range(1, 6):
        (folder / f"data_batch_{k}").write_bytes(pickle.dumps(Touch(tmp_path / "marker"), protocol=2))
    assert "nothing in it was run" in refusal("cifar10", tmp_path, "data_batch_1")
    assert not (tmp_path / "marker").exists()


OPCODES = {
    "INST": b"(S'true'\nios\nsystem\n.",
    "OBJ": b"(cnumpy\nndarray\nS'true'\no.",
    "NEWOBJ": b"\x80\x02cnumpy\nndarray\n(K\x01t\x81.",
    "NEWOBJ_EX": b"\x80\x04\x8c\x05numpy\x8c\x07ndarray\x93(t}\x92.",
    "EXT1": b"\x80\x02\x82\x01.",
    "PERSID": b"Pname\n.",
    "BINPERSID": b"K\x01Q.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "DUP": b"]2.",
}


@pytest.mark.parametrize("opcode", OPCODES)
def test_opcodes_that_arrays_do_not_need(path: Path, opcode: str) -> None:
    assert f"uses {opcode} " in refused(path, OPCODES[opcode])


def test_a_memo_index_that_would_take_all_memory(path: Path) -> None:
    assert "memo index 2147483647" in refused(path, b"\x80\x02]r" + struct.pack("<I", 2**31 - 1) + b".")


@pytest.mark.parametrize("name", ["numpy\nndarray", "numpy\ndtype", "numpy.core.multiarray\n_reconstruct"])
@pytest.mark.parametrize("state", [b"}S'make'\nNs", b"N}S'make'\nNs\x86", b"}S'__call__'\nNs"])
def test_functions_cannot_be_changed(path: Path, name: str, state: bytes) -> None:
    assert "changes a function" in refused(path, b"\x80\x02c" + name.encode() + b"\n" + state + b"b.")
    good = pickle.dumps({"data": np.arange(4, dtype=np.uint8)}, protocol=2)
    path.write_bytes(good)
    assert load_arrays(path)["data"].tolist() == [0, 1, 2, 3]


def array(shape: object, code: str, raw: object, dtype_state: bytes = b"") -> bytes:
    """A pickle of {'data': array} with any shape, type and bytes."""
    part = lambda value: pickle.dumps(value, protocol=2)[2:-1]  # noqa: E731
    dtype = b"cnumpy\ndtype\n" + part(code) + b"K\x00K\x01\x87R" + dtype_state
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85S'b'\n\x87R"
    return b"\x80\x02}S'data'\n" + made + b"(K\x01" + part(shape) + dtype + b"\x89" + part(raw) + b"tbs."


def test_the_forged_arrays_start_from_a_good_one(path: Path) -> None:
    path.write_bytes(array((2, 3), "u1", "abcdef"))
    assert load_arrays(path)["data"].tolist() == [[97, 98, 99], [100, 101, 102]]


@pytest.mark.parametrize(
    ("shape", "code", "raw"),
    [
        ((1,), "O", [1]),
        ((1,), "O8", "12345678"),
        ((1,), "V8", "12345678"),
        ((1,), "f8", "12345678"),
        ((10**12,), "u1", "x"),
        ((3,), "u1", "ab"),
        ((-1, -2), "u1", "ab"),
        ("ab", "u1", "ab"),
        ((2,), "u1", [1, 2]),
        ((2,), "u1", None),
    ],
)
def test_forged_arrays(path: Path, shape: object, code: str, raw: object) -> None:
    refused(path, array(shape, code, raw))


def test_a_forged_dtype_state_is_not_believed(path: Path) -> None:
    """State that makes NumPy's own dtype an object type in disguise is ignored: bytes stay bytes."""
    state = b"(K\x03S'|'\nNNNK\x08K\x01K\x00tb"
    path.write_bytes(array((8,), "u1", "\0" * 8, state))
    got = load_arrays(path)["data"]
    assert got.dtype == np.uint8
    assert got.tolist() == [0] * 8


def test_numpys_own_array_type_cannot_be_called(path: Path) -> None:
    assert "calls numpy.ndarray" in refused(path, call("numpy", "ndarray", (10**13,)))


@pytest.mark.parametrize("encoding", ["rot13", "zlib", "utf-8"])
def test_other_encodings(path: Path, encoding: str) -> None:
    assert "encodes text" in refused(path, call("_codecs", "encode", "x", encoding))


@pytest.mark.parametrize("cut", [1, 7, 30, 60])
def test_truncated(path: Path, cut: int) -> None:
    data = pickle.dumps({"data": np.arange(40, dtype=np.uint8)}, protocol=2)
    assert "not a readable pickle" in refused(path, data[:-cut])


def test_deep_nesting(path: Path) -> None:
    refused(path, b"(" * 100_000 + b"l" * 100_000 + b".")


def test_too_long(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banach.data.pickles.LIMIT", 100)
    assert "at most 100" in refused(path, bytes(101))
