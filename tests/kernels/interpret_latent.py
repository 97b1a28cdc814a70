"""Run as a program: the kernel that solves for a latent in Triton's interpreter, against plain torch; prints JSON.

The interpreter runs one program after the other, and programs that wait for each other would wait for ever. So
several of them are several processes here, with memory that they share.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.runtime.interpreter as interpreter
from torch import Tensor

from banach.kernels import latent_launch
from banach.kernels.latent_form import LatentMap, Solved, Stop, latent_map
from banach.kernels.latent_launch import kernel_latent_solve
from banach.kernels.latent_plain import plain_latent_solve
from banach.kernels.latent_tiles import LatentTile
from kernels.interpret_kernels import mend_index, mend_products
from kernels.latent_networks import form_of, stop_of, tiny


class Together:
    """In the place of a kernel: each of its programs is a process."""

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
        builder = interpreter.InterpreterBuilder
        number = interpreter.TensorHandle
        integer = interpreter.tl.int32
        builder.create_get_program_id = lambda self, axis: number(
            interpreter.np.array([pid], interpreter.np.int32), integer
        )
        builder.create_get_num_programs = lambda self, axis: number(
            interpreter.np.array([programs], interpreter.np.int32), integer
        )
        interpreter.GridExecutor._restore_args_dst = lambda *ignored: None  # it would write over the others
        self.kernel[(1,)](*arguments, **settings)


def differences(got: Solved, wanted: Solved) -> dict[str, float]:
    """Of values and residuals, relative; and how many steps and ends differ."""
    same = got.residual == wanted.residual  # infinite ones too
    return {
        "value": float((got.value - wanted.value).abs().max() / wanted.value.abs().max()),
        "residual": float(torch.where(same, 0, (got.residual - wanted.residual) / wanted.residual).abs().max()),
        "steps": float((got.steps != wanted.steps).sum()),
        "ends": float((got.converged != wanted.converged).sum() + (got.nonfinite != wanted.nonfinite).sum()),
        "least steps": float(wanted.steps.min()),
    }


def solved(R: LatentMap, v: Tensor, z0: Tensor | None, stop: Stop, tile: LatentTile, programs: int) -> Solved:
    return kernel_latent_solve(R, v, z0, stop, torch.float32, tile=tile, programs=programs)


def compare(
    late: bool,
    train: bool,
    stop: Stop,
    *,
    split: bool,
    start: bool,
    programs: int = 1,
    channels: int = 16,
    keep: bool = False,
) -> dict[str, float]:
    R, v = tiny(late, train=train, batch=5 if programs > 1 else 3, channels=channels)
    R_map, z0 = latent_map(R, form_of(R)), torch.randn_like(v) if start else None
    got = solved(R_map, v, z0, stop, LatentTile(rows=16, split=split, keep=keep), programs)
    return differences(got, plain_latent_solve(R_map, v, z0, stop, torch.float32))


def with_a_nan(*, split: bool) -> dict[str, float]:
    """Weights so large that iterates overflow: the first one is the best."""
    R, v = tiny(False, train=False)
    R_map, z0, stop = latent_map(R, form_of(R)), torch.randn_like(v), stop_of(max_steps=9)
    R_map.weights.mul_(1e3)
    wanted = plain_latent_solve(R_map, v, z0, stop, torch.float32)
    assert bool(wanted.nonfinite.all())
    assert bool(wanted.residual.isfinite().all())
    return differences(solved(R_map, v, z0, stop, LatentTile(rows=16, split=split), 1), wanted)


def of_size(size: float) -> dict[str, float]:
    """R(0, v) in parts of 16 bits, for a v whose largest number is given and an R that only multiplies."""
    R, v = tiny(False, train=False)
    R_map, stop = latent_map(R, form_of(R)), stop_of(max_steps=1)
    assert R_map.known is not None
    R_map.biases.zero_()
    R_map.known[0].zero_()  # the means
    v = v * (size / v.abs().max())
    wanted = plain_latent_solve(R_map, v, None, stop, torch.float32)
    return differences(solved(R_map, v, None, stop, LatentTile(rows=16), 1), wanted)


def alone() -> dict[str, float]:
    """A program whose fellow never comes gives up, and says so."""
    R, v = tiny(False, train=True)
    latent_launch.SPINS = 20
    latent_launch.iterate = Together(latent_launch.iterate, absent=1)
    got = solved(latent_map(R, form_of(R)), v, None, stop_of(), LatentTile(rows=16), 2)
    return {"first": float(got.steps[0]), "nan": float(got.value[:1].isnan().all()), "ok": float(got.converged[0])}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of what overflows on purpose
    mend_index()
    mend_products()
    found = {
        "train": compare(False, True, stop_of(), split=False, start=False),
        "train, split, from z0": compare(False, True, stop_of(rtol=1e-3), split=True, start=True),
        "train, late, short": compare(True, True, stop_of("rms", max_steps=3), split=False, start=False),
        "eval, split": compare(False, False, stop_of("euclidean"), split=True, start=False),
        "eval, late, from z0": compare(True, False, stop_of(rtol=1e-2), split=False, start=True),
        "eval, nine taps": compare(False, False, stop_of(max_steps=2), split=True, start=True, channels=48),
        "eval, weights kept": compare(True, False, stop_of(), split=False, start=False, keep=True),
        "eval, none": compare(False, False, stop_of(max_steps=0), split=False, start=True),
        "eval, not finite": with_a_nan(split=False),
        "eval, too large": with_a_nan(split=True),
    }
    found |= {f"of size {size:g}": of_size(size) for size in (2e6, 3e5, 1e-3, 1e-6)}
    kernel = latent_launch.iterate
    latent_launch.iterate = Together(kernel)
    found["three programs, train"] = compare(False, True, stop_of(), split=False, start=True, programs=3)
    found["a tile each, train"] = compare(False, True, stop_of(rtol=1e-3), split=True, start=False, programs=5)
    found["two programs, train"] = compare(
        True, True, stop_of("rms", rtol=1e-3), split=False, start=False, programs=2
    )
    found["two programs, weights kept"] = compare(
        True, True, stop_of(), split=False, start=True, programs=2, keep=True
    )
    found["a tile each, weights kept"] = compare(
        False, True, stop_of(), split=False, start=True, programs=5, keep=True
    )
    found["two programs, eval"] = compare(False, False, stop_of(), split=False, start=False, programs=2)
    latent_launch.iterate = kernel
    found["alone"] = alone()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
