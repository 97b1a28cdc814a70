"""Run as a program: the kernel of `latent_solve`, compiled for an H100 or H200 without a GPU; prints JSON."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from banach.kernels import latent, latent_kernel
from kernels.latent_networks import NETWORKS, network, tolerance

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
}


class Recorder:
    """In place of a kernel: what it would have been launched with."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.settings: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **settings: Any) -> None:
            self.arguments, self.settings = arguments, settings

        return launch


def compiled(kernel: Any, launch: Recorder) -> Any:
    constants = {name: value for name, value in launch.settings.items() if name in kernel.arg_names}
    options = {name: value for name, value in launch.settings.items() if name not in constants}
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    aligned = {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, launch.arguments, strict=False)):
        if isinstance(value, Tensor):
            signature[name], aligned[(place,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def facts(program: Any) -> dict[str, float]:
    """Return shared memory, tensor-core products, registers and spilled bytes (-1: not known)."""
    found = {
        "shared": program.metadata.shared,
        "products": program.asm["ptx"].count("wgmma.mma_async"),
        "registers": -1,
        "spilled": -1,
    }
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if tool.exists():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(program.asm["cubin"])
            file.flush()
            command = [str(tool), "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
        if usage:
            found["registers"], found["spilled"] = int(usage[1]), int(usage[2])
    return found


def launched(name: str, *, train: bool, dtype: torch.dtype) -> dict[str, float]:
    """Return facts about a launch of 100 programs, and the shared memory that was planned for it."""
    R, v = network(name, train=train)
    v = v[:1].expand(100, -1, -1, -1)
    kernel, record = latent_kernel.iterate, Recorder()
    latent_kernel.iterate, latent_kernel.pack = record, Recorder()
    try:
        latent.kernel_solve(latent.latent_map(R), v, None, tolerance(), dtype, programs=100)
    finally:
        latent_kernel.iterate = kernel
    sizes, tile, _ = latent.plan(v, train, dtype, programs=100)
    return {**facts(compiled(kernel, record)), "asked": latent.shared_memory(sizes, tile, dtype)}


if __name__ == "__main__":
    cases = itertools.product(NETWORKS, (True, False), (torch.float32, torch.bfloat16))
    found = {str(case): launched(case[0], train=case[1], dtype=case[2]) for case in cases}
    print(json.dumps(found))
