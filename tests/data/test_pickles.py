"""Pickled batches of CIFAR-10: read as every Python wrote them; hostile ones are refused, and nothing is run."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from banach.data import CIFAR10, load
from banach.data.dataset import Damaged
from banach.data.pickles import load_arrays


def python_2(data: np.ndarray, labels: list[int]) -> bytes:
    """The bytes Python 2 wrote for {'data': array, 'labels': list}: protocol 2, byte strings, numpy.core."""
    text = lambda s: b"U" + bytes([len(s)]) + s.encode()  # noqa: E731
    shape = b"".join(b"J" + struct.pack("<i", n) for n in data.shape) + b"\x86"
    dtype = b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87R(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xff"
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    raw = b"T" + struct.pack("<i", data.size) + data.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
    array += b"(K\x01" + shape + dtype + b"\x89" + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"e"
    return b"\x80\x02}(" + text("data") + array + text("labels") + numbers + b"u."


def newer(protocol: int, data: np.ndarray, labels: list[int]) -> bytes:
    return pickle.dumps({"data": data, "labels": labels, "batch_label": "x"}, protocol=protocol)


WRITERS: dict[str, Callable[[np.ndarray, list[int]], bytes]] = {
    "Python 2": python_2,
    **{f"protocol {p}": lambda data, labels, p=p: newer(p, data, labels) for p in range(6)},  # type: ignore[misc]
    "Fortran order": lambda data, labels: newer(4, np.asfortranarray(data), labels),
}


@pytest.fixture
def batches(tmp_path: Path, small: Callable, random_arrays: Callable) -> Callable[..., Any]:
    """Writes five pickled batches, and returns their arrays."""

    def write(writer: Callable) -> Any:
        small(CIFAR10)
        (tmp_path / "cifar-10-batches-py").mkdir()
        pixels, labels = random_arrays(40, (3, 32, 32))
        for k, part in enumerate(np.split(np.arange(40), 5), 1):
            content = writer(pixels[part].reshape(8, -1), labels[part].tolist())
            (tmp_path / "cifar-10-batches-py" / f"data_batch_{k}").write_bytes(content)
        return pixels, labels

    return write


@pytest.mark.parametrize("version", WRITERS)
def test_every_version_is_read(tmp_path: Path, batches: Callable, version: str) -> None:
    pixels, labels = batches(WRITERS[version])
    got = load("cifar10", "train+validation", tmp_path)
    assert np.array_equal(got.pixels.numpy(), pixels)
    assert np.array_equal(got.labels.numpy(), labels)
    data = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = pickle.loads(python_2(data, [3, 1, 2]), encoding="bytes")  # the handwritten one is a true pickle
    assert np.array_equal(content[b"data"], data)


ONE = np.zeros((1, 3072), np.uint8)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"labels": [0]}, "no array 'data'"),
        ({"data": ONE[:, 1:], "labels": [0]}, "no array 'data'"),
        ({"data": ONE.astype(np.int8), "labels": [0]}, "array of type 'i1'"),
        ({"data": ONE}, "no list 'labels'"),
        ({"data": ONE, "labels": ["cat"]}, "no list 'labels'"),
        ({"data": ONE, "labels": [0, 1]}, "2 labels and 1 images"),
        ({"data": ONE, "labels": [10]}, "a label of 10"),
        ({"data": ONE, "labels": [-1]}, "a label of -1"),
        ({"data": ONE, "labels": [10**30]}, "expected 0 to 9"),
        ([1, 2], "a list, expected a dictionary"),
    ],
)
def test_wrong_content_is_refused(
    tmp_path: Path, batches: Callable, refusal: Callable, content: object, expected: str
) -> None:
    batches(python_2)
    (tmp_path / "cifar-10-batches-py" / "data_batch_5").write_bytes(pickle.dumps(content, protocol=4))
    assert expected in refusal("cifar10", tmp_path, "data_batch_5")


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(Damaged) as caught:
        load_arrays(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return str(caught.value)


class Touch:
    """Unpickled by Python's own unpickler, this makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_call_is_refused_and_not_made(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    for content in (Touch(marker), {"labels": [0, {"x": (1, [Touch(marker)])}]}):
        data = pickle.dumps(content, protocol=protocol)
        sentence = refused(tmp_path / "batch", data)
        assert "mkdir" in sentence
        assert "nothing in it was run" in sentence
        assert not marker.exists()
        pickle.loads(data)
        marker.rmdir()  # it was made, so the attack was a real one


def call(module: str, name: str, *arguments: object) -> bytes:
    """A pickle that calls module.name(*arguments)."""
    inner = b"".join(pickle.dumps(argument, protocol=2)[2:-1] for argument in arguments)
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + inner + b"tR."


def array(shape: object, code: str, raw: object, dtype_state: bytes = b"") -> bytes:
    """A pickle of {'data': array} with any shape, type and bytes."""
    part = lambda value: pickle.dumps(value, protocol=2)[2:-1]  # noqa: E731
    dtype = b"cnumpy\ndtype\n" + part(code) + b"K\x00K\x01\x87R" + dtype_state
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85S'b'\n\x87R"
    return b"\x80\x02}S'data'\n" + made + b"(K\x01" + part(shape) + dtype + b"\x89" + part(raw) + b"tbs."


