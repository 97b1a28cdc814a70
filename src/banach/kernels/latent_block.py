"""A block at all pixels of a program's images: two convolutions, and what comes after batch norm. Triton."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from banach.kernels.latent_parts import kept_rows, leaky, product, product_of_kept, put_pixels, settle, window


@triton.jit
def hide(
    operand, hidden, w, bias, begin, end, low, groups, slope,
    P: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, AREA: tl.constexpr, LAYERS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    NEAR: tl.constexpr, SPLIT: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The first convolution of a block and its leaky ReLU."""
    co = tl.arange(0, WIDTH)
    shift = tl.load(bias + co)
    w0, w1, w2 = kept_rows(w, WIDTH, DEPTH, KEEP)
    for tile in tl.range(begin, end, ROWS, num_stages=1):
        m = tile + tl.arange(0, ROWS)
        at = window(tl.minimum(m, end - 1), H, W, P, AREA)
        y = convolve(
            operand, w, w0, w1, w2, at, low, groups, P, WIDTH, DEPTH, GROUPS, W, LAYERS, STAGES, NEAR, SPLIT, KEEP
        )
        here = (m < end)[:, None] & (co < P)[None, :]
        to = hidden + (at + (W + 3) * P)[:, None] + co[None, :]
        put_pixels(to, low, leaky(y + shift[None, :], slope), here, SPLIT)
    tl.debug_barrier()


@triton.jit
def convolve(
    x, w, w0, w1, w2, at, low, groups,
    P: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, W: tl.constexpr,
    LAYERS: tl.constexpr, STAGES: tl.constexpr, NEAR: tl.constexpr, SPLIT: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """A convolution at some pixels, whose windows begin at `at`, by weights that are kept or not."""
    if KEEP:
        y = product_of_kept(x, w0, w1, w2, at, W, P, WIDTH, DEPTH)
    else:
        y = product(x, w, at, low, groups, W, P, WIDTH, DEPTH, GROUPS, LAYERS, STAGES, NEAR, SPLIT)
    return y


@triton.jit
def join(y, x, shift, slope, LATE: tl.constexpr):
    """What a block gives, from its second convolution and its input; not normalised yet."""
    y += shift[None, :]
    return leaky(y + x, slope) if LATE else leaky(y, slope) + x


@triton.jit
def join_all(
    hidden, stream, w, bias, x_mean, x_rstd, pivot, begin, end, low, groups, slope,
    P: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, AREA: tl.constexpr, LAYERS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    NEAR: tl.constexpr, SPLIT: tl.constexpr, KEEP: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """The second convolution, and `join` in the place of the block's input, which is yet to be normalised.

    Returns sums of what is left without `pivot`, and of its squares.
    """
    co = tl.arange(0, WIDTH)
    shift = tl.load(bias + co)
    first = tl.zeros([ROWS, WIDTH], tl.float32)
    second = tl.zeros([ROWS, WIDTH], tl.float32)
    w0, w1, w2 = kept_rows(w, WIDTH, DEPTH, KEEP)
    for tile in tl.range(begin, end, ROWS, num_stages=1):
        m = tile + tl.arange(0, ROWS)
        here = (m < end)[:, None] & (co < P)[None, :]
        at = window(tl.minimum(m, end - 1), H, W, P, AREA)
        y = convolve(
            hidden, w, w0, w1, w2, at, low, groups, P, WIDTH, DEPTH, GROUPS, W, LAYERS, STAGES, NEAR, SPLIT, KEEP
        )
        to = stream + (m * P)[:, None] + co[None, :]
        x = (tl.load(to, mask=here, other=0.0) - x_mean[None, :]) * x_rstd[None, :]
        y = join(y, x, shift, slope, LATE)
        tl.store(to, y, mask=here)
        y = tl.where(here, y - pivot[None, :], 0.0)
        first, second = first + y, second + y * y
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def settle_all(
    mean, rstd, last, inner, outer, before, after, held, stream, operand, begin, end, low,
    P: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, AREA: tl.constexpr,
    ROWS: tl.constexpr, RELATIVE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """`settle` for what `join_all` left in the stream."""
    co = tl.arange(0, WIDTH)
    top, total, top_T, total_T = 0.0, 0.0, 0.0, 0.0
    for tile in range(begin, end, ROWS):
        m = tile + tl.arange(0, ROWS)
        here = (m < end)[:, None] & (co < P)[None, :]
        y = tl.load(stream + (m * P)[:, None] + co[None, :], mask=here, other=0.0)
        a, b, c, d = settle(
            y, m, m < end, mean, rstd, last, inner, outer, before, after, held, stream, operand, low,
            P, H, W, AREA, RELATIVE, SPLIT, True,
        )  # fmt: skip
        top, top_T = tl.maximum(top, a), tl.maximum(top_T, c)
        total, total_T = total + b, total_T + d
    return top, total, top_T, total_T
