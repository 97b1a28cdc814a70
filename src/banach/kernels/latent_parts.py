"""Pieces of the kernel that solves for a latent: convolution, what comes after a block, when to stop.

Triton. A program owns whole images and keeps what it makes of them in memory of its own, so that most of it is
ordered by a barrier within the program. Images that are convolved lie in a frame of zeros: no load has a border.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

# A float32 number is multiplied as the sum of two of 16 bits, of which 11 are digits: one and, FINER times as
# large, what is left. Pixels are divided by LESS first, so that they may be as large as 10^6.
FINER = tl.constexpr(2048.0)
LESS = tl.constexpr(16.0)


@triton.jit
def window(m, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, AREA: tl.constexpr):
    """Where the 3x3 window of each pixel begins in a framed image."""
    q = m % (H * W)
    return m // (H * W) * AREA + (q // W * (W + 2) + q % W) * P


@triton.jit
def product(
    x,
    w,
    begin,
    low,
    groups,
    W: tl.constexpr,
    P: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    LAYERS: tl.constexpr,
    STAGES: tl.constexpr,
    NEAR: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The convolution at some pixels: a sum over groups of weights of one product each.

    Nine groups are single taps. Three are rows of the kernel, whose three pixels lie side by side in memory.
    SPLIT: numbers are in two parts, the second ones `low` elements further on; of their four products the least
    is left out.
    """
    k = tl.arange(0, DEPTH)
    co = tl.arange(0, WIDTH)
    acc = tl.zeros([begin.shape[0], WIDTH], tl.float32)
    one = acc
    two = acc
    from_x = x + begin[:, None] + k[None, :]
    if NEAR:
        # Copies of 8 bytes pass through the first cache, where a pixel is found again by the other taps.
        from_x = tl.max_contiguous(from_x, (1, 4))
    from_w = w + (co * DEPTH)[:, None] + k[None, :]
    LOW: tl.constexpr = LAYERS * GROUPS * DEPTH * WIDTH
    # Nine in a row would be unrolled, and run out of registers: that many are counted when they run.
    for group in tl.range(0, groups if GROUPS == 9 else GROUPS, num_stages=STAGES):
        row = group if GROUPS == 3 else group // 3
        column = 0 if GROUPS == 3 else group % 3
        at_x = from_x + (row * (W + 2) + column) * P
        at_w = from_w + group * (DEPTH * WIDTH)
        a = tl.load(at_x)
        b = tl.load(at_w)
        if SPLIT:
            # Three sums: one that goes from product to product would change hands between the warps.
            one = tl.dot(tl.load(at_x + low), tl.trans(b), one)
            two = tl.dot(a, tl.trans(tl.load(at_w + LOW)), two)
            acc = tl.dot(a, tl.trans(b), acc)
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return LESS * (acc + (one + two) / FINER) if SPLIT else acc


@triton.jit
def kept_rows(w, WIDTH: tl.constexpr, DEPTH: tl.constexpr, KEEP: tl.constexpr):
    """Weights of the three rows of a kernel, if they are to be kept for all pixels."""
    w0, w1, w2 = 0.0, 0.0, 0.0
    if KEEP:
        at = w + (tl.arange(0, WIDTH) * DEPTH)[:, None] + tl.arange(0, DEPTH)[None, :]
        w0 = tl.load(at)
        w1 = tl.load(at + DEPTH * WIDTH)
        w2 = tl.load(at + 2 * DEPTH * WIDTH)
    return w0, w1, w2


