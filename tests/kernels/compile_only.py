"""Run as a program: compile the kernels for a GPU at the sizes of the paper's networks, without a GPU.

    python compile_only.py [CAPABILITY]      90 by default, a Hopper GPU; 80, 86, 89, 100, 120

Prints JSON: per kernel and version the registers of a thread, the bytes of its stack, which are spills, and the
bytes of shared memory of a program. Fails if a GPU of that capability has less shared memory. What Triton's
interpreter accepts may still not compile; this shows it before time on a GPU is spent.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from banach.kernels import host, invert, latent_solve, stack
from kernels import cases

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
Usage = dict[str, set[tuple[int, int, int]]]
CAPABILITY = int(sys.argv[1]) if len(sys.argv) > 1 else 90
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}[CAPABILITY] * 1024  # bytes that a program may use


class Absent:
    """In place of the driver of a GPU: what the compiler asks of it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)


def compile_instead_of_running(found: Usage) -> None:
    """Let every launch compile its kernel, once, and note what it needs."""
    launch = JITFunction.run
    driver.set_active(Absent())

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        made = launch(self, *arguments, grid=grid, warmup=True, **named)
        shared = made.metadata.shared
        assert shared <= SHARED, f"{self.fn.__name__} needs {shared} bytes of shared memory, there are {SHARED}"
        found.setdefault(self.fn.__name__, set()).add((*usage(made.asm["cubin"]), shared))
        return made

    JITFunction.run = compiled


def usage(binary: bytes) -> tuple[int, int]:
    """Return the registers of a thread and the bytes of its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = [str(TOOL), "--dump-resource-usage", file.name]
        said = subprocess.run(tool, capture_output=True, text=True, check=True)
    words = dict(word.split(":", 1) for word in said.stdout.split() if word.startswith(("REG:", "STACK:")))
    return int(words["REG"]), int(words["STACK"])


def main() -> None:
    found: Usage = {}
    host.shared_memory = lambda device: SHARED
    compile_instead_of_running(found)
    for n in (16, 32, 56, 100):
        invert(torch.eye(n, dtype=torch.complex64)[None])
    for size in (10, 40):
        x = torch.randn(100, 35, size, size, requires_grad=True)
        blocks, masks = list(cases.stack_of(2, dropout=0.25, train=True)), torch.rand(2, 100, 35) >= 0.25
        stack.fused_stack(blocks, x, masks, 4 / 3).float().sum().backward()
    for name, train in itertools.product(cases.NETWORKS, (True, False)):
        R, v = cases.network(name, train=train, batch=100)
        with torch.autocast("cpu", torch.bfloat16, enabled=name != "svhn"):
            latent_solve(R, v.to(memory_format=torch.channels_last), None, tolerance=cases.tolerance())
    print(json.dumps({name: sorted(versions) for name, versions in found.items()}))


if __name__ == "__main__":
    main()
