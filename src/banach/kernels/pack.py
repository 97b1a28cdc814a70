"""Weights in and out of the layout: packed for the matrix products, and gradients back to torch's. Triton."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from banach.kernels.passes import total


# One kernel for all layers: their weights begin at different alignments.
@triton.jit(do_not_specialize=["programs"], do_not_specialize_on_alignment=["w", "b"])
def fold(
    w,
    b,
    stats,
    sums,
    out,
    programs,
    share,
    eps,
    C: tl.constexpr,
    P: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    MEASURE: tl.constexpr,
    PACK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Scale of a batch norm into the weights, its shift and the bias into the rows of the ones: one tap a program.

    MEASURE: the statistics come from sums, and every program adds them up for itself: cheaper than a launch.
    """
    layer = tl.program_id(0) // 9
    tap = tl.program_id(0) % 9
    co = tl.arange(0, WIDTH)
    real = co < C
    weight = tl.zeros([WIDTH, WIDTH], tl.float32)
    shift = tl.zeros([WIDTH], tl.float32)
    if PACK:  # asked for before the sums, so that nobody waits for it after them
        at = w + layer * C * C * 9 + (co * 9)[:, None] + (co * C * 9)[None, :] + tap
        weight = tl.load(at, mask=real[:, None] & real[None, :], other=0.0).to(tl.float32)
        shift = tl.load(b + layer * C + co, mask=real & (tap == 4), other=0.0).to(tl.float32)
    if MEASURE:
        first, second = total(sums, programs, co, WIDTH, CHUNK)
        mean = first * share
        variance = tl.maximum(second * share - mean * mean, 0.0)
        rstd = 1.0 / tl.sqrt(variance + eps)
        if tap == 0:
            tl.store(stats + co, mean)
            tl.store(stats + WIDTH + co, rstd)
            tl.store(stats + 2 * WIDTH + co, variance)
    else:
        mean = tl.load(stats + layer * 3 * WIDTH + co)
        rstd = tl.load(stats + layer * 3 * WIDTH + WIDTH + co)
    if PACK:
        folded = (weight * rstd[:, None]).to(out.dtype.element_ty)
        rows = out + ((layer * 3 + tap // 3) * DEPTH + tap % 3 * P) * WIDTH
        here = real[:, None] & (co < WIDTH)[None, :]
        tl.store(rows + (co * WIDTH)[:, None] + co[None, :], folded, mask=here)
        shift -= tl.sum(folded.to(tl.float32) * mean[:, None], axis=0)
        for part in tl.static_range(3):
            rounded = shift.to(out.dtype.element_ty)
            tl.store(rows + (C + part) * WIDTH + co, rounded)
            shift -= rounded.to(tl.float32)


@triton.jit
def turn(w, out, C: tl.constexpr, P: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """Weights of the gradient of the input: flipped, and the channels exchanged."""
    layer = tl.program_id(0) // 9
    tap = tl.program_id(0) % 9
    co = tl.arange(0, WIDTH)
    real = (co < C)[:, None] & (co < C)[None, :]
    weight = tl.load(w + layer * C * C * 9 + (co * C * 9)[:, None] + (co * 9)[None, :] + tap, mask=real, other=0.0)
    rows = out + ((layer * 3 + 2 - tap // 3) * DEPTH + (2 - tap % 3) * P) * WIDTH
    tl.store(rows + (co * WIDTH)[:, None] + co[None, :], weight.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["programs"])
def unfold(
    parts,
    stats,
    dw,
    db,
    programs,
    C: tl.constexpr,
    P: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Parts of a packed gradient, added up in a fixed order and brought back: the chain rule of `fold`.

    LAST: input channels lie side by side in the gradient, not the taps.
    """
    tap = tl.program_id(0)
    ci = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    co = tl.arange(0, WIDTH)
    rows = parts + ((tap // 3) * DEPTH + tap % 3 * P) * WIDTH
    real = (ci < C)[None, :, None] & (co < C)[None, None, :]
    weight = tl.zeros([CHUNK, ROWS, WIDTH], tl.float32)
    ones = tl.zeros([CHUNK, WIDTH], tl.float32)
    for start in range(0, programs, CHUNK):
        part = start + tl.arange(0, CHUNK)
        of = rows + (part * 3 * DEPTH * WIDTH)[:, None, None] + (ci * WIDTH)[None, :, None] + co[None, None, :]
        weight += tl.load(of, mask=(part < programs)[:, None, None] & real, other=0.0)
        of_ones = rows + (part * 3 * DEPTH * WIDTH)[:, None] + C * WIDTH + co[None, :]
        ones += tl.load(of_ones, mask=(part < programs)[:, None] & (co < C)[None, :], other=0.0)
    gradient = tl.sum(weight, axis=0)
    sums = tl.sum(ones, axis=0)
    if NORM:
        mean = tl.load(stats + ci, mask=ci < C, other=0.0)
        rstd = tl.load(stats + WIDTH + ci, mask=ci < C, other=0.0)
        gradient = (gradient - mean[:, None] * sums[None, :]) * rstd[:, None]
    at = tap * C + ci if LAST else ci * 9 + tap
    tl.store(dw + (co * C * 9)[None, :] + at[:, None], gradient, mask=(ci < C)[:, None] & (co < C)[None, :])
    if tap == 4 and tl.program_id(1) == 0:
        tl.store(db + co, sums, mask=co < C)
