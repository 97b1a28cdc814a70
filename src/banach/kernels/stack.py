"""residual_stack: blocks x -> BN(LReLU(x + conv(mask * LReLU(conv(x))))), many times, by fused kernels in bf16.

A tensor of N images, H rows, W columns and C channels is stored as (N, H, W, pitch), pitch a multiple of 8: so
a pixel begins at a multiple of 16 bytes. The first three spare channels of an input hold ones. Their weights carry
what is added to a convolution: the bias, and the shift of a batch norm whose scale is in the weights. Zero padding
pads these ones too, so the shift is left out at the border, as it must be. Three, because a number of 24 bits is
three of 8. In a gradient of weights the row of ones is the sum over pixels, which the bias and the mean need.

Between two blocks the value before batch norm is stored with its statistics, and each reader normalises it, so
the normalised tensor is never written. The device code is in `stack_kernel.py`; `reference_stack` is the same in
plain PyTorch. No host sync happens here, so a whole step can be captured in a CUDA graph.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.kernels.blocks import check_blocks, gather, running_statistics
from banach.kernels.device import SideStream, constants, has_triton, multiprocessors, pixel_rows, power_of_two

SLOPE = 0.1  # of the leaky ReLUs below zero
STORED = torch.bfloat16  # type of what is stored and multiplied; sums are float32
ONES = 3  # spare channels that hold ones
LARGEST = 64 - ONES  # channels
SMALL = 256  # pixels of an image: with at most that many, marching down its columns is slower
SUM = {"CHUNK": 256, "num_warps": 8}  # sums of programs for batch norm: how many are added at a time
COLUMNS = 16  # channels whose sums one program adds, if it does nothing else
REDUCE = {"ROWS": 1, "CHUNK": 128, "num_warps": 4}  # rows and parts of a weight gradient that are added at a time
POINTWISE = 64  # pixels of a tile between convolutions
HIDDEN, JOIN, GATE, ADD = range(4)  # epilogues of a convolution, see `stack_kernel`


@dataclass(frozen=True)
class Layout:
    """Compile-time constants of the kernels, their K: sizes of images and packed weights, and of a tile."""

    channels: int
    pitch: int  # elements from one pixel to the next
    columns: int  # of a matrix product: the power of two that holds the pitch
    depth: int  # rows of packed weights for one row of a kernel: the power of two that holds 3 * pitch
    height: int = 0
    width: int = 0
    rows: int = POINTWISE  # pixels of a tile
    march: bool = False  # down the columns of the images, reading each row once

    @staticmethod
    def of(channels: int) -> Layout:
        pitch = -(-(channels + ONES) // 8) * 8
        return Layout(channels, pitch, max(16, power_of_two(pitch)), power_of_two(3 * pitch))


@dataclass(frozen=True)
class Tile:
    """`rows` pixels at a time by `warps` warps, `stages` tiles in flight, `places` programs per multiprocessor."""

    rows: int
    warps: int = 4
    stages: int = 2
    places: int = 1
    march: bool = False


@dataclass(frozen=True)
class Tiles:
    """The fastest tiles on an H200: convolutions of large and of small images, weight gradients, `enter`."""

    convolution: Tile = Tile(64, stages=3, places=2, march=True)
    small: Tile = Tile(64, stages=2)
    weights: Tile = Tile(64, warps=8, stages=4)
    entry: Tile = Tile(64, places=8)


TILES = Tiles()


@dataclass(frozen=True)
class Stack:
    """How a stack is computed. `known`: (layers, 3, columns) statistics to normalise by; None: those of the batch.

    `scale`: what dropout multiplies by where it keeps. It goes where a batch norm's scale goes, into the weights.
    """

    layout: Layout
    eps: float = 1e-5
    scale: float = 1.0
    known: Tensor | None = None


@dataclass(frozen=True)
class Packed:
    """Weights (2 layers, C, C, 3, 3) and biases: the second convolutions of all blocks, then the first ones.

    `folded`: the same as the kernels read them, with `stats`, statistics (layers + 1, 3, columns) of all blocks'
    inputs and of the last output: mean, 1 / sqrt(variance + eps), variance. `run` fills in those of a batch.
    """

    weights: Tensor
    biases: Tensor
    folded: Tensor
    stats: Tensor


def has_kernel(x: Tensor) -> bool:
    return x.is_cuda and has_triton() and x.dtype != torch.float64


def residual_stack(
    blocks: Sequence[nn.Module] | nn.Sequential,
    x: Tensor,
    *,
    masks: Tensor | None = None,
) -> Tensor:
    """Compute all blocks, one after the other, as the modules would, running statistics included.

    Args:
        blocks: modules with conv1, conv2 (3x3 with bias), drop (Dropout2d or Identity) and norm (BatchNorm2d
            without weights). On a GPU they are computed in bf16, elsewhere in the type of the weights.
        x: images (N, C, H, W).
        masks: (blocks, N, C), zero where dropped; drawn here if dropout is on and none are given.
    Raises:
        ValueError: if the kernels would compute the blocks wrongly.
    """
    given: list[Any] = list(blocks)
    rate = _check(given)
    if masks is None and rate:
        masks = torch.rand((len(given), *x.shape[:2]), device=x.device) >= rate
    scale = 1.0 if masks is None else 1 / (1 - rate)
    if not has_kernel(x):
        return reference_stack(given, x, masks, scale)
    stack = _stack_of(given, x, scale)
    parameters = _parameters(given)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *parameters)):
        out, stats = Residual.apply(stack, x, masks, *parameters)
    else:
        out, stats = _repeat(stack, x, masks, prepare(stack, parameters))
    if given[0].norm.training:
        _update_running_(given, stats[1:, :, : x.shape[1]], x.numel() // x.shape[1])
    return out


def repeated_stack(blocks: Sequence[nn.Module] | nn.Sequential, like: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the same map for an iteration without gradient: weights are packed once, running statistics stay.

    Valid until the weights change, for inputs of the device, type and channels of `like`.
    """
    given: list[Any] = list(blocks)
    if rate := _check(given):
        raise ValueError(f"expected blocks without dropout, got a rate of {rate}; call residual_stack with masks")
    if not has_kernel(like):
        copies = copy.deepcopy(given)
        return torch.no_grad()(lambda x: reference_stack(copies, x, None, 1.0, update=False))
    stack = _stack_of(given, like, 1.0)
    packed = prepare(stack, _parameters(given))
    return lambda x: _repeat(stack, x, None, packed)[0]


