"""Weights in bf16 for a step: cast once, not at every evaluation, and their gradients brought back at once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

# Layers whose weights autocast would cast at every call. Norms keep theirs in fp32, as autocast does.
_CAST = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class HalfWeights:
    """Copies of modules whose matrix weights are bf16, beside masters in fp32 that the optimizer changes.

    `refresh()` before a step casts the masters, `collect()` after its backward pass hands them the gradients: what
    autocast computes, in two kernels rather than two per weight and evaluation. Everything else is shared with
    the modules themselves: other parameters, and all buffers.
    """

    def __init__(self, modules: dict[str, Any]) -> None:
        masters = {id(p): p for module in modules.values() for p in _matrix_weights(module)}
        self.masters: list[Tensor] = list(masters.values())
        self.halves: list[Tensor] = [nn.Parameter(p.detach().bfloat16(), p.requires_grad) for p in self.masters]
        instead = dict(zip(masters, self.halves, strict=True))
        self.modules = {name: _with(module, instead) for name, module in modules.items()}

    @torch.no_grad()
    def refresh(self) -> None:
        """The halves are the masters, rounded; they carry no gradient yet."""
        if self.halves:  # torch refuses to copy nothing
            torch._foreach_copy_(self.halves, self.masters)
        for half in self.halves:
            half.grad = None

    @torch.no_grad()
    def collect(self) -> None:
        """The masters get the gradients of the halves, in fp32."""
        masters, gradients = [], []
        for p, half in zip(self.masters, self.halves, strict=True):
            if half.grad is not None:
                p.grad = torch.empty_like(p)
                masters.append(p.grad)
                gradients.append(half.grad)
        if masters:
            torch._foreach_copy_(masters, gradients)


def _matrix_weights(module: Any) -> list[nn.Parameter]:
    if not isinstance(module, nn.Module):
        return []
    layers = [layer for layer in module.modules() if isinstance(layer, _CAST)]
    return [p for layer in layers for p in layer.parameters(recurse=False) if p.dtype == torch.float32]


def _with(module: Any, instead: dict[int, Tensor]) -> Any:
    """The module with other weights in place of some; all else is the module's own."""
    if not isinstance(module, nn.Module):
        return module
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, {**shared, **instead})
