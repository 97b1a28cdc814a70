"""latent_solve: u = R(u, v) by Picard's iteration in one kernel launch, for an R of the form `LatentForm`.

The device code is in `latent_kernel.py`. `reference_solve` does the same in plain PyTorch, by `banach.solve`. No
host sync happens here, so a solve can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.kernels import host
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
    if not host.says(R, "latent_form") or not all(
        host.says(block, "latent_block") for block in getattr(R, "blocks", ())
    ):
        return None
    try:
        latent_map(R)
    except ValueError:
        return None
    return form


def latent_map(R: Any) -> LatentMap:
    """Return R as tensors, in its current mode. R is not changed, and no gradient is recorded."""
    form = getattr(R, "latent_form", None)
    if form is None:
        raise ValueError(f"expected an R with a latent_form, got {type(R).__name__}; use banach.solve")
    blocks: list[Any] = list(R.blocks)
    host.check_blocks(blocks, WIDEST)
    layers = [layer for block in blocks for layer in (block.conv1, block.conv2)]
    with torch.no_grad(), torch.autocast(layers[0].weight.device.type, enabled=False):
        known = host.running_statistics(blocks)
        weights, biases = (
            host.gather([layer.weight for layer in layers]),
            host.gather([layer.bias for layer in layers]),
        )
        return LatentMap(form, weights, biases, blocks[0].norm.eps, None if known is None else known[:2])


def latent_solve(
    R: Any,
    v: Tensor,
    z0: Tensor | None = None,
    *,
    tolerance: Tolerance | None = None,
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
        dtype: type of the numbers that convolutions multiply: autocast's if it is on, else the type of v. Iterates
            are float32. float32 products are made of float16 numbers: pixels above 10^6 and weights above 65,504
            count as not finite, and if all pixels are below 10^-3 digits are lost (four are left at 10^-6).
    Returns:
        Solution. If programs lost each other (two solves on a GPU without cooperative launch): NaN and -1 steps.
    Raises:
        ValueError: if R, the norm or a shape does not fit.
    """
    known = R if isinstance(R, LatentMap) else latent_map(R)
    tolerance = tolerance or Tolerance()
    dtype = _product_type(v) if dtype is None else dtype
    _check(known, v, z0, tolerance)
    with torch.no_grad(), torch.autocast(v.device.type, enabled=False):
        if (
            v.is_cuda
            and host.has_triton()
            and v.dtype != torch.float64
            and dtype in (torch.bfloat16, torch.float32)
        ):
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
    form, x = R.form, v + R.form.inner * z
    for block in range(R.blocks):
        hidden = F.leaky_relu(_convolve(R, 2 * block, x, dtype), form.slope)
        y = _convolve(R, 2 * block + 1, hidden, dtype)
        y = F.leaky_relu(x + y, form.slope_after) if form.late else x + F.leaky_relu(y, form.slope_after)
        if R.known is None:
            x = F.batch_norm(y, None, None, training=True, eps=R.eps)
        else:
            mean, rstd = R.known[:, block, :, None, None].to(y.dtype)
            x = (y - mean) * rstd
    return form.outer * x


