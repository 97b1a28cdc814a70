"""Damaged and forged checkpoints are refused in one sentence or recovered; they never change the weights."""

import hashlib
import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from banach.provenance import digest
from banach.train import CheckpointError, Run, fit
from banach.train.checkpoint import STATE, TENSORS, checkpoints
from train.parts_train import images, plain_network, same_weights, settings

MADE = settings(checkpoint_every=1, ema=0.9)
SAMPLE, ALL = 40, 2000
JUNK: list[Any] = [
    *(None, True, -1, 0.5, "", "x", "1", [], {}, [1], {"a": 1}, 2**70, -(2**63), 1e308, [[[]]], {"epoch": 1}),
    *("../../etc/passwd", "\x00", "é" * 99, [None] * 3, {"1": {"2": 3}}, False, 7, 10**30, "nan", "Infinity"),
]
DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.float32)


def mutate(path: Path, number: int) -> str:
    """Change the checkpoint at `path` and return in words how."""
    draw = random.Random(number)
    kind = draw.choice([*_BYTES, *_STATES, *_TENSORS])
    if kind in _BYTES:
        name = draw.choice([STATE, TENSORS])
        (path / name).write_bytes(_BYTES[kind](draw, (path / name).read_bytes()))
        return f"{kind} of {name}"
    state, data = json.loads((path / STATE).read_bytes())["state"], (path / TENSORS).read_bytes()
    if kind in _STATES:
        said = _STATES[kind](draw, state)
    else:
        tensors = load(data)
        said = _TENSORS[kind](draw, tensors)
        data = save({name: value.contiguous().clone() for name, value in tensors.items()})
    (path / TENSORS).write_bytes(data)
    content = {"tensors": hashlib.sha256(data).hexdigest(), "sha256": digest(state), "state": state}
    (path / STATE).write_text(json.dumps(content))
    return f"{kind}: {said}, with valid checksums"


def _flip(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 5, 50])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


_BYTES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "flipped bits": _flip,
    "a cut": lambda draw, data: data[: draw.randrange(len(data))],
    "zeros": lambda draw, data: bytes(len(data)),
    "more bytes": lambda draw, data: data + draw.randbytes(9),
    "random bytes": lambda draw, data: draw.randbytes(draw.randrange(200)),
    "a hole": lambda draw, data: data[: (k := draw.randrange(len(data)))] + bytes(8) + data[k + 8 :],
    "deep nesting": lambda draw, data: b"[" * 100_000,
    "a large header": lambda draw, data: (2 ** draw.randrange(20, 63)).to_bytes(8, "little") + data[8:],
}


def _replace(draw: random.Random, state: dict[str, Any]) -> str:
    key = draw.choice([key for key in state if key != "rewinds"])  # a number that is possible cannot be refused
    state[key] = draw.choice([value for value in JUNK if value != state[key]])
    return f"{key} is {str(state[key])[:20]!r}"


def _drop(draw: random.Random, state: dict[str, Any]) -> str:
    return f"no {(key := draw.choice(list(state)))}{state.pop(key) and ''}"


def _inside(draw: random.Random, state: dict[str, Any]) -> str:
    table = state["identity"] if draw.random() < 0.5 else draw.choice(state["done"])
    key = draw.choice([*table, "new"])
    table[key] = draw.choice(JUNK)
    return f"{key} is {str(table[key])[:20]!r}"


def _extra(draw: random.Random, state: dict[str, Any]) -> str:
    state["extra"] = draw.choice(JUNK)
    return "one more key"


_STATES: dict[str, Callable[[random.Random, dict[str, Any]], str]] = {
    "a value": _replace,
    "a missing key": _drop,
    "a value inside": _inside,
    "an extra key": _extra,
}


def _one(change: Callable[[random.Random, Tensor], Tensor]) -> Callable[[random.Random, dict[str, Tensor]], str]:
    def changed(draw: random.Random, tensors: dict[str, Tensor]) -> str:
        name = draw.choice(sorted(tensors))
        tensors[name] = change(draw, tensors[name])
        return name

    return changed


def _rename(draw: random.Random, tensors: dict[str, Tensor]) -> str:
    name = draw.choice(sorted(tensors))
    tensors[draw.choice(["", "x", "net.", f"{name}x", name[1:], "optimizer.99.step", "average.z"])] = tensors.pop(
        name
    )
    return name


def _lose(draw: random.Random, tensors: dict[str, Tensor]) -> str:
    start = draw.choice([*sorted(tensors), "optimizer.", "optimizer.0", "average.", "net.", "tally."])
    for name in [name for name in tensors if name.startswith(start)]:
        del tensors[name]
    return start


def _add(draw: random.Random, tensors: dict[str, Tensor]) -> str:
    name = draw.choice(["z", "net.z", "average.z", "optimizer.z", "optimizer.0.z", "optimizer.-1.step", "tally.z"])
    tensors[name] = torch.ones(2)
    return name


def _poison(draw: random.Random, value: Tensor) -> Tensor:
    if value.is_floating_point() and value.numel():
        value.view(-1)[draw.randrange(value.numel())] = float(draw.choice(["nan", "inf", "-inf"]))
    return value


_TENSORS: dict[str, Callable[[random.Random, dict[str, Tensor]], str]] = {
    "a lost tensor": _lose,
    "a new tensor": _add,
    "another name": _rename,
    "another dtype": _one(lambda draw, v: v.to(draw.choice([kind for kind in DTYPES if kind != v.dtype]))),
    "another shape": _one(
        lambda draw, v: draw.choice([v[None], v.reshape(-1)[:0], torch.cat([v.reshape(-1)] * 2)])
    ),
    "NaN or infinity": _one(_poison),
}


def resume(path: Path) -> nn.Module:
    net = plain_network(seed=9)
    fit(net, images(32), images(20, "validation"), MADE, run=Run.open(path))
    return net


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: Any) -> tuple[Path, nn.Module]:
    """A run that stopped in its second epoch, and the network that it becomes."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    run = Run.create(path, MADE)
    fit(plain_network(), images(32), images(20, "validation"), MADE, run=run)
    shutil.rmtree(checkpoints(path / "checkpoints")[-1])
    assert len(checkpoints(path / "checkpoints")) == 2  # the best one, of the first epoch, and the newest
    shutil.copytree(path, path.with_name("copy"))
    return path, resume(path.with_name("copy"))


def outcome(path: Path, whole: nn.Module) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # which names the checkpoint that is skipped
        try:
            net = resume(path)
        except CheckpointError as error:
            return "refused" if len(str(error).splitlines()) == 1 else "refused in several lines"
    return "recovered" if same_weights(net, whole) else "changed"


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=pytest.mark.slow)])
def test_a_mutated_checkpoint_changes_no_weights(count: int, stopped: Any, tmp_path: Path) -> None:
    """A missing average was accepted and changed the weights; 38 forged files gave tracebacks."""
    seen: dict[str, int] = {}
    for number in range(count):
        path = tmp_path / str(number)
        shutil.copytree(stopped[0], path)
        change = mutate(checkpoints(path / "checkpoints")[-1], number)
        try:
            ended = outcome(path, stopped[1])
        except Exception as error:
            ended = repr(error)
        seen[ended] = seen.get(ended, 0) + 1
        assert ended in ("refused", "recovered"), f"mutation {number}, {change}: {ended}"
        shutil.rmtree(path)
    assert len(seen) == 2
    print(f"{count} mutations: {seen}")
