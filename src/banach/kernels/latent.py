"""latent_solve: u = R(u, v) by Picard's iteration in one kernel launch, for an R of the form `LatentForm`.

The device code is in `latent_kernel.py`; the reference is `banach.solve`. No host sync happens here.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from banach.kernels import host
from banach.nn.layers import is_hooked
from banach.solve import RMS, Euclidean, Picard, Solution, Tolerance, WorstPixel

WIDEST = 64  # channels
MOST = 128  # programs that wait for each other: each of them adds the sums of all
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


def describe(R: Any) -> LatentForm | None:
    """Return the form of R if the kernel can compute R, else None."""
    form = getattr(R, "latent_form", None)
    if not isinstance(form, LatentForm) or not isinstance(R, nn.Module) or any(map(is_hooked, R.modules())):
        return None
    blocks = list(getattr(R, "blocks", ()))
    declared = host.declares(R, "latent_form") and all(host.declares(block, "latent_block") for block in blocks)
    return form if declared and host.are_known(blocks, WIDEST) else None


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
    per_multiprocessor: int = 1  # programs
    near: bool = True  # load pixels in pieces that go through the L1 cache
    keep: bool = False  # load the weights of a convolution once for all tiles; for three groups, not split
    split: bool = False  # multiply float32 as two float16 on tensor cores; else directly, far more slowly
    blocks: int = 1
    chunk: int = 16  # power of two that holds the programs
    coupled: bool = False
    worst_pixel: bool = False
    relative: bool = False
    late: bool = False
    alone: bool = False  # coupled, each program has a single tile and keeps its values during a batch norm
    lazy: bool = False  # coupled otherwise: what a block gave stays as it is, and the next one normalises it
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

    `pixels`: of a program before it waits or takes the next image. `many`: there are several images for each.
    """
    near = K.pitch & (K.pitch - 1) != 0  # pixels at powers of two load as fast in large pieces
    K = replace(K, rows=64 if pixels <= 64 else 128, near=near, split=dtype == torch.float32)
    if K.split:
        K = replace(K, warps=4) if pixels <= 64 else replace(K, stages=2)
    elif pixels > 64 and K.groups == 3 and (coupled or near):
        one = replace(K, keep=True)
        for keeping in (replace(one, rows=64, warps=4, per_multiprocessor=2), one) if many else (one,):
            if shared_memory(keeping, dtype) * keeping.per_multiprocessor <= shared:
                return keeping
    while shared_memory(K, dtype) > shared and K.rows > 16:
        if K.stages > 2 or (K.rows <= 64 and K.stages > 1):
            K = replace(K, stages=K.stages - 1)
        else:
            K = replace(K, rows=K.rows // 2, warps=4)
    return K


def launch_of(v: Tensor, coupled: bool, dtype: torch.dtype) -> tuple[Constants, int]:
    """Return sizes and tile of a solve, and its number of programs."""
    images, channels, height, width = v.shape
    # Programs of a coupled batch wait for each other: all must run at once.
    at_once = min(MOST, host.multiprocessors(v.device)) if coupled else host.multiprocessors(v.device)
    one_each = min(images, at_once)
    pixels = height * width * (host.ceil_div(images, one_each) if coupled else 1)
    sizes, many = sizes_of(channels, height, width), not coupled and images >= MANY * one_each
    K = tiled(sizes, pixels, dtype, host.shared_memory(v.device), coupled=coupled, many=many)
    programs = min(images, at_once * K.per_multiprocessor)
    held = images if coupled else programs
    if max(3 * held * height * width * K.pitch, 2 * held * K.area, v.numel()) >= 2**31:
        raise ValueError(f"a batch of {images} images is too large for one launch; use a smaller one")
    alone = coupled and pixels <= K.rows
    return replace(K, coupled=coupled, alone=alone, lazy=coupled and not alone), programs


def latent_solve(R: Any, v: Tensor, z0: Tensor | None = None, *, tolerance: Tolerance | None = None) -> Solution:
    """Find u = R(u, v) as `banach.solve` does with Picard, in one kernel launch.

    In train mode the batch is normalised by its own statistics and stops as one; running statistics stay as they
    are. In eval mode every image stops on its own. No sample is called stalled. Convolutions multiply bfloat16
    numbers under autocast or if v has that type, else float32 ones, each as two float16 numbers: pixels above 10^6
    and weights above 65,504 count as not finite, and if all pixels are below 10^-3 digits are lost (four are left
    at 10^-6). Iterates are float32.

    Args:
        R: a module that `describe` knows, with float32 weights.
        v: Q(d), (batch, channels, height, width), on a GPU.
        z0: starting latent, zeros if None.
        tolerance: its norm is RMS, Euclidean or WorstPixel.
    Returns:
        Solution. If a barrier timed out (two solves on a GPU without cooperative launch): NaN and -1 steps.
    Raises:
        ValueError: if R, the norm or a shape does not fit.
    """
    tolerance, kind = tolerance or Tolerance(), v.device.type
    if describe(R) is None or type(tolerance.norm) not in (RMS, Euclidean, WorstPixel):
        got = f"{type(R).__name__} in the norm {tolerance.norm}"
        known = "an R of the form LatentForm, blocks in one mode, in the norm RMS, Euclidean or WorstPixel"
        raise ValueError(f"expected {known}, got {got}; use banach.solve")
    channels = R.blocks[0].conv1.in_channels
    if v.dim() != 4 or v.shape[1] != channels or not len(v) or v.dtype == torch.float64:
        shape = f"(batch, {channels}, height, width), not empty, in float32 or shorter"
        raise ValueError(f"v must be {shape}, got {tuple(v.shape)} in {v.dtype}; check Q")
    if z0 is not None and z0.shape != v.shape:
        raise ValueError(f"z0 must have the shape of v, {tuple(v.shape)}, got {tuple(z0.shape)}")
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v.dtype
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        return _launch(R, v, z0, tolerance, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def _launch(R: Any, v: Tensor, z0: Tensor | None, tolerance: Tolerance, dtype: torch.dtype) -> Solution:
    """Solve by two launches: one packs the weights, one iterates."""
    from banach.kernels.latent_kernel import iterate, pack

    images, C, H, W = v.shape
    blocks, form, norm = list(R.blocks), R.latent_form, tolerance.norm
    layers = [layer for block in blocks for layer in (block.conv1, block.conv2)]
    exact, biases = host.gather([layer.weight for layer in layers]), host.gather([layer.bias for layer in layers])
    known = host.running_statistics(blocks)
    coupled = known is None
    sizes, programs = launch_of(v, coupled, dtype)
    sizes = replace(
        sizes, blocks=len(blocks), chunk=max(16, host.power_of_two(programs)) if coupled else 16, late=form.late,
        worst_pixel=isinstance(norm, WorstPixel), relative=tolerance.rtol > 0, spins=SPINS,
    )  # fmt: skip

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=v.device, dtype=dtype)

    stored, halves = (torch.float16, 2) if sizes.split else (dtype, 1)
    places, columns = images if coupled else programs, sizes.columns  # of images in the programs' memory
    slots, held, stream = (empty(k, places * H * W, sizes.pitch) for k in (3, 1, 1))
    operand, hidden = empty(2, halves, places, sizes.area, dtype=stored)
    sums, tests = empty(2, programs, 2, columns), empty(2, programs, 2)
    pivots = empty(programs, len(blocks), columns)
    weights = empty(halves, len(layers), sizes.groups, columns, sizes.depth, dtype=stored)
    counters = empty(2, dtype=torch.int32)
    value, residual = empty(images, H, W, C), empty(images)
    steps, flags = empty(images, dtype=torch.int64), empty(4, images, dtype=torch.int8)
    scale = 1.0 / math.sqrt(C * H * W * (images if coupled else 1)) if isinstance(norm, RMS) else 1.0
    K = host.constants(sizes)
    pack[(9 * len(layers),)](w=exact, out=weights, counters=counters, K=K)
    iterate[(programs,)](  # `stream` by place: by its name it would be an option of Triton's
        host.pixel_rows(v), None if z0 is None else host.pixel_rows(z0), weights, host.padded(biases, columns),
        None if known is None else host.padded(known[:2], columns), slots, held, stream,
        operand=operand, hidden=hidden, sums=sums, tests=tests, pivots=pivots, counters=counters, value=value,
        residual=residual, steps=steps, flags=flags, images=images, max_steps=tolerance.max_steps,
        groups=sizes.groups, atol=tolerance.atol / scale, rtol=tolerance.rtol, scale=scale,
        share=1.0 / (images * H * W), eps=blocks[0].norm.eps, inner=form.inner, outer=form.outer,
        slope=form.slope, slope_after=form.slope_after, K=K, num_warps=sizes.warps,
        launch_cooperative_grid=coupled,  # all programs start together: two solves on one GPU cannot deadlock
    )  # fmt: skip
    converged, stalled, nonfinite, diverged = flags.view(torch.bool)
    return Solution(
        value.permute(0, 3, 1, 2), residual, converged, steps, stalled, nonfinite, diverged,
        solver=Picard(), tolerance=tolerance,
    )  # fmt: skip