def reference_stack(
    blocks: Sequence[Any], x: Tensor, masks: Tensor | None, scale: float, *, update: bool = True
) -> Tensor:
    """Compute the blocks in plain PyTorch: what the kernels are compared with, and what runs without them."""
    dtype, x = x.dtype, x.to(blocks[0].conv1.weight.dtype)
    with torch.autocast(x.device.type, enabled=False):
        for number, block in enumerate(blocks):
            hidden = F.leaky_relu(block.conv1(x), SLOPE)
            if masks is not None:
                hidden = hidden * masks[number, :, :, None, None].to(hidden) * scale
            y, norm = F.leaky_relu(x + block.conv2(hidden), SLOPE), block.norm
            if update or not norm.training:
                x = norm(y)
            else:
                x = F.batch_norm(y, None, None, training=True, eps=norm.eps)
    return x.to(dtype)


def _check(blocks: Sequence[Any]) -> float:
    """Return the rate at which all blocks drop channels now; raise if the kernels cannot compute them."""
    check_blocks(blocks, LARGEST)
    for block in blocks:
        if not block.norm.track_running_stats or block.norm.momentum is None:
            raise ValueError(f"expected BatchNorm2d with running statistics, got {block.norm}; use the modules")
    drops = [block.drop for block in blocks]
    rates = {float(drop.p) if isinstance(drop, nn.Dropout2d) and drop.training else 0.0 for drop in drops}
    if len(rates) > 1 or 1.0 in rates:
        raise ValueError(f"expected one rate of dropout below 1, got {sorted(rates)}; call the blocks one by one")
    return rates.pop()


def _parameters(blocks: Sequence[Any]) -> list[Tensor]:
    """Return parameters in the order of `Packed`: second, then first convolutions; weights, then biases."""
    layers = [block.conv2 for block in blocks] + [block.conv1 for block in blocks]
    return [layer.weight for layer in layers] + [layer.bias for layer in layers]


def _stack_of(blocks: Sequence[Any], x: Tensor, scale: float) -> Stack:
    layout, known = Layout.of(x.shape[1]), None
    if not blocks[0].norm.training:
        known = _wide(torch.stack(running_statistics(blocks), 1), layout)
    return Stack(layout, blocks[0].norm.eps, scale, known)


