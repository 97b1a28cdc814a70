"""latent_solve: u = R(u, v) by Picard's iteration in one kernel launch, for an R of the form `LatentForm`.

The device code is in `latent_kernel.py`. `reference_solve` does the same in plain PyTorch, by `banach.solve`. No
host sync happens here, so a solve can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.kernels.blocks import check_blocks, gather, running_statistics, says
from banach.kernels.device import constants, has_triton, multiprocessors, pixel_rows, power_of_two
from banach.nn.layers import is_hooked
from banach.solve import RMS, Euclidean, Picard, Solution, Tolerance, WorstPixel, solve

WIDEST = 64  # channels
MOST = 128  # programs per place that wait for each other: each of them adds the sums of all
MANY = 4  # images per multiprocessor, from which on it works on two at a time
SPINS = 1 << 21  # reads of the barrier's counter before a program gives up: a second or two


@dataclass(frozen=True)
class LatentForm:
    """R(u, v) = outer * (B_n o ... o B_1)(v + inner * u), all B of one kind.

    B(x) = BN(x + LReLU(y)) or, if `late`, BN(LReLU(x + y)), with y = conv2(LReLU(conv1(x))) and no weights in BN.
    `slope` is that of the first leaky ReLU below zero, `slope_after` that of the second. A network of this form
    has an attribute `latent_form`, and `blocks` with conv1, conv2, norm and an attribute `latent_block`. Both
    attributes must be defined in the class that defines `forward`.
    """

    inner: float = 1.0
    outer: float = 1.0
    slope: float = 0.1
    slope_after: float = 0.1
    late: bool = False


@dataclass(frozen=True, eq=False)
class LatentMap:
    """R as tensors: weights (2 blocks, C, C, 3, 3) and biases, in the order they are used.

    known: (2, blocks, C), mean and 1 / deviation to normalise by; None: those of the batch, which couple it.
    """

    form: LatentForm
    weights: Tensor
    biases: Tensor
    eps: float
    known: Tensor | None

    @property
    def blocks(self) -> int:
        return len(self.weights) // 2


def describe(R: Any) -> LatentForm | None:
    """Return the form of R if the kernel can compute R, else None."""
    form = getattr(R, "latent_form", None)
    if not isinstance(form, LatentForm) or not isinstance(R, nn.Module) or any(map(is_hooked, R.modules())):
        return None
    if not says(R, "latent_form") or not all(says(block, "latent_block") for block in getattr(R, "blocks", ())):
        return None
    try:
        latent_map(R, form)
    except ValueError:
        return None
    return form


def latent_map(R: Any, form: LatentForm | None = None) -> LatentMap:
    """Return R as tensors, in its current mode. R is not changed, and no gradient is recorded."""
    form = getattr(R, "latent_form", None) if form is None else form
    if form is None:
        raise ValueError(f"expected an R with a latent_form, got {type(R).__name__}; use banach.solve")
    blocks: list[Any] = list(R.blocks)
    check_blocks(blocks, WIDEST)
    layers = [layer for block in blocks for layer in (block.conv1, block.conv2)]
    with torch.no_grad(), torch.autocast(layers[0].weight.device.type, enabled=False):
        known = None if blocks[0].norm.training else torch.stack(running_statistics(blocks)[:2])
        weights, biases = gather([layer.weight for layer in layers]), gather([layer.bias for layer in layers])
        return LatentMap(form, weights, biases, blocks[0].norm.eps, known)


def latent_solve(
    R: Any,
    v: Tensor,
    z0: Tensor | None = None,
    *,
    tolerance: Tolerance | None = None,
    form: LatentForm | None = None,
    dtype: torch.dtype | None = None,
) -> Solution:
    """Find u = R(u, v) as `banach.solve` does with Picard, in one kernel launch on a GPU with Triton.

    In train mode the batch is normalised by its own statistics and stops as one; running statistics stay as they
    are. In eval mode every image stops on its own. On a GPU no sample is called stalled.

    Args:
        R: a module that `describe` knows, or a `LatentMap`.
        v: Q(d), (batch, channels, height, width).
        z0: starting latent, zeros if None.
        tolerance: its norm is RMS, Euclidean or WorstPixel.
        form: what R computes, if R does not say so.
        dtype: type of the numbers that convolutions multiply: autocast's if it is on, else the type of v. Iterates
            are float32. float32 products are made of float16 numbers: pixels above 10^6 and weights above 65,504
            count as not finite, and if all pixels are below 10^-3 digits are lost (four are left at 10^-6).
    Returns:
        Solution. If programs lost each other (two solves on a GPU without cooperative launch): NaN and -1 steps.
    Raises:
        ValueError: if R, the norm or a shape does not fit.
    """
    known = R if isinstance(R, LatentMap) else latent_map(R, form)
    tolerance = tolerance or Tolerance()
    dtype = _product_type(v) if dtype is None else dtype
    _check(known, v, z0, tolerance)
    with torch.no_grad(), torch.autocast(v.device.type, enabled=False):
        if v.is_cuda and has_triton() and v.dtype != torch.float64 and dtype in (torch.bfloat16, torch.float32):
            return kernel_solve(known, v, z0, tolerance, dtype)
        return reference_solve(known, v, z0, tolerance, dtype)


def _product_type(v: Tensor) -> torch.dtype:
    kind = v.device.type
    if torch.is_autocast_enabled(kind) and v.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return v.dtype


def _check(R: LatentMap, v: Tensor, z0: Tensor | None, tolerance: Tolerance) -> None:
    if v.dim() != 4 or v.shape[1] != R.weights.shape[1]:
        raise ValueError(f"v must be (batch, {R.weights.shape[1]}, height, width), got {tuple(v.shape)}; check Q")
    if z0 is not None and z0.shape != v.shape:
        raise ValueError(f"z0 must have the shape of v, {tuple(v.shape)}, got {tuple(z0.shape)}")
    if type(tolerance.norm) not in (RMS, Euclidean, WorstPixel):
        raise ValueError(f"expected the norm RMS, Euclidean or WorstPixel, got {tolerance.norm}; use banach.solve")


def reference_solve(
    R: LatentMap, v: Tensor, z0: Tensor | None, tolerance: Tolerance, dtype: torch.dtype
) -> Solution:
    """Solve in plain PyTorch: what the kernel is compared with, and what runs without it."""
    v = v.to(torch.promote_types(v.dtype, torch.float32)).contiguous(memory_format=torch.channels_last)
    z0 = torch.zeros_like(v) if z0 is None else z0.to(v)
    return solve(
        lambda z, v: evaluate(R, z, v, dtype),
        z0.contiguous(memory_format=torch.channels_last),
        Picard(),
        inputs=(v,),
        tolerance=tolerance,
        coupled=R.known is None,
    )


def evaluate(R: LatentMap, z: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Return R(z, v): convolutions multiply numbers of `dtype`, everything else has the type of z."""
    form = R.form
    x = v + form.inner * z
    for block in range(R.blocks):
        hidden = F.leaky_relu(_convolve(R, 2 * block, x, dtype), form.slope)
        y = _convolve(R, 2 * block + 1, hidden, dtype)
        y = F.leaky_relu(x + y, form.slope_after) if form.late else x + F.leaky_relu(y, form.slope_after)
        if R.known is None:
            mean = y.mean((0, 2, 3))
            rstd = ((y - mean[:, None, None]).square().mean((0, 2, 3)) + R.eps).rsqrt()
        else:
            mean, rstd = R.known[:, block].to(y.dtype)
        x = (y - mean[:, None, None]) * rstd[:, None, None]
    return form.outer * x


