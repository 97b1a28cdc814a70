"""What layers with one mask per pass share: when they drop, and what they make of their mask."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from banach.nn.passes import Pass, draws_masks, running_pass

# Layers that were evaluated inside a pass.
_inside: weakref.WeakSet[Any] = weakref.WeakSet()


def pass_of(layer: Any) -> Pass | None:
    """Return the pass that holds the layer's mask; None outside a pass, and where the layer does not drop."""
    now = running_pass()
    if now is None:
        _refuse_recomputation(layer)
        return None
    if not layer.training or layer.p == 0:
        return None
    if not torch.compiler.is_compiling():
        _inside.add(layer)
    return now


def masked(x: Tensor, layer: Any, now: Pass, shape: torch.Size | None = None) -> Tensor:
    """Return x * m / (1 - p), m the layer's mask in this pass, of this shape (None: that of x)."""
    mask = now.mask(layer, x.shape if shape is None else shape, 1 - layer.p, x.device)
    # At p = 1 nothing is kept and the scale would be infinite.
    return torch.where(mask, x / (1 - layer.p) if layer.p < 1 else x, x.new_zeros(()))


def _refuse_recomputation(layer: Any) -> None:
    """A checkpoint inside R recomputes in the backward pass, where the mask is not known."""
    if torch.compiler.is_compiling() or not draws_masks(layer) or layer not in _inside:
        return
    if torch._C._current_graph_task_id() != -1:  # the backward pass is running
        raise RuntimeError(
            "dropout in R was recomputed outside its pass, by a checkpoint inside R, and has lost its mask: "
            "use Unroll(checkpoint=True) instead"
        )
