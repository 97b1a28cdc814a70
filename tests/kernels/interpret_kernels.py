"""Run as a program: the Triton kernels on the CPU, in Triton's interpreter, against float64; prints JSON.

A program of its own, since the interpreter is chosen before Triton is imported.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from banach.kernels import Layout, residual_stack
from banach.kernels.compare import compare
from banach.kernels.fused import Fused
from banach.kernels.tiles import Tile, Tiles
from kernels.reference_blocks import answer, modules, stack_of, worst

LIE, MARCH = Tile(16), Tile(16, places=2, march=True)
COLUMNS = (7, 5, 3)  # images, rows, columns: two columns of tiles for four programs, one of which has part of both


def fused(tile: Tile, dtype: torch.dtype) -> Fused:
    return Fused(Layout(35), dtype, tiles=Tiles(tile, tile, weights=Tile(16), entry=Tile(16)))


def mend_index() -> None:
    """The interpreter turns arrays of one element into integers, which new NumPy refuses."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def mend_products() -> None:
    """The interpreter holds bf16 as integers of 16 bits, and multiplies those."""
    original = interpreter.InterpreterBuilder.create_dot

    def wide(value: Any) -> Any:
        if value.data.dtype != np.uint16:
            return value
        return interpreter.TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def patched(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return original(self, wide(a), wide(b), *others)

    interpreter.InterpreterBuilder.create_dot = patched


def errors(train: bool) -> dict[str, float]:
    """Errors of two blocks, with dropout where they train, on small images of odd sizes."""
    rate = 0.25 if train else 0.0
    blocks = stack_of(2, dropout=rate, train=train)
    torch.manual_seed(1)
    x, cotangent = torch.randn(2, 35, 5, 3), torch.randn(2, 35, 5, 3)
    masks = torch.rand(2, 2, 35) >= rate if train else None
    ops = fused(MARCH, torch.float32)
    got = answer(blocks, x, lambda b, leaf: residual_stack(b, leaf, masks=masks, operations=ops), cotangent)
    exact = answer(blocks.double(), x.double(), lambda b, leaf: modules(b, leaf, masks, 1 / (1 - rate)), cotangent)
    return worst(got, exact)


def main() -> None:
    mend_index()
    mend_products()
    found = {
        "float32, a stack in training": errors(True),
        "float32, a stack in evaluation": errors(False),
        "float32, each as pixels lie": compare(fused(LIE, torch.float32), Layout(35), (3, 5, 3), "cpu"),
        "bf16, each in a march": compare(fused(MARCH, torch.bfloat16), Layout(35), COLUMNS, "cpu"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
