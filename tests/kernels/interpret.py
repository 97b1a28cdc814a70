"""Run as a program, `interpret.py KERNEL`: the kernels of a file in Triton's interpreter; prints JSON.

A separate program, since the interpreter is chosen before Triton is imported. It runs one program of a grid after
the other, and programs that wait for each other would wait for ever. So `Together` makes each of them a process.
"""

import json
import multiprocessing
import os
import sys
import warnings
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import Tensor

import banach.kernels
from banach import RMS, Anderson, Euclidean, Picard, Solution, Tolerance, solve
from banach.fast import iteration
from banach.fast.iteration import Iteration
from banach.kernels import host, inverse, latent, latent_kernel, latent_solve, stack, steps, window
from kernels import cases
from kernels.cases import tolerance

Differences = dict[str, float]


def repair_interpreter() -> None:
    """Let it use arrays of one element as integers with a new NumPy, and multiply bf16, which it holds as uint16.

    In Triton 3.9 a comparison of scalars has the type of its operands, and no mask takes it: int1 is right.
    Its programs are plain Python, where an integer % a constexpr is an error: constants stay integers.
    """
    host.constants = lambda record: record  # type: ignore[assignment]
    builder = interpreter.InterpreterBuilder
    patch, dot, binary = interpreter._patch_lang_tensor, builder.create_dot, builder.binary_op
    comparisons = (np.greater, np.greater_equal, np.less, np.less_equal, np.equal, np.not_equal)

    def patched(tensor: Any, *scope: Any) -> None:  # without a scope before Triton 3.6
        patch(tensor, *scope)
        (scope[0].set_attr if scope else setattr)(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def wide(value: Any) -> Any:
        if value.data.dtype != np.uint16:
            return value
        return interpreter.TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def binary_op(self: Any, a: Any, b: Any, op: Any) -> Any:
        made = binary(self, a, b, op)
        return interpreter.TensorHandle(made.data.astype(bool), tl.int1) if op in comparisons else made

    interpreter._patch_lang_tensor = patched
    builder.binary_op = binary_op
    builder.create_dot = lambda self, a, b, *others: dot(self, wide(a), wide(b), *others)


def stacks() -> dict[str, Differences]:
    """Two blocks of odd sizes, in training with dropout and in eval mode, against modules in float64."""
    return {
        "float32, train": _stack_errors(True, torch.float32),
        "float32, eval": _stack_errors(False, torch.float32),
        "float32, train, two images": _stack_errors(True, torch.float32, images=2),
        "bf16, train": _stack_errors(True, torch.bfloat16),
    }


def _stack_errors(train: bool, dtype: torch.dtype, images: int = 7) -> Differences:
    # 7 images of 3 columns are two columns of tiles for four programs, one of which has part of both.
    rate, shape, small = 0.25 if train else 0.0, (images, 35, 5, 3), {"rows": 16}
    stack.TILES = {"images": {"rows": 16, "per_multiprocessor": 2}, "weights": small, "enter": small}
    stack.STORED, blocks = dtype, cases.stack_of(2, dropout=rate, train=train)
    torch.manual_seed(1)
    x, cotangent = torch.randn(shape), torch.randn(shape)
    masks = torch.rand(2, shape[0], 35) >= rate if train else None
    scale = 1 / (1 - rate)
    got = cases.answer(blocks, x, lambda b, leaf: stack.fused_stack(b, leaf, masks, scale), cotangent)
    exact = cases.answer(
        blocks.double(), x.double(), lambda b, leaf: cases.modules(b, leaf, masks, scale), cotangent
    )
    return cases.worst(got, exact)


def windows() -> dict[str, float]:
    window.TILES |= {"fewest": 16, "few": 16, "weights": 16, "parts": 27}  # several parts of several tiles each
    dtypes = (torch.float32, torch.bfloat16)
    return {f"{case}, {dtype}": cases.worst_error(case, dtype) for dtype in dtypes for case in cases.CASES}


def inverses() -> dict[int, float]:
    inverse.LARGEST = 32  # 33 and 70 rows are cut into blocks
    return {n: cases.inverse_error(n, torch.device("cpu")) for n in (1, 16, 20, 33, 70)}


class Together:
    """In place of a kernel: each of its programs is a process, with memory that they share."""

    def __init__(self, kernel: Any, *, absent: int = 0) -> None:
        self.kernel, self.absent = kernel, absent

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **settings: Any) -> None:
            for argument in (*arguments, *settings.values()):
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
        # It would overwrite the others' results.
        interpreter.GridExecutor._restore_args_dst = lambda *ignored: None
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


