"""A stack of residual blocks as one function: x -> BN(LReLU(x + conv(mask * LReLU(conv(x))))), many times.

Between two blocks the value before batch norm travels with its statistics, and each reader normalises for itself:
the normalised tensor is never written. Batch norm has no weights of its own here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from banach.kernels.beside import Beside
from banach.kernels.operations import Operations

Pair = tuple[Tensor, Tensor]  # a weight's gradient, a bias's


@dataclass(frozen=True)
class Stack:
    """How a stack is computed. `known`: (layers, 3, width) statistics to normalise by; None: those of the batch.

    `scale`: what dropout multiplies by where it keeps. It goes where a batch norm's scale goes, into the weights.
    """

    operations: Operations
    width: int
    eps: float = 1e-5
    scale: float = 1.0
    known: Tensor | None = None


@dataclass(frozen=True)
class Record:
    """What a backward pass needs: inputs and hidden values of all blocks, and the statistics of the inputs."""

    inputs: list[Tensor]
    hidden: list[Tensor]
    stats: Tensor


@dataclass(frozen=True)
class Packed:
    """Weights (2 layers, C, C, 3, 3) and biases: the second convolutions of all blocks, then the first ones.

    And the same as the kernels want them, with the statistics they were folded with; `run` fills in a batch's.
    """

    weights: Tensor
    biases: Tensor
    folded: Tensor
    stats: Tensor


def prepare(stack: Stack, parameters: Sequence[Tensor]) -> Packed:
    """From weights, then biases, in the order of `Packed`."""
    half = len(parameters) // 2
    with torch.autocast(parameters[0].device.type, enabled=False):
        weights, biases = gather(parameters[:half]), gather(parameters[half:])
        stats = _start(stack, half // 2, weights)
        return Packed(weights, biases, _pack(stack, weights, biases, stats), stats)


def run(stack: Stack, x: Tensor, masks: Tensor | None, packed: Packed, keep: bool) -> tuple[Tensor, Record]:
    """All blocks. keep: record what a backward pass needs."""
    ops, layers = stack.operations, packed.weights.shape[0] // 2
    count = x.shape[0] * x.shape[2] * x.shape[3]
    stats, folded = packed.stats, packed.folded
    kept = None if masks is None else ops.masks(masks)
    y = ops.enter(x)
    record = Record([y], [], stats)
    for layer in range(layers):
        hidden = ops.hidden(y, folded[layers + layer], None if kept is None else kept[layer])
        y, sums = ops.join(hidden, folded[layer], y, stats[layer], stack.known is None)
        after = layers + layer + 1
        if stack.known is None and after < 2 * layers:
            following = packed.weights[after], packed.biases[after]
            ops.measure_and_fold(sums, count, stack.eps, stats[layer + 1], following, folded[after])
        elif stack.known is None:
            ops.measure(sums, count, stack.eps, stats[layer + 1])
        if keep:
            record.inputs.append(y)
            record.hidden.append(hidden)
    return ops.leave(y, stats[layers], x.dtype), record


def back(
    stack: Stack, g: Tensor, dropped: bool, weights: Tensor, record: Record, *, channels_last: bool = False
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of x, of the weights, which lie in memory as asked, and of the biases, in the order of `run`."""
    ops, layers, batch = stack.operations, weights.shape[0] // 2, stack.known is None
    turned, stats = ops.turn(torch.cat([weights[:layers] * stack.scale, weights[layers:]])), record.stats
    plain = _scaled(stats[0], stack.scale)
    count, dtype = g.shape[0] * g.shape[2] * g.shape[3], g.dtype
    dw: list[Tensor] = [weights] * (2 * layers)
    db: list[Tensor] = [weights] * (2 * layers)
    g, sums = ops.enter_gradient(g, record.inputs[layers])
    beside, weigh = Beside(g.device), functools.partial(ops.weights, channels_last=channels_last)
    for layer in reversed(range(layers)):
        x, y = record.inputs[layer], record.inputs[layer + 1]
        hidden, before = record.hidden[layer], layers + layer
        s = ops.unnormalise(g, y, stats[layer + 1], sums if batch else None, count)
        a = ops.gate(s, turned[layer], hidden, dropped)
        behind = functools.partial(_gradients, weigh, plain, stats[layer] if layer else None)
        (dw[layer], db[layer]), (dw[before], db[before]) = beside.run(behind, hidden, s, x, a)
        g, sums = ops.add(a, turned[before], s, x if batch and layer else None)
    beside.join()
    return ops.leave(g, None, dtype), dw, db


