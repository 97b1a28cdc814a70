"""Run as a program, `interpret.py latent | stack | window`: kernels in Triton's interpreter; prints JSON.

A separate program, since the interpreter is chosen before Triton is imported. It runs one program of a grid after
the other, and programs that wait for each other would wait for ever. So `Together` makes each of them a process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import Tensor

from banach import Euclidean, Solution
from banach.kernels import conv2d, latent_kernel, residual_stack, stack, window
from banach.kernels import latent as host
from banach.kernels.latent import LatentMap, LatentTile, kernel_solve, latent_map, reference_solve
from banach.kernels.stack import Tile, Tiles
from banach.kernels.window import WindowTiles
from kernels.latent_networks import RMS, Tolerance, tiny, tolerance
from kernels.reference_blocks import answer, modules, stack_of, worst
from kernels.window_cases import CASES, errors, made

Differences = dict[str, float]


def repair_interpreter() -> None:
    """Let it use arrays of one element as integers with a new NumPy, and multiply bf16, which it holds as uint16.

    Its programs are plain Python, where an integer % a constexpr is an error: constants stay integers.
    """
    parts: list[Any] = [host, stack, window]
    for part in parts:
        part.constants = lambda record: record
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def wide(value: Any) -> Any:
        if value.data.dtype != np.uint16:
            return value
        return interpreter.TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *others: dot(self, wide(a), wide(b), *others)


def stacks() -> dict[str, Differences]:
    """Two blocks of odd sizes, in training with dropout and in eval mode, against modules in float64."""
    stack.has_kernel = lambda x: True
    march = Tile(16, places=2, march=True)
    return {
        "float32, in memory order, train": _stack_errors(True, Tile(16)),
        "float32, march, train": _stack_errors(True, march),
        "float32, march, eval": _stack_errors(False, march),
        "bf16, march, train": _stack_errors(True, march, torch.bfloat16),
    }


def _stack_errors(train: bool, tile: Tile, dtype: torch.dtype = torch.float32) -> Differences:
    # 7 images of 3 columns are two columns of tiles for four programs, one of which has part of both.
    rate, shape = 0.25 if train else 0.0, (7 if tile.march else 2, 35, 5, 3)
    stack.TILES, stack.STORED = Tiles(tile, tile, weights=Tile(16), entry=Tile(16)), dtype
    blocks = stack_of(2, dropout=rate, train=train)
    torch.manual_seed(1)
    x, cotangent = torch.randn(shape), torch.randn(shape)
    masks = torch.rand(2, shape[0], 35) >= rate if train else None
    got = answer(blocks, x, lambda b, leaf: residual_stack(b, leaf, masks=masks), cotangent)
    exact = answer(blocks.double(), x.double(), lambda b, leaf: modules(b, leaf, masks, 1 / (1 - rate)), cotangent)
    return worst(got, exact)


def windows() -> dict[str, Differences]:
    window.has_kernel = lambda x, weight: True
    window.TILES = WindowTiles(fewest=16, few=16, weights=16, parts=27)  # several parts of several tiles each
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for case in CASES:
            inputs = made(case, dtype)
            found[f"{case}, {dtype}"] = errors(case, lambda *of, c=case: conv2d(*of, c.stride, c.padding), *inputs)
    return found


class Together:
    """In place of a kernel: each of its programs is a process, with memory that they share."""

    def __init__(self, kernel: Any, *, absent: int = 0) -> None:
        self.kernel, self.absent = kernel, absent

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **settings: Any) -> None:
            for argument in arguments:
                if isinstance(argument, Tensor):
                    argument.share_memory_()
            fork = multiprocessing.get_context("fork")
            present = range(grid[0] - self.absent)
            started = [fork.Process(target=self._one, args=(pid, grid[0], arguments, settings)) for pid in present]
            for process in started:
                process.start()
            for process in started:
                process.join(120)
            assert [process.exitcode for process in started] == [0] * len(started)

        return launch

    def _one(self, pid: int, programs: int, arguments: Any, settings: Any) -> None:
        def constant(value: int) -> Any:
            return lambda self, axis: interpreter.TensorHandle(np.array([value], np.int32), tl.int32)

        interpreter.InterpreterBuilder.create_get_program_id = constant(pid)
        interpreter.InterpreterBuilder.create_get_num_programs = constant(programs)
        interpreter.GridExecutor._restore_args_dst = lambda *ignored: (
            None
        )  # it would overwrite the others' results
        self.kernel[(1,)](*arguments, **settings)


def differences(got: Solution, wanted: Solution) -> Differences:
    """Return relative differences of values and residuals, and how many steps and ends differ."""
    same = got.residual == wanted.residual  # infinite ones too
    ends = ("converged", "nonfinite", "diverged")
    return {
        "value": float((got.value - wanted.value).abs().max() / wanted.value.abs().max()),
        "residual": float(torch.where(same, 0, (got.residual - wanted.residual) / wanted.residual).abs().max()),
        "steps": float((got.steps != wanted.steps).sum()),
        "ends": float(sum((getattr(got, end) != getattr(wanted, end)).sum() for end in ends)),
        "least steps": float(wanted.steps.min()),
    }


def compare(
    late: bool,
    train: bool,
    stop: Tolerance,
    *,
    split: bool = False,
    start: bool = False,
    programs: int = 1,
    channels: int = 16,
    keep: bool = False,
) -> Differences:
    R, v = tiny(late, train=train, batch=5 if programs > 1 else 3, channels=channels)
    z0 = torch.randn_like(v) if start else None
    return against_reference(latent_map(R), v, z0, stop, LatentTile(rows=16, split=split, keep=keep), programs)


def against_reference(
    R: LatentMap, v: Tensor, z0: Tensor | None, stop: Tolerance, tile: LatentTile, programs: int = 1
) -> Differences:
    got = kernel_solve(R, v, z0, stop, torch.float32, tile=tile, programs=programs)
    return differences(got, reference_solve(R, v, z0, stop, torch.float32))


def with_large_weights(factor: float, *, split: bool = False) -> Differences:
    """Weights so large that iterates overflow or diverge: the first one is the best."""
    R, v = tiny(False, train=False)
    known = latent_map(R)
    known.weights.mul_(factor)
    return against_reference(known, v, torch.randn_like(v), tolerance(max_steps=9), LatentTile(16, split=split))


def of_size(size: float) -> Differences:
    """R(0, v) in two float16 parts, for a v whose largest number is given and an R that only multiplies."""
    R, v = tiny(False, train=False)
    known = latent_map(R)
    assert known.known is not None
    known.biases.zero_()
    known.known[0].zero_()  # the means
    return against_reference(known, v * (size / v.abs().max()), None, tolerance(max_steps=1), LatentTile(rows=16))


def alone() -> Differences:
    """A program that waits in vain for another gives up, and says so."""
    R, v = tiny(False, train=True)
    host.SPINS = 20
    latent_kernel.iterate = Together(latent_kernel.iterate, absent=1)
    got = kernel_solve(latent_map(R), v, None, tolerance(), torch.float32, tile=LatentTile(rows=16), programs=2)
    return {"first": float(got.steps[0]), "nan": float(got.value[:1].isnan().all()), "ok": float(got.converged[0])}


def latents() -> dict[str, Differences]:
    found = {
        "train": compare(False, True, tolerance()),
        "train, split, from z0": compare(False, True, tolerance(rtol=1e-3), split=True, start=True),
        "train, late, short": compare(True, True, tolerance(RMS(), max_steps=3)),
        "eval, split": compare(False, False, tolerance(Euclidean()), split=True),
        "eval, late, from z0": compare(True, False, tolerance(rtol=1e-2), start=True),
        "eval, nine taps": compare(False, False, tolerance(max_steps=2), split=True, start=True, channels=48),
        "eval, weights kept": compare(True, False, tolerance(), keep=True),
        "eval, no steps": compare(False, False, tolerance(max_steps=0), start=True),
        "eval, diverges": with_large_weights(10.0),
        "eval, not finite": with_large_weights(1e3),
        "eval, too large": with_large_weights(1e3, split=True),
    }
    found |= {f"of size {size:g}": of_size(size) for size in (2e6, 3e5, 1e-3, 1e-6)}
    kernel = latent_kernel.iterate
    latent_kernel.iterate = Together(kernel)
    found["three programs, train"] = compare(False, True, tolerance(), start=True, programs=3)
    found["a tile each, train"] = compare(False, True, tolerance(rtol=1e-3), split=True, programs=5)
    found["two programs, train"] = compare(True, True, tolerance(RMS(), rtol=1e-3), programs=2)
    found["two programs, weights kept"] = compare(True, True, tolerance(), start=True, programs=2, keep=True)
    found["a tile each, weights kept"] = compare(False, True, tolerance(), start=True, programs=5, keep=True)
    found["two programs, eval"] = compare(False, False, tolerance(), programs=2)
    latent_kernel.iterate = kernel
    found["alone"] = alone()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of what overflows on purpose
    repair_interpreter()
    print(json.dumps({"latent": latents, "stack": stacks, "window": windows}[sys.argv[1]]()))
