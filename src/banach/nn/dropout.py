"""Dropout that keeps one mask per pass, so that the map that is iterated stays the same map."""

from __future__ import annotations

import dis
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from banach.nn.attention import MultiheadAttention
from banach.nn.layers import uses_batch_statistics
from banach.nn.passes import masked, pass_of


class _OneMask:
    """x * m / (1 - p), with m drawn once per pass; outside a pass like PyTorch's own.

    The mask belongs to the layer: called at two places in R, it drops the same entries at both, so give each
    place its own layer.
    """

    one_mask_per_pass = True
    p: float
    training: bool
    inplace: bool

    def forward(self, x: Tensor) -> Tensor:
        now = pass_of(self)
        if now is None:
            return super().forward(x)  # type: ignore[misc]
        return masked(x, self, now, self.shape(x))

    def shape(self, x: Tensor) -> torch.Size:
        return x.shape


class _OneMaskPerChannel(_OneMask):
    spatial: int

    def shape(self, x: Tensor) -> torch.Size:
        if x.dim() != self.spatial + 2:
            name, expected = type(self).__name__, self.spatial + 2
            raise ValueError(f"{name} inside R takes a batch of {expected} axes, got shape {tuple(x.shape)}")
        return torch.Size([*x.shape[:2], *[1] * self.spatial])


class Dropout(_OneMask, nn.Dropout):
    """`torch.nn.Dropout` with one mask per pass."""


class Dropout1d(_OneMaskPerChannel, nn.Dropout1d):
    """`torch.nn.Dropout1d` with one mask per pass."""

    spatial = 1


class Dropout2d(_OneMaskPerChannel, nn.Dropout2d):
    """`torch.nn.Dropout2d` with one mask per pass."""

    spatial = 2


class Dropout3d(_OneMaskPerChannel, nn.Dropout3d):
    """`torch.nn.Dropout3d` with one mask per pass."""

    spatial = 3


_TWINS: dict[type, type] = {
    nn.Dropout: Dropout,
    nn.Dropout1d: Dropout1d,
    nn.Dropout2d: Dropout2d,
    nn.Dropout3d: Dropout3d,
}
_ATTENTION = {
    True: "call banach.nn.convert_dropout(R)",
    False: "derive it from banach.nn.MultiheadAttention, or use banach.nn.scaled_dot_product_attention in it",
}


def convert_dropout(module: nn.Module) -> nn.Module:
    """Give every dropout layer and nn.MultiheadAttention in the module one mask per pass, in place.

    Reaches the layers inside nn.TransformerEncoderLayer and other containers. Weights, hooks and state_dict stay
    as they are. Subclasses of the layers are left alone, since their forward is not known.

    Returns:
        The module; if it is itself a dropout layer, the layer that replaces it.
    """
    if type(module) is nn.MultiheadAttention:
        module.__class__ = MultiheadAttention  # the same object: its weights may be shared, or in an optimizer
        return module
    if type(module) in _TWINS:
        twin = _TWINS[type(module)](module.p, module.inplace)
        return twin.train(module.training)
    for name, child in module._modules.items():  # not named_children(), which names a shared layer only once
        if child is not None:
            module._modules[name] = convert_dropout(child)
    return module


def check_dropout(R: Any, modules: list[nn.Module] | None = None) -> None:
    """Refuse a train-mode layer in R that draws at random at every evaluation. `modules`: those of R, if known.

    Of a plain function also batch norm: only the buffers and masks of a module can be kept for a pass.
    """
    if not isinstance(R, nn.Module):
        if (hidden := _hidden_layer(R)) is not None:
            raise RuntimeError(
                f"R is a {type(R).__name__} that calls {hidden} in train mode, which has to be kept for a whole "
                "pass: give ImplicitNetwork the module itself as R"
            )
        return
    if not any(module.training and draws_at_random(module) for module in modules or R.modules()):
        return
    for name, module in R.named_modules():
        advice = _advice(module) if module.training else None
        if advice is not None:
            place = f"R.{name}" if name else "R"
            raise RuntimeError(
                f"{place} is {type(module).__name__}, which draws new random numbers at every evaluation, so "
                f"there is no fixed point to find: {advice}"
            )


def _hidden_layer(R: Any) -> str | None:
    """Return the name of a layer that only a module can handle, None if the function reaches none."""
    for module in _reached(R):
        for layer in module.modules():
            mixes = uses_batch_statistics(layer) and not layer._modules  # the layer itself, not what holds it
            if layer.training and (mixes or draws_at_random(layer)):
                return type(layer).__name__
    return None


_hidden_layer._dynamo_marked_constant = True  # type: ignore[attr-defined]  # assume_constant_result, not imported


def _reached(R: Any) -> list[nn.Module]:
    """Return the modules that a callable reads: bound, in closures, as globals of its file, as attributes."""
    found: list[nn.Module] = []
    waiting, seen, home = [R], set(), getattr(getattr(R, "__func__", R), "__globals__", None)
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            found.append(one)
        elif isinstance(one, FunctionType):
            waiting += [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
            if home is None or one.__globals__ is home:  # functions of other files are not followed
                waiting += [one.__globals__.get(name) for name in _names(one.__code__)]
        elif isinstance(one, MethodType):
            waiting += [one.__func__, one.__self__, *getattr(one.__self__, "__dict__", {}).values()]
        elif isinstance(one, partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif one is R:
            waiting += [*getattr(R, "__dict__", {}).values(), type(R).__call__]
            home = getattr(type(R).__call__, "__globals__", None)
    return found


@lru_cache(maxsize=256)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the globals that the code, or code inside it, looks up."""
    here = [one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"]
    return (*here, *(name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part)))


def draws_at_random(module: nn.Module) -> bool:
    """Return True if this module draws random numbers at every evaluation in train mode."""
    return _advice(module) is not None


def _advice(module: nn.Module) -> str | None:
    """What to use instead of a module that draws at random, or None if it does not."""
    if isinstance(module, nn.modules.dropout._DropoutNd) and not isinstance(module, _OneMask) and module.p > 0:
        return "use banach.nn.Dropout, or banach.nn.convert_dropout(R)"
    if isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention):
        return _ATTENTION[type(module) is nn.MultiheadAttention] if module.dropout > 0 else None
    if isinstance(module, nn.RNNBase) and module.dropout > 0:
        return "set its dropout to 0, and put banach.nn.Dropout between modules of one layer each"
    if isinstance(module, nn.RReLU) and module.lower < module.upper:
        return "use nn.LeakyReLU"
    return None
