"""Run as a program: the kernel that solves for a latent, compiled for an H100 or H200 without one; prints JSON."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from banach.kernels import latent_launch
from banach.kernels.latent_form import latent_map
from kernels.latent_networks import form_of, network, stop_of

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
}


class Recorder:
    """In the place of a kernel: what it would have been launched with."""

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
    """Shared memory, products on tensor cores, registers and bytes of them that are spilled (-1: not known)."""
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
            text = subprocess.run(
                [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
        if usage:
            found["registers"], found["spilled"] = int(usage[1]), int(usage[2])
    return found


def launched(name: str, *, train: bool, dtype: torch.dtype) -> dict[str, float]:
    """What the compiler makes of a launch of 100 programs, and the shared memory that its tile was chosen for."""
    kernels = latent_launch.pack, latent_launch.iterate
    R, v = network(name, train=train)
    pack, iterate = Recorder(), Recorder()
    latent_launch.pack, latent_launch.iterate = pack, iterate
    v = v[:1].expand(100, -1, -1, -1)
    try:
        R_map = latent_map(R, form_of(R))
        latent_launch.kernel_latent_solve(R_map, v, None, stop_of(), dtype, programs=100)
    finally:
        latent_launch.pack, latent_launch.iterate = kernels
    compiled(kernels[0], pack)
    how = latent_launch.plan(v, train, dtype, None, 100)
    return {**facts(compiled(kernels[1], iterate)), "asked": how.sizes.shared(how.tile, dtype)}


def main(names: list[str]) -> None:
    found = {}
    for name, train, dtype in itertools.product(
        names or ["mnist", "svhn", "cifar10"], (True, False), (torch.float32, torch.bfloat16)
    ):
        mode = f"{name}, {'train' if train else 'eval'}, {dtype}"
        found[mode] = launched(name, train=train, dtype=dtype)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