def compare(R: Any, v: Tensor, z0: Tensor | None, stop: Tolerance, programs: int = 1, **tile: bool) -> Differences:
    """The kernel against the modules, in tiles of 16 pixels."""
    choose(programs, **tile)
    got = latent_solve(R, v, z0, tolerance=stop)
    return differences(got, cases.solve_by_modules(R, v, z0, tolerance=stop))


def choose(programs: int, **tile: bool) -> None:
    """Let a solve have so many programs and tiles of 16 pixels."""
    latent.tiled = lambda K, *sizes, **how: replace(K, rows=16, **tile)
    host.multiprocessors = lambda device: programs  # type: ignore[assignment]


def tiny_case(
    kind: str, stop: Tolerance, *, start: bool = False, programs: int = 1, channels: int = 16, **tile: bool
) -> Differences:
    """Two blocks of one kind: train or eval, those of CIFAR-10 if "late"; infinite inputs if "infinite"."""
    R, v = cases.tiny("late" in kind, train="train" in kind, batch=5 if programs > 1 else 3, channels=channels)
    z0 = torch.randn_like(v) if start else None
    return compare(R, v * float("inf") if "infinite" in kind else v, z0, stop, programs, **tile)


def with_large_weights(factor: float, **tile: bool) -> Differences:
    """Weights so large that iterates overflow or diverge: the first one is the best."""
    R, v = cases.tiny(False, train=False)
    with torch.no_grad():
        for weight in (p for p in R.parameters() if p.dim() == 4):
            weight.mul_(factor)
    return compare(R, v, torch.randn_like(v), tolerance(max_steps=9), **tile)


def of_size(size: float) -> Differences:
    """R(0, v) in two float16 parts, for a v whose largest number is given and an R that only multiplies."""
    R, v = cases.tiny(False, train=False)
    with torch.no_grad():
        for name, shift in R.state_dict().items():
            if name.endswith(("bias", "running_mean")):
                shift.zero_()
    return compare(R, v * (size / v.abs().max()), None, tolerance(max_steps=1), split=True)


def alone() -> Differences:
    """A program that waits in vain for another gives up, and says so."""
    R, v = cases.tiny(False, train=True)
    latent.SPINS = 20
    latent_kernel.iterate = Together(latent_kernel.iterate, absent=1)
    choose(programs=2)
    got = latent_solve(R, v, tolerance=tolerance())
    return {"first": float(got.steps[0]), "nan": float(got.value[:1].isnan().all()), "ok": float(got.converged[0])}


def latents() -> dict[str, Differences]:
    relative = tolerance(rtol=1e-3)
    found = {
        "train": tiny_case("train", tolerance()),
        "train, split, from z0": tiny_case("train", relative, split=True, start=True),
        "train, late, short": tiny_case("train, late", tolerance(RMS(), max_steps=3)),
        "eval, split": tiny_case("eval", tolerance(Euclidean()), split=True),
        "eval, late, from z0": tiny_case("eval, late", tolerance(rtol=1e-2), start=True),
        "eval, nine taps": tiny_case("eval", tolerance(max_steps=2), split=True, start=True, channels=48),
        "eval, weights kept": tiny_case("eval, late", tolerance(), keep=True),
        "eval, no steps": tiny_case("eval", tolerance(max_steps=0), start=True),
        "eval, diverges": with_large_weights(10.0),
        "eval, not finite": with_large_weights(1e3),
        "eval, too large": with_large_weights(1e3, split=True),
    }
    found |= {f"of size {size:g}": of_size(size) for size in (2e6, 3e5, 1e-3, 1e-6)}
    kernel = latent_kernel.iterate
    latent_kernel.iterate = Together(kernel)
    found |= {
        "three programs, train": tiny_case("train", tolerance(), start=True, programs=3),
        "a tile each, train": tiny_case("train", relative, split=True, programs=5),
        "two programs, train": tiny_case("train, late", tolerance(RMS(), rtol=1e-3), programs=2),
        "two programs, weights kept": tiny_case("train, late", tolerance(), start=True, programs=2, keep=True),
        "a tile each, weights kept": tiny_case("train", tolerance(), start=True, programs=5, keep=True),
        "two programs, eval": tiny_case("eval", tolerance(), programs=2),
        "two programs, infinite": tiny_case("train, infinite", tolerance(), start=True, programs=2),
    }
    latent_kernel.iterate = kernel
    return found | {"alone": alone()}