def _wide(value: Tensor, layout: Layout) -> Tensor:
    return F.pad(value, (0, layout.columns - value.shape[-1]))


@torch.no_grad()
def _update_running_(blocks: Sequence[Any], stats: Tensor, count: int) -> None:
    """Update as nn.BatchNorm2d does in training: momentum, the unbiased variance, the number of batches."""
    norms = [block.norm for block in blocks]
    stats = stats.to(norms[0].running_mean.dtype)
    means, variances = list(stats[:, 0].unbind()), list((stats[:, 2] * (count / max(count - 1, 1))).unbind())
    torch._foreach_lerp_([norm.running_mean for norm in norms], means, norms[0].momentum)
    torch._foreach_lerp_([norm.running_var for norm in norms], variances, norms[0].momentum)
    torch._foreach_add_([norm.num_batches_tracked for norm in norms], 1)


class Residual(torch.autograd.Function):
    """`run` and `back` for autograd. Returns the output, and the statistics of each batch norm."""

    @staticmethod
    def forward(
        ctx: Any, stack: Stack, x: Tensor, masks: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        packed = prepare(stack, parameters)
        inputs: list[Tensor] = []
        hidden: list[Tensor] = []
        with torch.autocast(x.device.type, enabled=False):
            out = run(stack, x, masks, packed, (inputs, hidden))
        ctx.stack, ctx.dropped = stack, masks is not None
        ctx.channels_last = parameters[0].is_contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(packed.weights, packed.stats, *inputs, *hidden)
        ctx.mark_non_differentiable(packed.stats)
        return out, packed.stats

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("the fused blocks have first derivatives only; for create_graph use the modules")
        weights, stats, *kept = ctx.saved_tensors
        count = weights.shape[0] // 2 + 1
        with torch.autocast(weights.device.type, enabled=False):
            dx, dw, db = back(
                ctx.stack, gradients[0], weights, stats, (kept[:count], kept[count:]), dropped=ctx.dropped,
                channels_last=ctx.channels_last,
            )  # fmt: skip
        return None, dx, None, *dw, *db


def _repeat(stack: Stack, x: Tensor, masks: Tensor | None, packed: Packed) -> tuple[Tensor, Tensor]:
    """Run without a gradient, with weights that were packed before. Statistics are overwritten each time."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        return run(stack, x, masks, packed, None), packed.stats


def prepare(stack: Stack, parameters: Sequence[Tensor]) -> Packed:
    """Pack weights and biases, given in the order of `Packed`, as far as the statistics are known by now."""
    layers, of = len(parameters) // 4, stack.layout
    with torch.autocast(parameters[0].device.type, enabled=False):
        weights, biases = gather(parameters[: 2 * layers]), gather(parameters[2 * layers :])
        stats = torch.zeros((layers + 1, 3, of.columns), device=weights.device)
        stats[0, 1] = 1  # the first input is used as it is
        if stack.known is not None:
            stats[1:] = stack.known
        scaled = (stats[0] * stack.scale).expand(layers, -1, -1)
        known = torch.cat([scaled, stats[: 1 if stack.known is None else layers]])
        folded = _packed(stack, weights)
        _fold(stack, folded, known, (weights, biases), layers=len(known))
        return Packed(weights, biases, folded, stats)


def run(
    stack: Stack, x: Tensor, masks: Tensor | None, packed: Packed, record: tuple[list[Tensor], list[Tensor]] | None
) -> Tensor:
    """Compute all blocks. `record`: lists that get inputs and hidden values, for a backward pass."""
    layers, stats, folded = packed.weights.shape[0] // 2, packed.stats, packed.folded
    count, batch = x.shape[0] * x.shape[2] * x.shape[3], stack.known is None
    kept = None if masks is None else F.pad(masks.to(STORED), (0, stack.layout.pitch - x.shape[1]))
    y, _ = _enter(stack, x, None)
    if record:
        record[0].append(y)
    for layer in range(layers):
        mask, after = None if kept is None else kept[layer], layers + layer + 1
        hidden, _ = _convolve(stack, HIDDEN, y, folded[after - 1], mask=mask, drop=mask is not None)
        y, sums = _convolve(stack, JOIN, hidden, folded[layer], residual=y, stats=stats[layer], sums=batch)
        if batch:
            numbers = 1.0 / count, stack.eps
            if after < 2 * layers:
                following = packed.weights[after], packed.biases[after]
                _fold(stack, folded[after], stats[layer + 1], following, sums, numbers)
            else:
                _fold(stack, stats[layer + 1], stats[layer + 1], None, sums, numbers)
        if record:
            record[0].append(y)
            record[1].append(hidden)
    return _leave(stack, y, stats[layers], x.dtype)


def back(
    stack: Stack,
    g: Tensor,
    weights: Tensor,
    stats: Tensor,
    record: tuple[list[Tensor], list[Tensor]],
    *,
    dropped: bool,
    channels_last: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return gradients of x, of the weights (channels_last or not) and of the biases, in the order of `run`."""
    layers, batch, (inputs, hidden) = weights.shape[0] // 2, stack.known is None, record
    turned = _turn(stack, torch.cat([weights[:layers] * stack.scale, weights[layers:]]))
    scaled, count, dtype = stats[0] * stack.scale, g.shape[0] * g.shape[2] * g.shape[3], g.dtype
    dw: list[Tensor] = [weights] * (2 * layers)
    db: list[Tensor] = [weights] * (2 * layers)
    g, sums = _enter(stack, g, inputs[layers])
    side = SideStream(g.device)
    for layer in reversed(range(layers)):
        x, y, first = inputs[layer], inputs[layer + 1], layers + layer
        s = _unnormalise(stack, g, y, stats[layer + 1], sums if batch else None, count)
        a, _ = _convolve(stack, GATE, s, turned[layer], residual=hidden[layer], drop=dropped)
        gradients = functools.partial(
            _block_gradients, stack, scaled, stats[layer] if layer else None, channels_last
        )
        (dw[layer], db[layer]), (dw[first], db[first]) = side.run(gradients, hidden[layer], s, x, a)
        before = x if batch and layer else None
        g, sums = _convolve(stack, ADD, a, turned[first], residual=s, before=before, sums=before is not None)
    side.join()
    return _leave(stack, g, None, dtype), dw, db


def _block_gradients(
    stack: Stack, scaled: Tensor, stats: Tensor | None, channels_last: bool, *of: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return gradients of weight and bias of a block's second convolution, then of its first."""
    hidden, s, x, a = of
    return _weights(stack, hidden, s, scaled, channels_last), _weights(stack, x, a, stats, channels_last)


# The rest launches one kernel each. What a kernel does not read is still an argument: any tensor stands for it.


def _device() -> Any:
    """Return the device code, imported when it is first needed: it imports Triton."""
    from banach.kernels import stack_kernel

    return stack_kernel


def _enter(stack: Stack, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return images (N, C, H, W) as pixels with ones or, of a gradient, without ones, with its sums with y."""
    N, _, H, W = x.shape
    pixels, tile, of = N * H * W, TILES.entry, stack.layout
    if pixels * of.pitch >= 2**31:
        raise ValueError(f"a batch of {N} images of {H}x{W} is too large for one launch; use a smaller one")
    out = torch.empty((N, H, W, of.pitch), dtype=STORED, device=x.device)
    programs, gradient = _programs(pixels, tile, x.device), y is not None
    sums = torch.empty((programs if gradient else 0, 2, of.columns), device=x.device)
    K = constants(replace(of, rows=tile.rows))
    _device().enter[(programs,)](
        pixel_rows(x), out, out if y is None else y, sums if gradient else out, pixels, ONES=not gradient,
        SUMS=gradient, K=K,
    )  # fmt: skip
    return out, sums


def _leave(stack: Stack, x: Tensor, stats: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return pixels as images, normalised if there are statistics."""
    N, H, W, _ = x.shape
    out = torch.empty((N, H, W, stack.layout.channels), dtype=dtype, device=x.device)
    pixels, norm = N * H * W, stats is not None
    _device().leave[(-(-pixels // POINTWISE),)](
        x, out, out if stats is None else stats, pixels, NORM=norm, K=constants(stack.layout)
    )
    return out.permute(0, 3, 1, 2)


def _packed(stack: Stack, like: Tensor) -> Tensor:
    shape = len(like), 3, stack.layout.depth, stack.layout.columns
    return torch.zeros(shape, dtype=STORED, device=like.device)


def _turn(stack: Stack, w: Tensor) -> Tensor:
    """Return packed weights for the gradients of the layers' inputs."""
    out = _packed(stack, w)
    _device().turn[(9 * len(w),)](w, out, K=constants(stack.layout))
    return out


def _fold(
    stack: Stack,
    out: Tensor,
    stats: Tensor,
    layer: tuple[Tensor, Tensor] | None,
    sums: Tensor | None = None,
    numbers: tuple[float, float] = (1.0, 0.0),
    *,
    layers: int = 1,
) -> None:
    """Compute `stats` from sums of y and y^2, if given, then pack the weight and bias of `layer`, if given."""
    w, b = (stats, stats) if layer is None else layer
    _device().fold[(1 if layer is None else 9 * layers,)](
        w, b, stats, stats if sums is None else sums, out, 0 if sums is None else len(sums), *numbers,
        MEASURE=sums is not None, PACK=layer is not None, K=constants(stack.layout), **SUM,
    )  # fmt: skip


def _unnormalise(stack: Stack, g: Tensor, y: Tensor, stats: Tensor, sums: Tensor | None, count: int) -> Tensor:
    """Go from the gradient of normalised y to that of the sum inside the block; no sums: known statistics."""
    of, out = stack.layout, torch.empty_like(g)
    K, pixels = constants(of), g.shape[:3].numel()
    means = torch.empty((2, of.columns), device=g.device)
    if sums is None:
        means.zero_()
    else:
        grid = (of.columns // COLUMNS,)
        _device().average[grid](sums, stats, means, len(sums), 1.0 / count, COLUMNS=COLUMNS, K=K, **SUM)
    _device().unnormalise[(-(-pixels // POINTWISE),)](g, y, out, stats, means, pixels, SLOPE, K=K)
    return out


def _convolve(
    stack: Stack,
    what: int,
    x: Tensor,
    w: Tensor,
    *,
    residual: Tensor | None = None,
    before: Tensor | None = None,
    stats: Tensor | None = None,
    mask: Tensor | None = None,
    drop: bool = False,
    sums: bool = False,
) -> tuple[Tensor, Tensor]:
    """Convolve with packed weights, apply the epilogue `what`, and return the result with its sums, if wanted."""
    N, H, W, _ = x.shape
    tile = TILES.convolution if H * W > SMALL else TILES.small
    programs = _programs(N * W, tile, x.device, H) if tile.march else _programs(N * H * W, tile, x.device)
    out = torch.empty_like(x)
    total = torch.empty((programs if sums else 0, 2, stack.layout.columns), device=x.device)
    K = constants(replace(stack.layout, height=H, width=W, rows=tile.rows, march=tile.march))
    _device().convolve[(programs,)](
        x, w, out, x if residual is None else residual, x if before is None else before,
        w if stats is None else stats, w if mask is None else mask, total if sums else w, N, SLOPE,
        WHAT=what, DROP=drop, SUMS=sums, K=K, num_stages=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out, total


def _weights(
    stack: Stack, x: Tensor, g: Tensor, stats: Tensor | None, channels_last: bool
) -> tuple[Tensor, Tensor]:
    """Return gradients of a layer's weight and bias, from its input, not normalised, and its output's gradient."""
    N, H, W, _ = x.shape
    tile, of = TILES.weights, stack.layout
    programs = _programs(N * H * W, tile, x.device)
    parts = torch.empty((programs, 3, of.depth, of.columns), device=x.device)
    K = constants(replace(of, height=H, width=W, rows=tile.rows))
    _device().correlate[(programs,)](x, g, parts, N, K=K, num_stages=tile.stages, num_warps=tile.warps)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    dw = torch.empty((of.channels, of.channels, 3, 3), device=x.device, memory_format=memory_format)
    db = torch.empty(of.channels, device=x.device)
    _device().unfold[(9, -(-of.channels // REDUCE["ROWS"]))](
        parts, parts if stats is None else stats, dw, db, programs, NORM=stats is not None, LAST=channels_last,
        K=constants(of), **REDUCE,
    )  # fmt: skip
    return dw, db


def _programs(pixels: int, tile: Tile, device: torch.device, repeats: int = 1) -> int:
    """Return as many programs as there are places, or fewer, so that all have nearly the same number of tiles."""
    tiles = -(-pixels // tile.rows) * repeats
    rounds = -(-tiles // (multiprocessors(device) * tile.places))
    return -(-tiles // rounds)
