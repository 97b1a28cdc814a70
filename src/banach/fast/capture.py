"""CUDA graphs: warm up a program, capture it, replay it. The one capture layer."""

import functools
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, compress, repeat, starmap
from operator import attrgetter, call, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from banach.kernels import invert, lacks
from banach.latent import leaves, map_leaves, outline
from banach.network import ImplicitNetwork
from banach.solve.context import loops_by
from banach.solve.device import loop_at_least_once

_BROKEN: "list[Recording]" = []  # captures that failed: the allocator may still point to them
WARM_UPS = 2  # runs before a capture: they create handles, plans, optimizer state and compiled kernels
# Backward passes run in this thread: a loop in one of them ends a capture, and only the thread that began it may.
_in_this_thread = functools.partial(torch.autograd.set_multithreading_enabled, False)


class Graphs:
    """Captured programs that share memory, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.side, self.stream = _streams(self.index)

    def warm_up(self, program: Callable[[], Any]) -> None:
        """Run the program on a side stream, which must precede a capture. Its loops sync with the host."""
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self.side), loops_by(loop_at_least_once, _inverse), _in_this_thread():
                for _ in range(WARM_UPS):
                    program()
        finally:  # the caller may now restore what it changed
            torch.cuda.current_stream(self.device).wait_stream(self.side)

    def capture(self, program: Callable[[], Any]) -> "Recording":
        """Record the kernels that the program launches, without running them, and what it returns."""
        recording, stream = Recording(self.pool), torch.cuda.current_stream(self.device)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        gc.collect()  # an autograd graph of the warm-up, kept alive by a cycle, would accumulate on its own stream
        collects = gc.isenabled()
        gc.disable()  # an old graph that it deletes during a capture would break the capture
        try:
            with torch.cuda.stream(self.stream), loops_by(recording.loop, _inverse), _in_this_thread():
                recording.begin()
                recording.result = program()
                recording.end()
        except BaseException:
            torch.cuda.set_stream(stream)  # a failed capture leaves its stream current
            self._clean_up(recording)
            raise
        finally:
            if collects:
                gc.enable()
        return recording

    def _clean_up(self, recording: "Recording") -> None:
        """Reset allocator and generator after a failed capture. Errors here cannot be repaired, so they pass."""
        _BROKEN.append(recording)
        with suppress(RuntimeError, IndexError), torch.cuda.stream(self.stream):
            recording.end()
        with suppress(RuntimeError, AttributeError):  # its pool still records
            torch._C._cuda_endAllocateToPool(self.index, self.pool)
        self.pool = torch.cuda.graph_pool_handle()
        # The generator stays in capture mode until a capture succeeds, and every dropout would fail.
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)


class Recording:
    """A captured program: CUDA graphs one after the other, cut at its loops, which are while nodes.

    So loops may be anywhere in the program, in the middle of a backward pass or in another loop too.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.parts: list[Any] = []  # CUDA graphs and while nodes of the innermost loop; the last one may be open
        self.depth = 0  # of the loop that is being captured
        self.result: Any = None  # of the program

    def replay(self) -> Any:
        """Launch all parts on the current stream, and return the result, which they overwrite."""
        for part in self.parts:
            part.replay()
        return self.result

    def begin(self) -> None:
        """Begin to capture a graph on the current stream."""
        self.parts.append(torch.cuda.CUDAGraph(keep_graph=True) if self.depth else torch.cuda.CUDAGraph())
        # Other threads, such as a progress bar, may call CUDA meanwhile: only this thread is restricted.
        self.parts[-1].capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """End the graph that is being captured."""
        with warnings.catch_warnings():  # between two loops there may be nothing
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            self.parts[-1].capture_end()

    def loop(self, body: Callable[[], None], active: Tensor, steps: Tensor, **limits: int) -> None:
        """Capture a loop, as `banach.solve.device.loop_eagerly` runs it."""
        self.end()
        outer, self.parts = self.parts, []
        self.depth += 1
        self.begin()
        body()
        self.end()
        self.depth -= 1
        from banach.fast.while_node import WhileNode  # here, where nothing is being captured

        node = WhileNode(self.parts, active, steps, **limits)
        if not self.depth:
            node.instantiate()
        self.parts = [*outer, node]
        self.begin()