def _gradients(
    weigh: Callable[..., Pair],
    plain: Tensor,
    stats: Tensor | None,
    hidden: Tensor,
    s: Tensor,
    x: Tensor,
    a: Tensor,
) -> tuple[Pair, Pair]:
    """Of the weights and biases of a block: its second convolution, then its first."""
    return weigh(hidden, s, plain), weigh(x, a, stats)


def _start(stack: Stack, layers: int, like: Tensor) -> Tensor:
    """Statistics of the inputs of all blocks, and of the last output: the first input is taken as it is."""
    stats = torch.zeros((layers + 1, 3, stack.width), dtype=like.dtype, device=like.device)
    stats[0, 1] = 1
    if stack.known is not None:
        stats[1:] = stack.known
    return stats


def _scaled(stats: Tensor, scale: float) -> Tensor:
    """Statistics of a value that is only to be multiplied."""
    return stats * scale


def _pack(stack: Stack, weights: Tensor, biases: Tensor, stats: Tensor) -> Tensor:
    """Packed weights of all convolutions, as far as their inputs' statistics are known by now."""
    layers = weights.shape[0] // 2
    known = stats[: 1 if stack.known is None else layers]
    plain = _scaled(stats[0], stack.scale).expand(layers, -1, -1)
    return stack.operations.fold(weights, biases, torch.cat([plain, known]))


def gather(parameters: Sequence[Tensor]) -> Tensor:
    """All of them in one tensor, in at least float32, laid out as the kernels read them."""
    together = torch.stack([parameter.detach() for parameter in parameters])
    return together.to(torch.promote_types(together.dtype, torch.float32)).contiguous()


class Residual(torch.autograd.Function):
    """`run` and `back` for autograd. Gives the output, and mean and variance of each batch norm."""

    @staticmethod
    def forward(
        ctx: Any, stack: Stack, x: Tensor, masks: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        packed = prepare(stack, parameters)
        with torch.autocast(x.device.type, enabled=False):
            out, record = run(stack, x, masks, packed, keep=True)
        ctx.stack, ctx.dropped = stack, masks is not None
        ctx.channels_last = parameters[0].is_contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(packed.weights, record.stats, *record.inputs, *record.hidden)
        ctx.mark_non_differentiable(record.stats)
        return out, record.stats

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused blocks have first derivatives only, and create_graph asks for more; use the modules"
            )
        weights, stats, *kept = ctx.saved_tensors
        inputs = weights.shape[0] // 2 + 1
        record = Record(kept[:inputs], kept[inputs:], stats)
        with torch.autocast(weights.device.type, enabled=False):
            dx, dw, db = back(
                ctx.stack, gradients[0], ctx.dropped, weights, record, channels_last=ctx.channels_last
            )
        return None, dx, None, *dw, *db


def apply(stack: Stack, x: Tensor, masks: Tensor | None, parameters: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Output and statistics (layers + 1, 3, width). Where no gradient is wanted, nothing is kept for one."""
    given = tuple(parameters)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *given)):
        out: tuple[Tensor, Tensor] = Residual.apply(stack, x, masks, *given)
        return out
    return repeat(stack, x, masks, prepare(stack, given))


def repeat(stack: Stack, x: Tensor, masks: Tensor | None, packed: Packed) -> tuple[Tensor, Tensor]:
    """The same without a gradient, for weights that were packed before. Statistics are overwritten each time."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        value, record = run(stack, x, masks, packed, keep=False)
    return value, record.stats


__all__ = ["Packed", "Record", "Residual", "Stack", "apply", "back", "prepare", "repeat", "run"]