def picard_steps() -> list[float]:
    """Iterate nests of two tensors, halved batches among them, with a sample that diverges; in both ways."""
    errors, own_step = [], banach.kernels.picard_step
    for dtype, damping, norm, rtol in (
        (torch.float32, 0.0, RMS(), 1e-4),
        (torch.float64, 0.3, Euclidean(), 0.0),
        (torch.float32, 0.0, Euclidean(), 1e-3),
    ):
        v = torch.linspace(0.1, 0.9, 12, dtype=dtype)[:, None].repeat(1, 5)
        v[3] = 30.0
        pair = v, v[:, :3, None, None].repeat(1, 1, 2, 2).to(memory_format=torch.channels_last)
        stop = Tolerance(atol=1e-5, rtol=rtol, max_steps=25, norm=norm)
        start = tuple(map(torch.zeros_like, pair))

        def R(u: Any, v: Any) -> Any:
            return v[0] * u[0] + v[0], (v[1] * u[1]).contiguous() + 1

        found = []
        for banach.kernels.picard_step in (own_step, cases.plain_picard_step):
            found.append(Iteration(R, Picard(damping), stop)(start, pair))
        a, b = ([*one.value, one.residual, one.steps, one.converged, one.nonfinite] for one in found)
        pairs = zip(a, b, strict=True)  # relative: a sample that diverges is large
        gaps = ((x.double() - y.double()).abs() / (1 + y.double().abs()) for x, y in pairs)
        errors.append(max(float(gap.max()) for gap in gaps))
    return errors


def anderson_steps() -> list[float]:
    """Iterate a tensor by Anderson, in several settings, also where it falls back to Picard; in both ways."""
    errors = []
    draw = torch.Generator().manual_seed(0)
    A = torch.randn(9, 6, 6, generator=draw, dtype=torch.float64)
    A = 0.9 * A / torch.linalg.matrix_norm(A, 2)[:, None, None]
    A[4] *= 30
    v = torch.randn(9, 6, generator=draw, dtype=torch.float64)
    for solver, most, norm, rtol in (
        (Anderson(3), 30, RMS(), 0.0),
        (Anderson(5, damping=0.2, bound=float("inf")), 12, Euclidean(), 1e-4),
        (Anderson(1, bound=1.5, patience=3), 30, Euclidean(), 0.0),
    ):
        stop = Tolerance(atol=1e-6, rtol=rtol, max_steps=most, norm=norm)
        made, own = both_ways(A, v, solver, stop)
        pairs = [(made.value[own.converged], own.value[own.converged]), (made.steps, own.steps)]
        pairs += [(made.converged, own.converged), (made.residual * own.converged, own.residual * own.converged)]
        errors.append(max(float((x.double() - y.double()).abs().max()) for x, y in pairs))
    return errors


def both_ways(A: Tensor, v: Tensor, solver: Anderson, stop: Tolerance) -> tuple[Solution, Solution]:
    """Solve u = tanh(A u) + v by fused steps and by `solve`."""

    def R(u: Any, v: Any) -> Any:
        return torch.tanh((A[..., None] * u[:, None, :, None]).sum((2, 3))) + v  # what autocast leaves in fp32

    made: Any = Iteration(R, solver, stop)(torch.zeros_like(v), v)
    return made, solve(R, torch.zeros_like(v), solver, inputs=(v,), tolerance=stop)


def anderson_in_bf16() -> list[int]:
    """Keep differences in bf16; return the steps of the slowest sample, and those of `solve`."""
    draw = torch.Generator().manual_seed(1)
    A = torch.randn(9, 6, 6, generator=draw)
    A = 0.95 * (A + A.mT) / torch.linalg.matrix_norm(A + A.mT, 2)[:, None, None]
    v = torch.randn(9, 6, generator=draw)
    stop = Tolerance(atol=1e-4, max_steps=60, norm=Euclidean())
    with torch.autocast("cpu", torch.bfloat16):
        made, own = both_ways(A, v, Anderson(5), stop)
    assert bool(made.converged.all() and own.converged.all())
    assert float((made.value - own.value).abs().max()) < 5e-3
    return [int(made.steps.max()), int(own.steps.max())]


def all_steps() -> dict[str, Any]:
    """Fused steps of Picard and Anderson against plain torch, by many programs per sample."""
    iteration.LARGE = 1
    steps._BLOCK = steps._PRODUCTS = steps._MIX = 2
    return {"errors": picard_steps() + anderson_steps(), "bf16": anderson_in_bf16()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of what overflows on purpose
    repair_interpreter()
    named = {"inverse": inverses, "latent": latents, "stack": stacks, "steps": all_steps, "window": windows}
    print(json.dumps(named[sys.argv[1]]()))
