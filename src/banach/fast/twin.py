"""R for the iteration alone: the same weights, and batch norm that leaves no trace."""

from __future__ import annotations

import copy

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from banach.fast.fuse import stacks_of
from banach.nn.passes import draws_masks


def has_traceless_twin(R: object) -> bool:
    """Can R be iterated by a twin? Not if it draws masks, or if train mode changes other buffers of it."""
    if not isinstance(R, nn.Module):
        return False
    norms = [module for module in R.modules() if isinstance(module, _BatchNorm)]
    known = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    changing = any(module.training for module in R.modules())
    others = changing and any(id(buffer) not in known for buffer in R.buffers())
    return not others and not any(draws_masks(module) for module in R.modules())


def traceless_twin(R: nn.Module) -> nn.Module:
    """A copy of R that shares its weights and buffers, in which train-mode batch norm keeps no statistics.

    Every evaluation of an iteration would otherwise copy the running statistics, to be thrown away.
    """
    shared = {id(tensor): tensor for tensor in (*R.parameters(), *R.buffers())}
    twin = copy.deepcopy(R, shared)
    for module in twin.modules():
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    for stack in stacks_of(twin):
        stack.traceless = True
    return twin
