"""Layers that a plain function for R hides: what only a module can handle is refused there, not mishandled."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from banach.nn.dropout import draws_anew
from banach.nn.passes import uses_batch_statistics


def check_hidden(R: Any) -> None:
    """Refuse a function or bound method that calls train-mode batch norm or plain dropout.

    Only the buffers and masks of a module given as R itself can be kept for a pass.
    """
    if isinstance(R, nn.Module):
        return
    for module in _held(R):
        for layer in module.modules():
            mixes = uses_batch_statistics(layer) and not layer._modules  # the layer itself, not what holds it
            if layer.training and (mixes or draws_anew(layer)):
                raise RuntimeError(
                    f"R is a {type(R).__name__} that calls {type(layer).__name__} in train mode, which has to be "
                    "kept for a whole pass: give ImplicitNetwork the module itself as R"
                )


def _held(R: Any) -> Iterator[nn.Module]:
    """The modules that a bound method, a partial or a closure holds."""
    if isinstance(R, nn.Module):
        yield R
    elif isinstance(R, functools.partial):
        for part in (R.func, *R.args, *R.keywords.values()):
            yield from _held(part)
    else:
        owner = getattr(R, "__self__", None)
        cells = [cell.cell_contents for cell in getattr(R, "__closure__", None) or () if _is_filled(cell)]
        yield from (part for part in (owner, *cells) if isinstance(part, nn.Module))


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
