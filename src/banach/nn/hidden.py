"""Layers that a plain function for R hides: what only a module can handle is refused there, not mishandled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from banach.backward.reads import held
from banach.nn.dropout import draws_anew
from banach.nn.passes import uses_batch_statistics


def check_hidden(R: Any) -> None:
    """Refuse a function, bound method or callable object that holds train-mode batch norm or plain dropout.

    Only the buffers and masks of a module given as R itself can be kept for a pass.
    """
    name = None if isinstance(R, nn.Module) else _hidden(R)
    if name is not None:
        raise RuntimeError(
            f"R is a {type(R).__name__} that calls {name} in train mode, which has to be kept for a whole pass: "
            "give ImplicitNetwork the module itself as R"
        )


@torch.compiler.assume_constant_result  # Dynamo cannot look into code; it guards the mode of layers that R calls
def _hidden(R: Any) -> str | None:
    """The name of a layer that only a module can handle, None where R holds none."""
    for _, module in held(R, "R"):
        for layer in module.modules() if isinstance(module, nn.Module) else ():
            mixes = uses_batch_statistics(layer) and not layer._modules  # the layer itself, not what holds it
            if layer.training and (mixes or draws_anew(layer)):
                return type(layer).__name__
    return None
