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
from kernels.cases import NETWORKS, network, tolerance

SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32", "int64": "i64", "int8": "i8"}
TYPES = {getattr(torch, name): f"*{short}" for name, short in SHORT.items()}


class Compiler:
    """In place of a kernel: compiles it for what it would have been launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.program = kernel, None

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self._compile

    def _compile(self, *arguments: Any, **settings: Any) -> None:
        names = self.kernel.arg_names
        constants = {name: value for name, value in settings.items() if name in names}
        options = {name: value for name, value in settings.items() if name not in names}
        signature, aligned = dict.fromkeys(names, "constexpr"), {}
        for place, (name, value) in enumerate(zip(names, arguments, strict=False)):
            if isinstance(value, Tensor):
                signature[name], aligned[(place,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
            else:
                signature[name] = "i32" if isinstance(value, int) else "fp32"
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=aligned)
        self.program = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def facts(program: Any) -> dict[str, float]:
    """Return shared memory, tensor-core products, registers and spilled bytes (-1: not known)."""
    found = {"shared": program.metadata.shared, "products": program.asm["ptx"].count("wgmma.mma_async")}
    usage, tool = None, Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if tool.exists():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(program.asm["cubin"])
            file.flush()
            command = [str(tool), "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return {**found, "registers": int(usage[1]) if usage else -1, "spilled": int(usage[2]) if usage else -1}


def launched(name: str, *, train: bool, dtype: torch.dtype) -> dict[str, float]:
    """Return facts about a launch of 100 programs, and the shared memory that was planned for it."""
    R, v = network(name, train=train)
    v = v[:1].expand(100, -1, -1, -1)
    latent_kernel.iterate = compiler = Compiler(ITERATE)
    latent.kernel_solve(latent.latent_map(R), v, None, tolerance(), dtype, programs=100)
    sizes, _ = latent.launch_of(v, train, dtype, programs=100)
    return {**facts(compiler.program), "asked": latent.shared_memory(sizes, dtype)}


if __name__ == "__main__":
    ITERATE, latent_kernel.pack = latent_kernel.iterate, Compiler(latent_kernel.pack)
    cases = itertools.product(NETWORKS, (True, False), (torch.float32, torch.bfloat16))
    found = {str(case): launched(case[0], train=case[1], dtype=case[2]) for case in cases}
    print(json.dumps(found))
