"""Is a module called as it is written? Hooks run other code with it."""

from __future__ import annotations

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
