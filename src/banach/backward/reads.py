"""What a map reads besides its argument: found in closures and globals, and watched for writes."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn


class Reads:
    """Tensors that T reads besides z, and how often each had been written to: `check` refuses another count.

    The inputs, and what `held` finds of T. Of a module its parameters: buffers are its own to write to.
    """

    def __init__(self, T: Any, inputs: Any = ()) -> None:
        self.counts: list[tuple[str, Tensor, int]] = []
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            named = [("an input of T", leaf) for leaf in _tensors(inputs)]
            for name, tensor in (*named, *_held_tensors(T)):
                # A kind of its own, such as a sharded one, is kept by others; inference tensors are not counted.
                if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_inference():
                    self.counts.append((name, tensor, tensor._version))

    def leave_out_changed(self) -> None:
        """After an evaluation: what T itself writes to is its own matter."""
        self.counts = [one for one in self.counts if one[1]._version == one[2]]

    def check(self) -> None:
        for name, tensor, count in self.counts:
            if tensor._version != count:
                raise RuntimeError(
                    f"{name} was changed in place between the forward and the backward pass, which needs it as it "
                    "was: call backward() before that, or give T a copy"
                )


def _held_tensors(T: Any) -> Iterator[tuple[str, Tensor]]:
    for name, found in held(T, "T"):
        if isinstance(found, Tensor):
            yield f"the tensor {name} that T reads", found
        else:
            yield from ((f"the parameter {name}.{key} that T reads", p) for key, p in found.named_parameters())


def held(T: Any, name: str, seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Modules and tensors, with their names, in a function's cells, defaults and globals, and in what it calls.

    Likewise those of a partial, of a module's bound method, and among the attributes of a callable object.
    """
    seen = set() if seen is None else seen
    if id(T) in seen:
        return
    seen.add(id(T))
    if isinstance(T, (nn.Module, Tensor)):
        yield name, T
    for key, part in _parts_of(T):
        yield from held(part, key, seen)


def _parts_of(T: Any) -> Iterator[tuple[str, Any]]:
    """What T was made of, where that may be, or hold, a module or a tensor."""
    if isinstance(T, functools.partial):
        yield from ((type(part).__name__, part) for part in (T.func, *T.args))
        yield from T.keywords.items()
    elif isinstance(T, MethodType):
        if isinstance(T.__self__, nn.Module):  # the attributes of other objects may have nothing to do with T
            yield type(T.__self__).__name__, T.__self__
        yield from _parts_of(T.__func__)
    elif isinstance(T, FunctionType):
        cells = zip(T.__code__.co_freevars, T.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells if _is_filled(cell))
        defaults = (*(T.__defaults__ or ()), *(T.__kwdefaults__ or {}).values())
        yield from ((type(part).__name__, part) for part in defaults)
        for name in _globals_of(T.__code__):
            found = T.__globals__.get(name)
            near = isinstance(found, FunctionType) and found.__globals__ is T.__globals__
            if near or isinstance(found, (nn.Module, Tensor)):
                yield name, found
    elif callable(T) and not isinstance(T, (type, nn.Module, Tensor)):
        own = getattr(T, "__dict__", {}).items()
        yield from ((name, part) for name, part in own if isinstance(part, (nn.Module, Tensor)))
        call = inspect.getattr_static(type(T), "__call__", None)
        yield from _parts_of(call) if isinstance(call, FunctionType) else ()


@functools.lru_cache(maxsize=1024)
def _globals_of(code: CodeType) -> frozenset[str]:
    """The global names that it reads. Not `co_names`, in which the names of attributes stand too."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    inner = [_globals_of(part) for part in code.co_consts if isinstance(part, CodeType)]
    return frozenset(names).union(*inner)


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _tensors(nest: Any) -> list[Tensor]:
    """The tensors of what is perhaps no latent."""
    if isinstance(nest, (dict, tuple, list)):
        parts = nest.values() if isinstance(nest, dict) else nest
        return [leaf for part in parts for leaf in _tensors(part)]
    return [nest] if isinstance(nest, Tensor) else []