def _convolve(R: LatentMap, layer: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    exact, weight = x.dtype, R.weights[layer]
    return F.conv2d(x.to(dtype).to(exact), weight.to(dtype).to(exact), R.biases[layer].to(exact), padding=1)


@dataclass(frozen=True)
class Constants:
    """Compile-time constants of the kernel, its K: sizes of a latent, how a program works, cases to compile."""

    channels: int
    height: int
    width: int
    pitch: int  # elements from one pixel to the next; a pixel begins at a multiple of 16 bytes
    columns: int  # power of two that holds the channels
    groups: int  # of weights: the 3 rows of a kernel or, if those are too deep for one product, its 9 taps
    depth: int  # of one group's product
    area: int  # elements of an image with its border, and of what a product reads beyond it
    rows: int = 128  # pixels of a tile
    warps: int = 8
    stages: int = 3  # loads of products in flight
    places: int = 1  # programs per multiprocessor
    near: bool = True  # load pixels in pieces that go through the L1 cache
    keep: bool = False  # load the weights of a convolution once for all tiles; for three groups, not split
    split: bool = False  # multiply float32 as two float16 on tensor cores; else directly, far more slowly
    blocks: int = 1
    chunk: int = 16  # power of two that holds the programs
    coupled: bool = False
    worst_pixel: bool = False
    relative: bool = False
    late: bool = False
    from_zero: bool = False
    alone: bool = False  # each program has a single tile and keeps its values during a batch norm
    spins: int = SPINS


def sizes_of(channels: int, height: int, width: int) -> Constants:
    """Return the constants that follow from the shape of a latent."""
    pitch = host.ceil_div(channels, 8) * 8
    groups = 3 if 3 * pitch <= 128 else 9
    depth = max(16, host.power_of_two(pitch * (9 // groups)))
    beyond = depth - pitch * (9 // groups)
    area = host.ceil_div((height + 2) * (width + 2) * pitch + beyond, 64) * 64
    return Constants(channels, height, width, pitch, max(16, host.power_of_two(channels)), groups, depth, area)


def shared_memory(K: Constants, dtype: torch.dtype) -> int:
    """Return the bytes of shared memory that a program needs: operands of the products in flight, or of all."""
    return (K.groups if K.keep else K.stages) * (K.rows + K.columns) * K.depth * dtype.itemsize


def tiled(
    K: Constants, pixels: int, dtype: torch.dtype, shared: int, *, coupled: bool = True, many: bool = False
) -> Constants:
    """Choose the tile that was fastest on an H200 or, if it needs more than `shared` bytes, a smaller one.

    `pixels`: that a program works on before it waits or takes the next image. `many`: each multiprocessor has
    several images, one after the other.
    """
    near = K.pitch & (K.pitch - 1) != 0  # pixels at powers of two load as fast in large pieces
    K = replace(K, rows=64 if pixels <= 64 else 128, near=near, split=dtype == torch.float32)
    if K.split:
        K = replace(K, warps=4) if pixels <= 64 else replace(K, stages=2)
    elif pixels > 64 and K.groups == 3 and (coupled or near):
        one = replace(K, keep=True)
        for keeping in (replace(one, rows=64, warps=4, places=2), one) if many else (one,):
            if shared_memory(keeping, dtype) * keeping.places <= shared:
                return keeping
    while shared_memory(K, dtype) > shared and K.rows > 16:
        if K.stages > 2 or (K.rows <= 64 and K.stages > 1):
            K = replace(K, stages=K.stages - 1)
        else:
            K = replace(K, rows=K.rows // 2, warps=4)
    return K


def launch_of(
    v: Tensor, coupled: bool, dtype: torch.dtype, tile: dict[str, Any] | None = None, programs: int | None = None
) -> tuple[Constants, int]:
    """Return sizes and tile of a solve, and its number of programs. `tile`, `programs`: instead of the fastest."""
    images, channels, height, width = v.shape
    if not images or channels > WIDEST:
        raise ValueError(f"expected a batch with images of at most {WIDEST} channels, got {tuple(v.shape)}")
    # Programs of a coupled batch wait for each other: all must run at once.
    places = min(MOST, host.multiprocessors(v.device)) if coupled else host.multiprocessors(v.device)
    one_each = programs or min(images, places)
    pixels = height * width * (host.ceil_div(images, one_each) if coupled else 1)
    many = not coupled and images >= MANY * one_each
    K = replace(sizes_of(channels, height, width), **(tile or {}))
    if tile is None:
        K = tiled(K, pixels, dtype, _shared_limit(v.device), coupled=coupled, many=many)
    programs = programs or min(images, places * K.places)
    held = images if coupled else programs
    if max(3 * held * height * width * K.pitch, 2 * held * K.area) >= 2**31:
        raise ValueError(f"a batch of {images} images is too large for one launch; use a smaller one")
    return replace(K, coupled=coupled, alone=coupled and pixels <= K.rows), programs


@functools.cache
def _shared_limit(device: torch.device) -> int:
    if device.type != "cuda":
        return 227 * 1024
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 96 * 1024))


def kernel_solve(
    R: LatentMap,
    v: Tensor,
    z0: Tensor | None,
    tolerance: Tolerance,
    dtype: torch.dtype,
    *,
    tile: dict[str, Any] | None = None,
    programs: int | None = None,
) -> Solution:
    """Solve by the kernel: one launch packs the weights, one iterates. `tile`, `programs`: see `launch_of`."""
    from banach.kernels.latent_kernel import iterate, pack

    images, C, H, W = v.shape
    coupled, form, norm = R.known is None, R.form, tolerance.norm
    sizes, programs = launch_of(v, coupled, dtype, tile, programs)
    sizes = replace(
        sizes, blocks=R.blocks, chunk=max(16, host.power_of_two(programs)) if coupled else 16, late=form.late,
        worst_pixel=isinstance(norm, WorstPixel), relative=tolerance.rtol > 0, from_zero=z0 is None, spins=SPINS,
    )  # fmt: skip

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=v.device, dtype=dtype)

    stored, halves = (torch.float16, 2) if sizes.split else (dtype, 1)
    places, columns = images if coupled else programs, sizes.columns
    slots, held, stream = (empty(k, places * H * W, sizes.pitch) for k in (3, 1, 1))
    operand, hidden = empty(2, halves, places, sizes.area, dtype=stored)
    sums, tests = empty(2, programs, 2, columns), empty(2, programs, 2)
    pivots = empty(programs, R.blocks, columns)
    weights = empty(halves, 2 * R.blocks, sizes.groups, columns, sizes.depth, dtype=stored)
    counters = empty(2, dtype=torch.int32)
    value, residual = empty(images, H, W, C), empty(images)
    steps, flags = empty(images, dtype=torch.int64), empty(4, images, dtype=torch.int8)
    scale = 1.0 / math.sqrt(C * H * W * (images if coupled else 1)) if isinstance(norm, RMS) else 1.0
    start, K = host.pixel_rows(v), host.constants(sizes)
    pack[(9 * len(R.weights),)](R.weights, weights, counters, K=K)
    iterate[(programs,)](
        start, start if z0 is None else host.pixel_rows(z0), weights, host.padded(R.biases, columns),
        sums if R.known is None else host.padded(R.known, columns), slots, held, stream, operand, hidden, sums,
        tests, pivots, counters, value, residual, steps, flags, images, tolerance.max_steps, sizes.groups,
        tolerance.atol / scale, tolerance.rtol, scale, 1.0 / (images * H * W), R.eps, form.inner, form.outer,
        form.slope, form.slope_after, K=K, num_warps=sizes.warps,
        launch_cooperative_grid=coupled,  # all programs start together: two solves on one GPU cannot deadlock
    )  # fmt: skip
    converged, stalled, nonfinite, diverged = flags.view(torch.bool)
    return Solution(
        value.permute(0, 3, 1, 2), residual, converged, steps, stalled, nonfinite, diverged,
        solver=Picard(), tolerance=tolerance,
    )  # fmt: skip
