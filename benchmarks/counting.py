"""Counting what PyTorch is asked to do: kernels, allocations, host syncs, bytes alive."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Reading a value on the host. `_linalg_check_errors` is how torch.linalg.solve looks at its error code.
_SYNCS = {"aten._local_scalar_dense.default", "aten._linalg_check_errors.default", "aten.equal.default"}
# On the CPU these reach no kernel, but on a GPU each of them waits for it.
_READS = {"cpu", "tolist"}
# Not marked as a view, though it does no work.
_VIEWS = {"aten._unsafe_view.default"}


class Calls(TorchDispatchMode):
    """Counts aten calls that are no views, and new tensors of at least `numel` entries, while it is on.

    What runs inside a map wrapped by `beside` is left out: that is the map's own cost.
    """

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.kernels: Counter[str] = Counter()
        self.allocations: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.paused = False
        self._reads = _Reads(self)

    def __enter__(self) -> Calls:
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def beside(self, T: Callable[..., Any]) -> Callable[..., Any]:
        """T, not counted."""

        def uncounted(*arguments: Any) -> Any:
            self.paused = True
            try:
                return T(*arguments)
            finally:
                self.paused = False

        return uncounted

    def totals(self) -> tuple[int, int, int]:
        """Kernels, latent-sized allocations, host syncs."""
        return self.kernels.total(), self.allocations.total(), self.syncs.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = str(func)
        if self.paused:
            return out
        if name in _SYNCS:
            self.syncs[name] += 1
        if not func.is_view and name not in _VIEWS:
            self.kernels[name] += 1
            self.allocations[name] += sum(
                new.numel() >= self.numel
                for new in new_tensors(out, {storage(t) for t in tensors((args, kwargs))})
            )
        return out


class _Reads(TorchFunctionMode):
    """Host reads that the dispatcher does not see on the CPU."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and not self.calls.paused:
            self.calls.syncs[name] += 1
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made while it is on that are still alive, and the most there ever were.

    Counted by storage, in the backward pass too (on the CPU it runs in the same thread). What a kernel
    takes and gives back inside one call is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {storage(tensor) for tensor in tensors((args, kwargs))}
        out = func(*args, **kwargs)
        for tensor in new_tensors(out, before):
            self._add(tensor.untyped_storage())
        return out

    def _add(self, made: torch.UntypedStorage) -> None:
        key, size = made._cdata, made.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.finalize(made, self._gone, key, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int, size: int) -> None:
        del self._alive[key]
        self.now -= size


def tensors(tree: Any) -> Iterable[Tensor]:
    """The tensors in a tree of arguments."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def storage(tensor: Tensor) -> int:
    """What two tensors share when they share memory."""
    return tensor.untyped_storage()._cdata


def new_tensors(out: Any, before: set[int]) -> Iterable[Tensor]:
    """The tensors of `out` whose memory was not that of an argument."""
    return (tensor for tensor in tensors(out) if storage(tensor) not in before)