class CapturedCalls:
    """Calls of a function of nests of tensors, each a CUDA graph that is captured at the first call with its key.

    A key is the structure and shapes of the inputs, whose batch is padded to the next power of two: one graph per
    batch size would be one per call. Results belong to the graph: the next call with the same key overwrites them.
    """

    def __init__(self) -> None:
        self._graphs: Graphs | None = None
        self._made: dict[Any, tuple[Any, Recording]] = {}

    def __call__(self, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """Return function(*given), whose rows beyond those of the inputs are to be ignored."""
        inputs = leaves(given)
        size = 1 << (len(inputs[0]) - 1).bit_length()
        key = (outline(given), size, *((x.shape[1:], x.dtype) for x in inputs))
        if key not in self._made:
            self._made[key] = self._capture(function, map_leaves(lambda x: pad_batch(x, size), given))
        buffers, recording = self._made[key]
        for buffer, x in zip(leaves(buffers), inputs, strict=True):
            buffer[: len(x)].copy_(x)
        return recording.replay()

    def _capture(self, function: Callable[..., Any], buffers: tuple[Any, ...]) -> tuple[Any, Recording]:
        device, program = leaves(buffers)[0].device, functools.partial(function, *buffers)
        self._graphs = self._graphs or Graphs(device)
        with torch.random.fork_rng([device]):
            self._graphs.warm_up(program)
            return buffers, self._graphs.capture(program)


def _inverse(M: Tensor) -> Tensor | None:
    """Return the inverses of matrices by a kernel, None for those that it does not know."""
    return invert(M) if M.is_cuda and M.dtype == torch.complex64 and not lacks(M.device) else None


@functools.cache  # cuBLAS keeps 32 MiB for every stream it used; in a capture it takes them from the graphs' pool
def _streams(index: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams of all warm-ups and of all captures on a device."""
    return torch.cuda.Stream(index), torch.cuda.Stream(index)


@contextmanager
def unchanged(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of the tensors after the block, a `with` statement.

    Args:
        tensors: such as `net.parameters()`.
    """
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


class HeldFixed:
    """What CUDA graphs of a network hold fixed: settings, modes, numbers, and tensors by their address.

    Numbers are float, bool and str attributes of modules, such as a step size. Integers may be counters of calls.
    `changed()` is asked before every replay: its loops are in C, which takes about half of the time.
    """

    def __init__(self, net: nn.Module, *, numbers: bool = True) -> None:
        self.modules = modules = list(net.modules())
        self.networks = [module for module in modules if isinstance(module, ImplicitNetwork)]
        self.places = [getattr(one, kind) for one in modules for kind in ("_modules", "_parameters", "_buffers")]
        self.parts = list(self._parts())  # held, so that an id belongs to one object
        tensors = [one for one in self.parts if isinstance(one, Tensor)]
        self.tensors = [one for one in tensors if _has_address(one)]
        self.others = [one for one in tensors if not _has_address(one)]
        self.attributes = [vars(one) for one in modules] if numbers else []
        plain, may_be = vars(nn.Module()), (float, int, str, type(None))  # None and an integer may become a number
        own = [(one.get, *item) for one in self.attributes for item in one.items() if item[0] not in plain]
        self.plain = [(get, name) for get, name, value in own if isinstance(value, may_be)]
        self.before = self._now()

    def changed(self) -> bool:
        """Return True if a replay would not see what the network is now."""
        return self._now() != self.before

    def _parts(self) -> Iterable[Any]:
        return chain.from_iterable(map(methodcaller("values"), self.places))  # TorchScript's are not dicts

    def _now(self) -> list[Any]:
        plain = list(starmap(call, self.plain))
        return [
            *map(id, self._parts()),
            *map(Tensor.data_ptr, self.tensors),
            *map(Tensor.stride, self.tensors),
            *map(attrgetter("shape", "dtype", "requires_grad"), self.tensors),
            *map(attrgetter("__class__", "requires_grad"), self.others),
            *map(attrgetter("training"), self.modules),
            *map(len, self.attributes),
            *map(isinstance, plain, repeat((int, float, str))),
            *compress(plain, map(isinstance, plain, repeat((float, bool, str)))),
            *map(attrgetter("Q", "R", "S", "start", "coupled", "solver", "tolerance", "backward"), self.networks),
        ]


def _has_address(tensor: Tensor) -> bool:
    """Return False for sparse tensors and those of lazy layers."""
    try:
        return bool(tensor.data_ptr() or True)
    except (RuntimeError, ValueError):
        return False


def reason_of(error: Exception) -> str:
    """Return why a program could not be captured, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def pad_batch(x: Tensor, size: int) -> Tensor:
    """Return x padded to `size` samples by copies of its first one. (Zeros could give NaN.)"""
    return torch.cat([x, *[x[:1]] * (size - len(x))])
