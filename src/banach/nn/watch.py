"""Functional dropout in R: looked for in the first train-mode pass of every R, and refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from banach.solve.context import is_compiling

# Every R whose first pass in train mode drew nothing by a function. Later passes are not watched: that would cost
# about a microsecond for every operation of R.
_quiet: weakref.WeakSet[Any] = weakref.WeakSet()

# What drops at random, and the names of its arguments by place: only those up to the probability matter.
_PLAIN = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(_PLAIN, ("input", "p", "training")),
    torch.dropout: ("input", "p", "train"),
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p"),
    F.multi_head_attention_forward: (*map(str, range(10)), "dropout_p"),
}
_LAYER = "banach.nn.Dropout({p:g})"
_ATTENTION = f"banach.nn.scaled_dot_product_attention(q, k, v, dropout=layer) with layer = {_LAYER}"


class Watch(TorchFunctionMode):
    """Raises a RuntimeError, which says what to write instead, when a function drops at random.

    Such a function draws another mask at every evaluation, and nobody can hold the mask for it.
    """

    def __init__(self, R: Any) -> None:
        super().__init__()
        self.R = R

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            _quiet.add(self.R)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        p = _probability(func, args, kwargs)
        if p:
            name = getattr(func, "__name__", str(func))
            advice = (_LAYER if "dropout_p" not in _ARGUMENTS[func] else _ATTENTION).format(p=p)
            raise RuntimeError(
                f"R calls {name} with a dropout probability of {p:g}, which draws a new mask at every evaluation, "
                f"so there is no fixed point to find: make a layer in R's __init__ and use {advice}"
            )
        return func(*args, **kwargs)


def first_watch(R: Any) -> Watch | None:
    """Return the watch over the first train-mode pass of R.

    None for later passes, in eval mode, and where Dynamo compiles some of R, which would compile the watch too.
    """
    if torch.compiler.is_compiling():
        return None
    if isinstance(R, nn.Module):
        return Watch(R) if R.training and R not in _quiet and not is_compiled(R.modules()) else None
    plain = type(R) is FunctionType and not hasattr(R, "_torchdynamo_orig_callable")
    return Watch(R) if plain and R not in _quiet and not is_compiling() else None


def is_compiled(modules: Iterable[nn.Module]) -> bool:
    """Return True if Dynamo compiles one of these modules, or the code that calls this."""
    compiled = (type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) for m in modules)
    return any(compiled) or is_compiling()


def _probability(func: Any, args: Any, kwargs: Any) -> float:
    """The probability with which this call drops, 0 where it does not."""
    if func not in _ARGUMENTS:
        return 0.0
    given = {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs}
    drops = given.get("training", given.get("train", True))
    return given.get("p", given.get("dropout_p", 0.0)) if drops else 0.0