@triton.jit
def product_of_kept(
    x, w0, w1, w2, begin,
    W: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """`product` with such weights. Pixels pass through the first cache, where one row finds those of another."""
    from_x = x + begin[:, None] + tl.arange(0, DEPTH)[None, :]
    a0 = tl.load(from_x)
    a1 = tl.load(from_x + (W + 2) * P)
    a2 = tl.load(from_x + 2 * (W + 2) * P)
    acc = tl.zeros([begin.shape[0], WIDTH], tl.float32)
    acc = tl.dot(a0, tl.trans(w0), acc, input_precision="ieee")
    acc = tl.dot(a1, tl.trans(w1), acc, input_precision="ieee")
    return tl.dot(a2, tl.trans(w2), acc, input_precision="ieee")


@triton.jit
def put(to, low, value, here, SPLIT: tl.constexpr):
    """Store what is to be multiplied. What is too large for its type becomes infinite, and so not finite."""
    high = value.to(to.dtype.element_ty)
    tl.store(to, high, mask=here)
    if SPLIT:
        rest = (value - high.to(tl.float32)) * FINER
        tl.store(to + low, rest.to(to.dtype.element_ty), mask=here)


@triton.jit
def put_pixels(to, low, value, here, SPLIT: tl.constexpr):
    put(to, low, value / LESS if SPLIT else value, here, SPLIT)


@triton.jit
def leaky(value, slope):
    return tl.where(value > 0, value, value * slope)


@triton.jit
def clear(p, begin, end):
    """Zeros from `begin` up to `end`."""
    for start in range(begin, end, 2048):
        at = start + tl.arange(0, 2048)
        tl.store(p + at, tl.zeros([2048], p.dtype.element_ty), mask=at < end)


@triton.jit
def judge(top, total, top_T, total_T, atol, rtol, PIXEL: tl.constexpr, RELATIVE: tl.constexpr):
    """The residual, and what becomes of the iteration: 0 it goes on, 1 it has converged, 2 it is not finite.

    atol is in the units of a norm that is not scaled yet. A maximum overlooks a NaN, a total does not.
    """
    size = tl.sqrt(top if PIXEL else total)
    size = tl.where(total < float("inf"), size, float("nan"))
    test = size
    if RELATIVE:
        test = size - rtol * tl.where(total_T < float("inf"), tl.sqrt(top_T if PIXEL else total_T), float("nan"))
    ended = tl.where(test <= atol, 1, 0)
    return size, tl.where(test > -float("inf"), ended, 2).to(tl.int32)


@triton.jit
def squares(value, RELATIVE: tl.constexpr):
    """The largest square of a pixel's norm, and the sum of all."""
    top = 0.0
    total = 0.0
    if RELATIVE:
        pixels = tl.sum(value * value, axis=1)
        top = tl.max(pixels, axis=0)
        total = tl.sum(pixels, axis=0)
    return top, total


@triton.jit
def settle(
    y,
    m,
    ok,
    mean,
    rstd,
    last,
    inner,
    outer,
    before,
    after,
    held,
    stream,
    operand,
    low,
    P: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AREA: tl.constexpr,
    RELATIVE: tl.constexpr,
    SPLIT: tl.constexpr,
    LAZY: tl.constexpr,
):
    """Normalise what a block gave, at some pixels: the next block's input or, after the last, the next iterate.

    LAZY: the stream has what the block gave, and stays so but for the last block.
    """
    co = tl.arange(0, y.shape[1])
    at = (m * P)[:, None] + co[None, :]
    here = ok[:, None] & (co < P)[None, :]
    x = (y - mean[None, :]) * rstd[None, :]
    top, total, top_T, total_T = 0.0, 0.0, 0.0, 0.0
    if last:
        z = outer * x
        moved = tl.where(here, z - tl.load(before + at, mask=here, other=0.0), 0.0)
        top, total = squares(moved, True)
        top_T, total_T = squares(tl.where(here, z, 0.0), RELATIVE)
        tl.store(after + at, z, mask=here)
        x = tl.load(held + at, mask=here, other=0.0) + inner * z
        if LAZY:
            tl.store(stream + at, x, mask=here)
    if not LAZY:
        tl.store(stream + at, x, mask=here)
    center = window(m, H, W, P, AREA) + (W + 3) * P
    put_pixels(operand + center[:, None] + co[None, :], low, x, here, SPLIT)
    return top, total, top_T, total_T
