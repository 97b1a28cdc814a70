"""Counting what PyTorch is asked to do: kernels, allocations, host syncs, bytes alive."""

import warnings
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
_READS = {"cpu", "numpy", "tolist"}
# Not marked as a view, though it does no work.
_VIEWS = {"aten._unsafe_view.default"}


class Calls(TorchDispatchMode):
    """Counts aten calls except views, new tensors of at least `numel` entries and host syncs, while it is on.

    What runs inside a map wrapped by `without` is left out: that is the map's own cost.
    """

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.paused = numel, False
        self.kernels: Counter[str] = Counter()
        self.allocations: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self._reads = _Reads(self)

    def __enter__(self) -> "Calls":
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def without(self, T: Callable[..., Any]) -> Callable[..., Any]:
        """Return T, not counted."""

        def uncounted(*arguments: Any) -> Any:
            self.paused = True
            try:
                return T(*arguments)
            finally:
                self.paused = False

        return uncounted

    def totals(self) -> tuple[int, int, int]:
        """Return the numbers of kernels, of latent-sized allocations and of host syncs."""
        return self.kernels.total(), self.allocations.total(), self.syncs.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = str(func)
        if self.paused:
            return out
        self.syncs[name] += name in _SYNCS
        if not func.is_view and name not in _VIEWS:
            self.kernels[name] += 1
            made = _new_tensors(out, (args, kwargs))
            self.allocations[name] += sum(tensor.numel() >= self.numel for tensor in made)
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
    """Bytes of the tensors made while it is on: those still alive (`now`), and the most there ever were (`peak`).

    Counted by storage, in the backward pass too (on the CPU it runs in the same thread). Memory that a kernel
    takes and gives back inside one call is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _new_tensors(out, (args, kwargs)):
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


def host_syncs(action: Callable[[], object], device: torch.device) -> int:
    """Return how often an action makes the host wait for the device.

    On a GPU these are the operations that PyTorch's synchronisation debug mode warns of. On a CPU nothing waits:
    the reads that would wait on a GPU are counted.
    """
    if device.type != "cuda":
        with Calls(1) as calls:
            action()
        return calls.syncs.total()
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing" in str(one.message) for one in seen)


def tensors(tree: Any) -> Iterable[Tensor]:
    """Return the tensors in a tree of arguments."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _new_tensors(out: Any, arguments: Any) -> Iterable[Tensor]:
    """Return the tensors of `out` whose memory was not that of an argument."""
    before = {tensor.untyped_storage()._cdata for tensor in tensors(arguments)}
    return [tensor for tensor in tensors(out) if tensor.untyped_storage()._cdata not in before]