HUNDRED = pickle.dumps({"data": np.arange(100, dtype=np.uint8)}, protocol=2)
HOSTILE = {  # what a pickle of arrays does not need, and the words of its refusal
    **{
        call(module, name, *arguments): f"asks for {module}.{name}, and only arrays are allowed"
        for module, name, *arguments in (
            ("os", "system", "true"),
            ("subprocess", "getoutput", "true"),
            ("builtins", "eval", "1"),
            ("builtins", "getattr", "x", "upper"),
            ("builtins", "__import__", "os"),
            ("numpy", "load", "/etc/passwd"),
            ("numpy", "memmap", "/tmp/x"),
            ("numpy.core.multiarray", "fromstring", "1"),
            ("numpy._core.multiarray", "scalar", "1"),
            ("torch", "load", "/tmp/x"),
            ("codecs", "decode", "x", "rot13"),
            ("numpy", "core.multiarray._reconstruct", 1),
        )
    },
    b"(S'true'\nios\nsystem\n.": "uses INST ",
    b"(cnumpy\nndarray\nS'true'\no.": "uses OBJ ",
    b"\x80\x02cnumpy\nndarray\n(K\x01t\x81.": "uses NEWOBJ ",
    b"\x80\x04\x8c\x05numpy\x8c\x07ndarray\x93(t}\x92.": "uses NEWOBJ_EX ",
    b"\x80\x02\x82\x01.": "uses EXT1 ",
    b"Pname\n.": "uses PERSID ",
    b"K\x01Q.": "uses BINPERSID ",
    b"\x80\x05\x97.": "uses NEXT_BUFFER ",
    b"]2.": "uses DUP ",
    b"\x80\x02](" + b"}" * 2**18 + b"e.": "more than 262,144 opcodes",
    b"\x80\x02]r" + struct.pack("<I", 2**31 - 1) + b".": "memo index 2147483647",
    call("numpy", "ndarray", (10**13,)): "expected a dictionary",
    b"\x80\x02}S'data'\ncnumpy\nndarray\n(K\x01tRs.": "calls ndarray",
    b"\x80\x02}S'data'\n" + call("_codecs", "encode", "x", "rot13")[2:-1] + b"s.": "calls encode",
    **{
        array(*forged): words
        for *forged, words in (
            ((1,), "O", [1], "type 'O'"),
            ((1,), "V8", b"12345678", "type 'V8'"),
            ((1,), "f8", b"12345678", "type 'f8'"),
            ((10**12,), "u1", b"x", "more bytes than the file"),
            ((3,), "u1", b"ab", "do not fill its shape"),
            ((-1, -2), "u1", b"ab", "not a readable pickle"),
            ("ab", "u1", b"ab", "not a readable pickle"),
            ((2,), "u1", [1, 2], "do not fill its shape"),
            ((2,), "u1", None, "do not fill its shape"),
        )
    },
    **{HUNDRED[:-cut]: "not a readable pickle" for cut in (1, 7, 30, 60)},
    b"(" * 100_000 + b"l" * 100_000 + b".": "expected a dictionary",  # deep nesting
}


def test_hostile_pickles_are_refused(tmp_path: Path) -> None:
    for content, words in HOSTILE.items():
        assert words in refused(tmp_path / "batch", content), content[:80]


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of the file, and by what all arrays of a file hold: many can share one text."""
    text = b"X" + struct.pack("<I", 10_000) + b"x" * 10_000 + b"q\x090"  # stored as 9 and dropped
    one = array((10_000,), "u1", None)[3:-4].removesuffix(b"N") + b"c_codecs\nencode\n(h\x09X\x06\0\0\0latin1tRtbs"
    two = one + one.replace(b"'data'", b"'more'")
    assert "more bytes than the file" in refused(tmp_path / "batch", b"\x80\x02" + text + b"}" + two + b".")
    (tmp_path / "batch").write_bytes(b"\x80\x02" + text + b"}" + one + b".")
    assert load_arrays(tmp_path / "batch")["data"].tolist() == [ord("x")] * 10_000
    monkeypatch.setattr("banach.data.pickles.LIMIT", 100)
    assert "at most 100" in refused(tmp_path / "batch", bytes(101))


def test_a_forged_state_changes_nothing(tmp_path: Path) -> None:
    """State that makes NumPy's own dtype an object type in disguise is ignored: bytes stay bytes."""
    path = tmp_path / "batch"
    for name in ("numpy\nndarray", "numpy\ndtype", "numpy.core.multiarray\n_reconstruct"):
        for state in (b"}S'name'\nNs", b"N}S'name'\nNs\x86", b"}S'__call__'\nNs"):
            refused(path, b"\x80\x02c" + name.encode() + b"\n" + state + b"b.")
    path.write_bytes(array((8,), "u1", bytes(range(8)), b"(K\x03S'|'\nNNNK\x08K\x01K\x00tb"))
    got = load_arrays(path)["data"]
    assert got.dtype == np.uint8
    assert got.tolist() == list(range(8))
