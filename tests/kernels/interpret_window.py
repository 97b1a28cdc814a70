"""Run as a program: the convolution kernels on the CPU, in Triton's interpreter, against float64; prints JSON."""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from banach.kernels import conv2d, window, window_launch
from kernels.interpret_kernels import mend_index, mend_products
from kernels.window_cases import CASES, errors, made


def main() -> None:
    mend_index()
    mend_products()
    window.has_kernel = lambda x, weight: True
    # Several parts of several tiles each, so that sums go over both.
    window_launch.TILES = window_launch.WindowTiles(
        fewest=window_launch.WindowTile(16),
        few=window_launch.WindowTile(16),
        weights=window_launch.WindowTile(16),
        parts=27,
    )
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for case in CASES:
            inputs = made(case, dtype)
            found[f"{case}, {dtype}"] = errors(case, lambda *of, c=case: conv2d(*of, c.stride, c.padding), *inputs)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
