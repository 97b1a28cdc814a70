"""The two methods a solver has. A solver never evaluates T: it sees z and T(z) and proposes the next z."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from banach.latent import Latent

Map = Callable[..., Latent]  # T: called as T(z, *inputs)

# What a solver remembers: tensors whose first axis is the sample, so that samples can leave the batch.
Memory = tuple[Tensor, ...]


class Point(NamedTuple):
    """One evaluation, one row per sample: all that a solver sees."""

    step: int  # 1 for the first evaluation; in a captured or exported loop it repeats, and selects slots of memory
    z: Tensor  # (samples, width)
    Tz: Tensor  # T(z)
    r: Tensor  # T(z) - z
    residual: Tensor  # (samples,): norm of r, up to a constant factor
    least: Tensor  # (samples,): the least residual so far, this one included
    least_at: Tensor  # (samples,): the evaluation that gave it
    evaluation: int | Tensor  # how many evaluations of T there were, with this one; in such a loop a tensor


class Solver(Protocol):
    """An algorithm that turns evaluations of T into a sequence that converges to z = T(z).

    Rows are independent: what is proposed for one may not depend on another. Tensors in `Memory` may be
    written in place. `z` and `r` belong to the loop and stay as they are; `Tz` and the numbers of a sample may be
    overwritten by the next evaluation, so keep copies. What is proposed belongs to the loop too: a new tensor, or
    `Tz` itself. A solver with slots has an attribute `memory`, their number: a captured loop takes a whole cycle
    of them before it tests again. One with `steps_before_loop` takes so many steps one by one before that loop.
    """

    def start(self, z: Tensor) -> Memory:
        """Return the memory before the first evaluation."""

    def step(self, memory: Memory, at: Point) -> tuple[Tensor, Memory]:
        """Return the next z, and the memory that goes with it."""
