"""Is a module still what its class says? Only then may something else compute in its place."""

from __future__ import annotations

from typing import Any

from torch import nn

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def is_hooked(module: nn.Module) -> bool:
    """Return True if hooks of this module, or hooks of all modules, are called with it."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    return any(getattr(nn.modules.module, name, None) for name in _GLOBAL_HOOKS)


def says(part: Any, name: str) -> bool:
    """Is the class that defines `forward` the one that defines this? Or has the module itself been given it?"""
    if "forward" in vars(part):
        return False
    owners = [next((c for c in type(part).__mro__ if word in vars(c)), None) for word in ("forward", name)]
    return name in vars(part) or (owners[1] is not None and owners[0] is owners[1])
