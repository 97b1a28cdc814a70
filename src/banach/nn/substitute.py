"""substitute(): a module with other tensors or layers in place of some, sharing everything else."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

M = TypeVar("M")


def substitute(module: M, instead: Mapping[Any, Any] | None = None) -> M:
    """Return a copy of the module's structure with some tensors or submodules replaced.

    Parameters, buffers and submodules that are keys of `instead` become its values, wherever they occur. All other
    tensors are shared with the original, so training one trains both. Other attributes are copied: a flag that is
    set on the copy does not change the original.

    Args:
        module: an `nn.Module`; anything else, such as a plain function, is returned unchanged.
        instead: replacements by original.
    Returns:
        The copy, or the replacement of the module itself.
    """
    if not isinstance(module, nn.Module):
        return module
    plain = (value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor))
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers(), *plain)}
    replaced = {id(old): new for old, new in (instead or {}).items()}
    return copy.deepcopy(module, {**shared, **replaced})
