"""The one method a backward mode has, and checks that several modes share."""

import dis
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from banach.latent import Latent, Space, leaves
from banach.solve import Map
from banach.solve.context import is_functorch_wrapped_tensor, unwrap_derivatives

CHANGED = (
    "T gave another value in the backward pass than in the forward pass, so the gradient is wrong: what T reads, "
    "such as an attribute that the next turn of a loop overwrites, must not change in between; pass it in `inputs`"
)


class Mode(Protocol):
    """A way to differentiate at a fixed point. It never sees the solver.

    The exact gradient turns the cotangent g of z* into w = (I - J')^-1 g, J = dT/dz at z*, before it enters
    T's parameters; a mode is a way to get w, or something near it. No gradient reaches z_star itself.
    """

    def attach(self, T: Map, z_star: Latent, inputs: tuple[Any, ...] = (), *, coupled: bool = False) -> Latent:
        """Return T(z_star, *inputs) with a gradient for everything that T reads but z_star."""


class Unchanged:
    """Refuses tensors that were written to in place since this was made: the backward pass reads them again."""

    def __init__(self, tensors: Iterable[tuple[str, Any]], do: str) -> None:
        # Not others, such as sharded tensors, whose data is elsewhere; inference tensors count no writes. Wrappers
        # of torch.func count their own.
        plain = ((n, unwrap_derivatives(t)) for n, t in tensors if type(t) in (Tensor, nn.Parameter))
        self.do, self.counts = do, [(n, t, t._version) for n, t in plain if not t.is_inference()]

    def check(self) -> None:
        for name, tensor, count in self.counts:
            if tensor._version != count:
                what = f"{name} was changed in place between the forward and the backward pass"
                raise RuntimeError(f"{what}, which needs it as it was: {self.do}")


def as_of_now(T: Map) -> Map:
    """Return T for the backward pass: a plain function reads the variables around it as they are now.

    Of a variable in a loop, a lambda would read the last value. Variables that T assigns, such as a counter, it
    shares with the function that is returned. What other functions read that T calls is not kept.
    """
    if type(T) is not FunctionType or hasattr(T, "__wrapped__") or torch.compiler.is_compiling():
        return T
    code, around = T.__code__, T.__globals__
    used, own = _names(code)
    now = {name: around[name] for name in used & around.keys()}
    pairs = zip(code.co_freevars, T.__closure__ or (), strict=True)
    try:
        cells = tuple([cell if name in own else CellType(cell.cell_contents) for name, cell in pairs])
    except ValueError:  # a variable without a value
        return T

    def evaluate(*given: Any) -> Latent:
        earlier = FunctionType(code, {**around, **now}, None, T.__defaults__, cells)
        earlier.__kwdefaults__ = T.__kwdefaults__
        return earlier(*given)

    return T if now.keys() & own else evaluate


@lru_cache
def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the global names that a function and those inside it use, and names that they assign around it."""
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    used = {name for kind, name in steps if kind.endswith(("_GLOBAL", "_GLOBALS", "_NAME"))}  # not attributes
    own = {name for kind, name in steps if kind in ("STORE_DEREF", "STORE_GLOBAL")}
    for inner in (part for part in code.co_consts if isinstance(part, CodeType)):
        used, own = used | _names(inner)[0], own | _names(inner)[1]
    return used, own - {*code.co_cellvars}


def unchanged(T: Any, z_star: Latent, inputs: tuple[Any, ...]) -> Unchanged:
    """Watch what T reads in the backward pass, except for what a function closes over, which cannot be seen."""
    read: list[tuple[str, Any]] = []
    if not torch.compiler.is_compiling():
        read += ((f"an input of T ({n})", x) for n, x in enumerate(tree_leaves(inputs), 1))
        read += (("Solution.value", leaf) for leaf in leaves(z_star))
        own = T.named_parameters() if isinstance(T, nn.Module) else ()
        read += ((f"T's parameter {name}", p) for name, p in own if not is_lazy(p))
    return Unchanged(read, "call backward() before that, or change a copy")


def is_other(value: Latent, was: Latent, space: Space, eps: float) -> bool:
    """Return True if values of T differ by more than its rounding, `eps`. Syncs with the host."""
    before = space.rows(was)
    change = torch.linalg.vector_norm(space.rows(value) - before)
    return bool(change > min(1e3 * eps, 0.1) * torch.linalg.vector_norm(before))


def is_differentiated(parts: Sequence[Tensor]) -> bool:
    """Return True if a gradient is recorded here, or a tangent carried along, with grad mode or without."""
    recorded = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    # `requires_grad` does not show what an outer torch.func transform records.
    wrapped = not torch.compiler.is_compiling() and any(map(is_functorch_wrapped_tensor, parts))
    return recorded or wrapped or carries_tangent(parts)


def carries_tangent(parts: Sequence[Tensor]) -> bool:
    """Is this part of a forward-mode derivative? Also under no_grad."""
    return any(unpack_dual(part).tangent is not None for part in parts)
