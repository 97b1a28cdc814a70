"""Is a module called as it is written? Hooks run other code with it."""

from __future__ import annotations

from torch import nn


def is_hooked(module: nn.Module) -> bool:
    """Return True if hooks of this module, or hooks of all modules, are called with it."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    of_all = nn.modules.module
    forward = of_all._global_forward_hooks or of_all._global_forward_pre_hooks
    return bool(forward or of_all._global_backward_hooks or of_all._global_backward_pre_hooks)
