"""Stacks of residual blocks through fused kernels: the same function and the same weights, in bf16."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from banach.kernels import has_triton, repeated_stack, residual_stack
from banach.kernels.known import says
from banach.network import ImplicitNetwork
from banach.nn.hooks import is_hooked


class FusedStack(nn.Module):
    """A Sequential of blocks x -> BN(LReLU(x + conv(drop(LReLU(conv(x)))))), in the place of that Sequential.

    The blocks are not its children but the network's own: their parameters get the gradients, and their mode is
    the network's. A traceless one is for iterations: no gradient, no update of statistics, and weights that are
    packed once, until `forget`.
    """

    def __init__(self, blocks: Sequence[nn.Module], *, traceless: bool = False) -> None:
        super().__init__()
        self.traceless = traceless
        self.blocks = list(blocks)  # a list, so that they stay out of parameters() and of copies
        self.repeated: Callable[[Tensor], Tensor] | None = None

    @torch.compiler.disable  # its kernels are launched as they are; what is around them is compiled
    def forward(self, x: Tensor) -> Tensor:
        if not self.traceless:
            return residual_stack(self.blocks, x)
        if self.repeated is None:
            self.repeated = repeated_stack(self.blocks, x)
        return self.repeated(x)

    def forget(self) -> None:
        """The weights may have changed."""
        self.repeated = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedStack:
        return FusedStack(self.blocks, traceless=self.traceless)


def can_fuse(part: Any) -> bool:
    """Are there stacks that the kernels know in this module, and kernels for it?"""
    if not isinstance(part, nn.Module) or not has_triton() or not torch.cuda.is_available():
        return False
    return any(map(_is_stack, part.modules()))


def with_fused_stacks(part: Any) -> Any:
    """The module with a `FusedStack` in the place of every stack; all else is the module's own."""
    if not isinstance(part, nn.Module):
        return part
    if _is_stack(part):
        return FusedStack(list(part.children()))
    own: dict[int, Any] = {id(tensor): tensor for tensor in (*part.parameters(), *part.buffers())}
    stacks = {id(module): FusedStack(list(module.children())) for module in part.modules() if _is_stack(module)}
    return copy.deepcopy(part, {**own, **stacks})


def fused_parts(net: ImplicitNetwork, *, whole: bool) -> tuple[Any, Any, Any]:
    """Q, R and S by fused stacks, where there are any and kernels for them.

    Not an R whose values tell the residual, where a solve is not made as a `whole`: the stacks keep values in
    bf16, whose rounding is above a tolerance of .1 in the paper's CIFAR-10 network.
    """
    tells = not whole and net.tolerance.max_steps > 0
    Q, R, S = (with_fused_stacks(part) if can_fuse(part) else part for part in (net.Q, net.R, net.S))
    return Q, net.R if tells else R, S


def wrapped(part: Any) -> Any:
    """A part compiled for shapes that stay: what is captured has one."""
    return torch.compile(part, dynamic=False)


def stacks_of(part: Any) -> list[FusedStack]:
    return (
        [module for module in part.modules() if isinstance(module, FusedStack)]
        if isinstance(part, nn.Module)
        else []
    )


def _is_fusable(block: Any) -> bool:
    """Is it a block whose class says so, the one that defines `forward`, with nothing changed about it?"""
    said = getattr(block, "fusable", False) and says(block, "fusable")
    return said and isinstance(block.norm, nn.BatchNorm2d) and not any(map(is_hooked, block.modules()))


def _is_stack(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Sequential)
        and len(module) > 0
        and not is_hooked(module)
        and all(_is_fusable(block) for block in module)
    )