def _convolve(R: LatentMap, layer: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    exact, weight = x.dtype, R.weights[layer]
    return F.conv2d(x.to(dtype).to(exact), weight.to(dtype).to(exact), R.biases[layer].to(exact), padding=1)


@dataclass(frozen=True)
class LatentTile:
    """How a program works: `rows` pixels at a time by `warps` warps, `stages` loads of products in flight.

    places: programs per multiprocessor. split: multiply float32 as two float16 on tensor cores; else directly,
    far more slowly. near: load pixels in pieces that go through the L1 cache. keep: load the weights of a
    convolution once for all tiles, if there are three groups of them.
    """

    rows: int = 128
    warps: int = 8
    stages: int = 3
    places: int = 1
    split: bool = True
    near: bool = True
    keep: bool = False


@dataclass(frozen=True)
class Constants:
    """Compile-time constants of the kernel, its K: sizes of a latent, of the tiles, and which cases to compile."""

    channels: int
    height: int
    width: int
    pitch: int  # elements from one pixel to the next; a pixel begins at a multiple of 16 bytes
    columns: int  # power of two that holds the channels
    groups: int  # of weights: the 3 rows of a kernel or, if those are too deep for one product, its 9 taps
    depth: int  # of one group's product
    area: int  # elements of an image with its border, and of what a product reads beyond it
    blocks: int = 1
    rows: int = 128
    stages: int = 3
    chunk: int = 16  # power of two that holds the programs
    coupled: bool = False
    worst_pixel: bool = False
    relative: bool = False
    late: bool = False
    from_zero: bool = False
    near: bool = False
    split: bool = False
    keep: bool = False
    alone: bool = False  # each program has a single tile and keeps its values during a batch norm
    spins: int = SPINS


def sizes_of(channels: int, height: int, width: int) -> Constants:
    """Return the constants that follow from the shape of a latent."""
    pitch = -(-channels // 8) * 8
    groups = 3 if 3 * pitch <= 128 else 9
    depth = max(16, power_of_two(pitch * (9 // groups)))
    beyond = depth - pitch * (9 // groups)
    area = -(-((height + 2) * (width + 2) * pitch + beyond) // 64) * 64
    return Constants(channels, height, width, pitch, max(16, power_of_two(channels)), groups, depth, area)


def shared_memory(sizes: Constants, tile: LatentTile, dtype: torch.dtype) -> int:
    """Return the bytes of shared memory that a program needs: operands of the products in flight, or of all."""
    halves = 2 if dtype == torch.float32 and tile.split else 1
    products = sizes.groups if tile.keep else tile.stages
    return products * (tile.rows + sizes.columns) * sizes.depth * halves * _stored(tile, dtype).itemsize


def _stored(tile: LatentTile, dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.float32 and tile.split else dtype


def tile_for(
    sizes: Constants, pixels: int, dtype: torch.dtype, shared: int, *, coupled: bool = True, many: bool = False
) -> LatentTile:
    """Return the tile that was fastest on an H200 or, if it needs more than `shared` bytes, a smaller one.

    Args:
        sizes: of the latent.
        pixels: that a program works on before it waits or takes the next image.
        dtype: of the numbers that are multiplied.
        shared: bytes of shared memory that a program may use.
        coupled: train mode.
        many: each multiprocessor has several images, one after the other.
    """
    near = sizes.pitch & (sizes.pitch - 1) != 0  # pixels at powers of two load as fast in large pieces
    tile = LatentTile(rows=64 if pixels <= 64 else 128, near=near)
    if dtype == torch.float32:
        tile = replace(tile, warps=4) if pixels <= 64 else replace(tile, stages=2)
    elif pixels > 64 and sizes.groups == 3 and (coupled or near):
        one = replace(tile, keep=True)
        for keeping in (replace(one, rows=64, warps=4, places=2), one) if many else (one,):
            if shared_memory(sizes, keeping, dtype) * keeping.places <= shared:
                return keeping
    while shared_memory(sizes, tile, dtype) > shared and tile.rows > 16:
        if tile.stages > 2 or (tile.rows <= 64 and tile.stages > 1):
            tile = replace(tile, stages=tile.stages - 1)
        else:
            tile = replace(tile, rows=tile.rows // 2, warps=4)
    return tile


def _programs(images: int, places: int, device: torch.device, *, coupled: bool) -> int:
    """Return how many programs to start. Those of a coupled batch wait for each other: all must run at once."""
    processors = multiprocessors(device)
    return max(1, min(images, (min(MOST, processors) if coupled else processors) * places))


@functools.cache
def _shared_limit(device: torch.device) -> int:
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 96 * 1024))  # missing in an old PyTorch


@functools.cache
def _cooperative() -> dict[str, bool]:
    """Cooperative launch: all programs start together, so two solves on one GPU cannot deadlock."""
    from triton.backends.nvidia.compiler import CUDAOptions

    known = {field.name for field in fields(CUDAOptions)}
    return {"launch_cooperative_grid": True} if "launch_cooperative_grid" in known else {}


def plan(
    v: Tensor, coupled: bool, dtype: torch.dtype, tile: LatentTile | None = None, programs: int | None = None
) -> tuple[Constants, LatentTile, int]:
    """Return the sizes, the tile and the number of programs of a solve."""
    images, channels, height, width = v.shape
    if not images or channels > WIDEST:
        raise ValueError(f"expected a batch with images of at most {WIDEST} channels, got {tuple(v.shape)}")
    sizes = sizes_of(channels, height, width)
    if tile is None:
        one_each = programs or _programs(images, 1, v.device, coupled=coupled)
        pixels = height * width * (-(-images // one_each) if coupled else 1)
        many = not coupled and images >= MANY * one_each
        tile = tile_for(sizes, pixels, dtype, _shared_limit(v.device), coupled=coupled, many=many)
    programs = programs or _programs(images, tile.places, v.device, coupled=coupled)
    places = images if coupled else programs
    if max(3 * places * height * width * sizes.pitch, 2 * places * sizes.area) >= 2**31:
        raise ValueError(f"a batch of {images} images is too large for one launch; use a smaller one")
    return sizes, tile, programs


def kernel_solve(
    R: LatentMap,
    v: Tensor,
    z0: Tensor | None,
    tolerance: Tolerance,
    dtype: torch.dtype,
    *,
    tile: LatentTile | None = None,
    programs: int | None = None,
) -> Solution:
    """Solve by the kernel: one launch packs the weights, one iterates. `tile`, `programs`: instead of `plan`'s."""
    from banach.kernels.latent_kernel import iterate, pack

    images, C, H, W = v.shape
    coupled, form = R.known is None, R.form
    sizes, tile, programs = plan(v, coupled, dtype, tile, programs)
    split, places = tile.split and dtype == torch.float32, images if coupled else programs
    share = -(-images // programs)
    K = constants(
        replace(
            sizes, blocks=R.blocks, rows=tile.rows, stages=tile.stages, near=tile.near, split=split,
            chunk=max(16, power_of_two(programs)) if coupled else 16, coupled=coupled, late=form.late,
            worst_pixel=isinstance(tolerance.norm, WorstPixel), relative=tolerance.rtol > 0, from_zero=z0 is None,
            keep=tile.keep and sizes.groups == 3 and not split, alone=coupled and share * H * W <= tile.rows,
            spins=SPINS,
        )
    )  # fmt: skip

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=v.device, dtype=dtype)

    stored, halves, columns = _stored(tile, dtype), 1 + split, sizes.columns
    slots, held, stream = (empty(k, places * H * W, sizes.pitch) for k in (3, 1, 1))
    operand, hidden = empty(2, halves, places, sizes.area, dtype=stored)
    sums, tests = empty(2, programs, 2, columns), empty(2, programs, 4)
    pivots = empty(programs, R.blocks, columns)
    weights = empty(halves, 2 * R.blocks, sizes.groups, columns, sizes.depth, dtype=stored)
    counters = empty(2, dtype=torch.int32)
    value, residual = empty(images, H, W, C), empty(images)
    steps, flags = empty(images, dtype=torch.int64), empty(4, images, dtype=torch.int8)
    entries = C * H * W * (images if coupled else 1)
    scale = 1.0 / math.sqrt(entries) if isinstance(tolerance.norm, RMS) else 1.0
    start = pixel_rows(v)
    pack[(9 * len(R.weights),)](R.weights, weights, counters, K=K)
    iterate[(programs,)](
        start, start if z0 is None else pixel_rows(z0), weights, _wide(R.biases, columns),
        sums if R.known is None else _wide(R.known, columns), slots, held, stream, operand, hidden, sums, tests,
        pivots, counters, value, residual, steps, flags, images, tolerance.max_steps, sizes.groups,
        tolerance.atol / scale, tolerance.rtol, scale, 1.0 / (images * H * W), R.eps, form.inner, form.outer,
        form.slope, form.slope_after, K=K, num_warps=tile.warps, **(_cooperative() if coupled else {}),
    )  # fmt: skip
    converged, stalled, nonfinite, diverged = flags.view(torch.bool)
    return Solution(
        value.permute(0, 3, 1, 2), residual, converged, steps, stalled, nonfinite, diverged,
        solver=Picard(), tolerance=tolerance,
    )  # fmt: skip


def _wide(values: Tensor, columns: int) -> Tensor:
    missing = columns - values.shape[-1]
    return (F.pad(values, (0, missing)) if missing else values).float().contiguous()
