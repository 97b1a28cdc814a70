"""Inside of torch.func: the axes of vmap as plain axes, and tensors of a transform that is not running."""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, autograd
from torch._functorch import eager_transforms
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from banach.latent import Latent
from banach.solve import Map
from banach.solve.context import functorch, is_functorch_wrapped_tensor, unwrap_derivatives


@dataclass(frozen=True)
class Axes:
    """The vmaps that some tensors are in. What is mapped over becomes more rows of one plain matrix, and back."""

    levels: tuple[int, ...] = ()  # outermost vmap first
    sizes: tuple[int, ...] = ()

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> "Axes":
        found: dict[int, int] = {}
        for wrapper in _wrappers(tensors):
            if functorch.is_batchedtensor(wrapper):
                axis = functorch.maybe_get_bdim(wrapper)
                found[functorch.maybe_get_level(wrapper)] = functorch.get_unwrapped(wrapper).shape[axis]
        levels = tuple(sorted(found))
        return Axes(levels, tuple(found[level] for level in levels))

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def plain(self, rows: Tensor) -> Tensor:
        """One plain tensor, all that is mapped over along its first axis. It carries no derivative."""
        if not self.levels:
            return rows
        for level, size in reversed(tuple(zip(self.levels, self.sizes, strict=True))):
            rows = functorch._remove_batch_dim(unwrap_derivatives(rows), level, size, 0)
        return unwrap_derivatives(rows).flatten(0, len(self.levels))

    def mapped(self, rows: Tensor) -> Tensor:
        """What `plain` was given."""
        if not self.levels:
            return rows
        rows = rows.reshape(*self.sizes, len(rows) // self.count, *rows.shape[1:])
        rows = unwrap_derivatives(rows)  # inside grad every result is wrapped, also one without a derivative
        for level in self.levels:
            rows = functorch._add_batch_dim(rows, 0, level)
        return rows


def _wrappers(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors, and the tensors inside them, that a transform has wrapped."""
    for tensor in tensors:
        while is_functorch_wrapped_tensor(tensor):
            yield tensor
            tensor = functorch.get_unwrapped(tensor)


_ENDED = -2  # torch's number for a transform that has ended
# Calls by the pullback of a vjp inside T on values that T made: their transform has ended, too.
_PULLBACK = (autograd.grad, cast(Any, Tensor).requires_grad.__get__)


@contextmanager
def present(tensors: Iterable[Tensor]) -> "Iterator[Present]":
    """Let T be evaluated although these, and what it closes over, may be of transforms that are not running now.

    The derivative of an outer transform is computed while an inner one is set aside, or after it has ended: what T
    closes over is then seen without the inner one.
    """
    levels = [functorch.maybe_get_level(wrapper) for wrapper in _wrappers(tensors)]
    running = functorch.peek_interpreter_stack() if levels else None
    now = 0 if running is None else running.level()
    highest = max((now, *levels))
    with ExitStack() as stack:
        for _ in range(now, highest):  # new levels then get numbers that are not in use
            stack.enter_context(eager_transforms.grad_increment_nesting())
        yield Present(now, highest, needed=highest > now or _ENDED in levels)


class Present(TorchFunctionMode):
    """Every tensor as it is at level `now`; those above `highest` were made since."""

    def __init__(self, now: int, highest: int, *, needed: bool) -> None:
        super().__init__()
        self.now, self.highest, self.needed = now, highest, needed

    def seen_by(self, T: Map) -> Map:
        """T, called with what it closes over as it is at that level."""

        def seeing(*given: Any) -> Latent:
            with self:
                return T(*given)

        return seeing if self.needed else T

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen, kwargs = tree_map_only(Tensor, self.see, (args, kwargs or {}))
        return func(*(args if func in _PULLBACK else seen), **kwargs)

    def see(self, tensor: Tensor) -> Tensor:
        return unwrap_derivatives(tensor, lambda level: level == _ENDED or self.now < level <= self.highest)
