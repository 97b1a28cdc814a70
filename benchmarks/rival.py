"""TorchDEQ 0.1.0, called as its own documentation says, on the same terms as banach.

Its solvers stop when the largest Euclidean residual of the batch is below `tol`; RMS residuals are turned
into that by the square root of the latent's size.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import torch
from torch import Tensor

ABSENT = "TorchDEQ is not installed, so its rows are missing: pip install 'torchdeq==0.1.0'"
NAMES = {"picard": "fixed_point_iter", "anderson": "anderson", "broyden": "broyden"}


def available() -> bool:
    return importlib.util.find_spec("torchdeq") is not None


def euclidean(rms: float, z: Tensor) -> float:
    """The Euclidean tolerance per sample that an RMS one stands for."""
    return rms * math.sqrt(max(z[0].numel(), 1))


def solve(
    T: Callable[[Tensor], Tensor],
    z0: Tensor,
    method: str,
    *,
    rms: float,
    max_steps: int,
    memory: int | None = None,
) -> Tensor:
    """TorchDEQ's solver alone: its best iterate. `memory=None` is its own default."""
    from torchdeq.solver import get_solver

    find = get_solver(NAMES[method])
    settings = {"max_iter": max_steps, "tol": euclidean(rms, z0), "stop_mode": "abs"}
    with torch.no_grad():
        found, _, _ = find(T, z0, **settings, **_memory(method, memory))
    return found


def layer(z0: Tensor, method: str, *, rms: float, max_steps: int) -> Callable[..., Tensor]:
    """`deq(T, z0)`: TorchDEQ's solve, then one recorded evaluation (its one-step gradient)."""
    from torchdeq import get_deq

    deq = get_deq(
        core="indexing",
        ift=False,
        grad=1,
        f_solver=NAMES[method],
        f_max_iter=max_steps,
        f_tol=euclidean(rms, z0),
        f_stop_mode="abs",
    )
    deq.train()
    return lambda T, start: deq(T, start)[0][-1]


def _memory(method: str, memory: int | None) -> dict[str, int]:
    if memory is None or method == "picard":
        return {}
    # Its Anderson counts raw iterates, one more than their differences. Its default 6 is banach's 5.
    return {"m": memory + 1} if method == "anderson" else {"LBFGS_thres": memory}
