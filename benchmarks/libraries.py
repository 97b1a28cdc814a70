"""banach and TorchDEQ 0.1.0 behind one call: the same map, start, tolerance and memory for both.

TorchDEQ is called as its documentation says. Its solvers stop when the largest Euclidean residual of the batch is
below `tol`. An RMS tolerance becomes a Euclidean one by the square root of the latent's size.
"""

import importlib.util
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from banach import Anderson, Broyden, Picard, Solver, Tolerance, solve

ABSENT = "TorchDEQ is not installed, so its rows are missing: pip install 'torchdeq==0.1.0'"
NAMES = {"picard": "fixed_point_iter", "anderson": "anderson", "broyden": "broyden"}
SOLVERS: dict[str, Solver] = {"picard": Picard(), "anderson": Anderson(5), "broyden": Broyden(10)}

Map = Callable[..., Tensor]


def has_torchdeq() -> bool:
    return importlib.util.find_spec("torchdeq") is not None


def notes(*others: str) -> list[str]:
    """Return the notes of a benchmark, and that TorchDEQ is missing where it is."""
    return [*others] if has_torchdeq() else [ABSENT, *others]


@dataclass(frozen=True)
class Method:
    """One solver of one library: method(T, z0, inputs, rms=.., max_steps=..) -> (value, steps or None)."""

    library: str
    name: str
    key: str  # picard, anderson or broyden
    compact: bool = False
    check_every: int | None = None

    def __call__(
        self, T: Map, z0: Tensor, inputs: tuple[Tensor, ...] = (), *, rms: float, max_steps: int, rtol: float = 0.0
    ) -> tuple[Tensor, Tensor | None]:
        if self.library == "banach":
            tolerance = Tolerance(atol=rms, rtol=rtol, max_steps=max_steps, check_every=self.check_every)
            how: dict[str, Any] = {"inputs": inputs, "tolerance": tolerance, "compact": self.compact}
            found = solve(T, z0, SOLVERS[self.key], **how)
            return found.value, found.steps
        with torch.no_grad():
            find = torchdeq().solver.get_solver(NAMES[self.key])
            settings = {"max_iter": max_steps, "tol": euclidean(rms, z0), "stop_mode": "abs"}
            return find(lambda z: T(z, *inputs), z0, **settings)[0], None


_OURS = {"picard": "Picard", "anderson": "Anderson(5)", "broyden": "Broyden(10)"}
BANACH = {name: Method("banach", name, key) for key, name in _OURS.items()}


def methods() -> list[Method]:
    """Return the three solvers of banach and, if it is installed, of TorchDEQ with its default memory."""
    theirs = [Method("TorchDEQ", name, key) for key, name in NAMES.items()]
    return [*BANACH.values(), *(theirs if has_torchdeq() else [])]


def torchdeq_layer(*, solver: str, max_steps: int, tol: float, mode: str = "abs") -> Callable[..., Any]:
    """Return (T, z0, *inputs) -> z by TorchDEQ: its solve, then one recorded evaluation (one-step gradient)."""
    how = {"f_solver": NAMES[solver], "f_max_iter": max_steps, "f_tol": tol, "f_stop_mode": mode}
    deq = torchdeq().get_deq(core="indexing", ift=False, grad=1, **how).train()
    return lambda T, z0, *inputs: deq(lambda *z: T(*z, *inputs), z0)[0][-1]


def torchdeq() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its docstrings hold escapes that newer Pythons warn of
        import torchdeq
        import torchdeq.solver
    return torchdeq


def euclidean(rms: float, z: Tensor) -> float:
    """Return the Euclidean tolerance per sample that an RMS one stands for."""
    return rms * math.sqrt(max(z[0].numel(), 1))
