"""python tests/leaks.py [--steps N] [--out FILE]: memory growth of training steps by mode, on Linux."""

import argparse
import copy
import ctypes
import gc
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from banach import GMRES, JFB, Anderson, Broyden, Implicit, ImplicitNetwork, Neumann, NormalCG, Tolerance, Unroll
from banach.nn import Dropout
from banach.provenance import provenance, source_commit, write_json

LIMIT, WARM = 2**20, 1_000  # bytes; steps before the first measurement
_malloc_trim: Callable[[int], int] = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)  # glibc has it
LOOSE = Tolerance(atol=0, rtol=0.3, max_steps=20)
MODES: dict[str, Any] = {
    "jfb": JFB(),
    "neumann": Neumann(2),
    "unroll": Unroll(2),
    "unroll, checkpointed": Unroll(2, checkpoint=True),
    **{f"implicit, {type(m).__name__}": Implicit(m, LOOSE) for m in (NormalCG(), GMRES(), Anderson(), Broyden())},
}


class R(nn.Module):
    """Batch norm and dropout, so that a pass has buffers and masks to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), Dropout(0.1)

    def forward(self, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.drop(0.3 * torch.tanh(self.norm(self.linear(u) + v)))


@dataclass(frozen=True)
class Growth:
    """What some steps left behind: bytes of resident memory, in every window of them, and Python objects.

    `bytes` is the median window times their number. A leak grows in every window, an allocator or a cache once.
    """

    bytes: int
    total: int
    windows: list[int]
    objects: int
    seconds: float


def training_step(mode: Any) -> Callable[[], None]:
    """Return a function that does one step of training."""
    torch.manual_seed(0)
    tolerance = Tolerance(atol=1e-2, max_steps=20)
    net = ImplicitNetwork(nn.Linear(4, 8), R(), nn.Linear(8, 3), backward=copy.copy(mode), tolerance=tolerance)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x, y = torch.randn(16, 4), torch.arange(16) % 3

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def growth(step: Callable[[], None], steps: int, warm: int = WARM, windows: int = 1) -> Growth:
    """Return what `steps` steps leave behind, in so many windows, after `warm` others."""
    for _ in range(warm):
        step()
    gc.collect()
    # The list of objects takes megabytes, some of which the allocator keeps: count before the memory is read.
    objects, start = len(gc.get_objects()), time.perf_counter()
    resident = [_resident()]
    for _ in range(windows):
        for _ in range(steps // windows):
            step()
        gc.collect()
        resident.append(_resident())
    seconds = time.perf_counter() - start
    grown = [after - before for before, after in pairwise(resident)]
    return Growth(int(median(grown) * windows), sum(grown), grown, len(gc.get_objects()) - objects, seconds)


def _resident() -> int:
    """Return the bytes of resident memory, without those that the allocator keeps but nothing uses."""
    _malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    """Measure every mode and write a JSON file; return 1 if one grew by more than 1 MiB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("results/leaks.json"))
    chosen = parser.parse_args()
    source_commit()  # before anything is written, which would make the tree dirty
    torch.set_num_threads(1)
    found = {}
    for name, mode in MODES.items():
        found[name] = vars(growth(training_step(mode), chosen.steps, windows=10))
        print(name, found[name], flush=True)
    about = {"steps": chosen.steps, "warm": WARM}
    write_json(chosen.out, {"limit_bytes": LIMIT, "growth": found, **provenance(about)})
    return int(any(one["bytes"] > LIMIT for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
