"""The 3x3 convolution as a matrix product, with what comes after it in the same pass, and its weights' gradient.

Triton. The three pixels under a row of the kernel lie side by side in memory, so each row of the kernel is one
product of depth 3 P. Two ways through the image: `convolve` takes pixels as they lie and reads each three times;
`march` walks down columns of the images and reads each once, with the sums of three rows of output in flight.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

# What is done with a product before it is stored.
HIDDEN = tl.constexpr(0)  # leaky ReLU, then zero where a mask is zero
JOIN = tl.constexpr(1)  # plus the normalised residual, leaky ReLU
GATE = tl.constexpr(2)  # times the leaky ReLU's slope where the residual is negative, zero where it was dropped
ADD = tl.constexpr(3)  # plus the residual


@triton.jit
def _taps(DEPTH: tl.constexpr, NEAR: tl.constexpr):
    """Places in the three pixels. Copies of 8 bytes pass through the first cache, where two of three are found;
    copies of 16 bytes are half as many, and all come from the second."""
    return tl.max_contiguous(tl.arange(0, DEPTH), 4 if NEAR else 8)


@triton.jit
def _three(x, pixel, inside, col, k, W: tl.constexpr, P: tl.constexpr):
    """The pixels left of, at and right of each of `pixel`, side by side; zero outside the image."""
    left = (col > 0)[:, None] | (k >= P)[None, :]
    right = (col < W - 1)[:, None] | (k < 2 * P)[None, :]
    ok = inside[:, None] & left & right & (k < 3 * P)[None, :]
    return tl.load(x + ((pixel - 1) * P)[:, None] + k[None, :], mask=ok, other=0.0)


@triton.jit
def _pairs(value):
    """Sums over pixels i and i + 8. A thread holds both, so no thread waits; the rest is for the end."""
    return tl.sum(tl.reshape(value, [value.shape[0] // 16, 2, 8, value.shape[1]]), axis=1)


@triton.jit
def _beside(p, offset, at, here, NEEDED: tl.constexpr):
    """A tile that the epilogue needs, asked for before the products so that it arrives with them."""
    tile = at
    if NEEDED:
        tile = tl.load(p + offset + at, mask=here, other=0.0)
    return tile


@triton.jit
def _finish(
    value,
    beside,
    more,
    out,
    offset,
    at,
    here,
    co,
    shift,
    rstd,
    slope,
    C: tl.constexpr,
    WHAT: tl.constexpr,
    DROP: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Turn a product into what is stored, store it, and give its sums over pairs of pixels."""
    if WHAT == HIDDEN:
        value = tl.where(value > 0, value, value * slope)
        if DROP:
            # Only what is dropped is stored as zero, so that the way back needs no mask: see GATE.
            value = tl.where(beside != 0, tl.where(value == 0, -1e-30, value), 0.0)
    if WHAT == JOIN:
        value += beside.to(tl.float32) * rstd[None, :] + shift[None, :]
        value = tl.where(value > 0, value, value * slope)
    if WHAT == GATE:
        seen = beside.to(tl.float32)
        value = tl.where(seen > 0, value, value * slope)
        if DROP:
            value = tl.where(seen == 0, 0.0, value)
    if WHAT == ADD:
        value += beside.to(tl.float32)
    if WHAT <= JOIN:
        value = tl.where((co >= C)[None, :], tl.where((co < C + 3)[None, :], 1.0, 0.0), value)
    tl.store(out + offset + at, value.to(out.dtype.element_ty), mask=here)
    first = _pairs(tl.zeros_like(value))
    second = first
    if SUMS:
        # Of what was not yet rounded: a second conversion would cost more than the whole sum.
        value = tl.where(here, value, 0.0)
        first = _pairs(value)
        second = _pairs(value * (more.to(tl.float32) if WHAT == ADD else value))
    return first, second


@triton.jit(do_not_specialize=["images"])
def convolve(
    x,
    w,
    out,
    residual,
    before,
    stats,
    mask,
    sums,
    images,
    slope,
    C: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    WHAT: tl.constexpr,
    DROP: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    NEAR: tl.constexpr,
    MARCH: tl.constexpr,
):
    """A program works through many tiles, so that sums per channel are few and in a fixed order."""
    pid = tl.program_id(0)
    co = tl.arange(0, WIDTH)
    k = _taps(DEPTH, NEAR)
    shift = tl.zeros([WIDTH], tl.float32)
    rstd = tl.zeros([WIDTH], tl.float32)
    first = tl.zeros([ROWS // 16, 8, WIDTH], tl.float32)
    second = tl.zeros([ROWS // 16, 8, WIDTH], tl.float32)
    empty = tl.zeros([ROWS, WIDTH], tl.float32)
    if WHAT == JOIN:
        rstd = tl.load(stats + WIDTH + co)
        shift = -tl.load(stats + co) * rstd
    BESIDE: tl.constexpr = WHAT != HIDDEN or DROP
    MORE: tl.constexpr = WHAT == ADD and SUMS
    weights = w + tl.arange(0, DEPTH)[:, None] * WIDTH + co[None, :]
    w0 = tl.load(weights)  # loaded once: they stay in shared memory for all tiles
    w1 = tl.load(weights + DEPTH * WIDTH)
    w2 = tl.load(weights + 2 * DEPTH * WIDTH)
    if MARCH:
        # A program has an equal share of all rows of all columns of tiles, and walks down each column it meets.
        rows = tl.cdiv(images * W, ROWS) * H
        share = tl.cdiv(rows, tl.num_programs(0))
        start = pid * share
        stop = tl.minimum(start + share, rows)
        for column in range(start // H, tl.cdiv(stop, H)):
            top = tl.maximum(start - column * H, 0)
            bottom = tl.minimum(stop - column * H, H)
            place = column * ROWS + tl.arange(0, ROWS)
            image = place // W
            pixel = image * (H * W) + place % W
            real = place < images * W
            at = (pixel * P)[:, None] + co[None, :]
            masked = (image * P)[:, None] + co[None, :]
            above = empty
            here = empty
            for row in range(top - 1, bottom + 1):
                a = _three(x + row * (W * P), pixel, real & (row >= 0) & (row < H), place % W, k, W, P)
                back = (row - 1) * (W * P)
                ok = (real & (row > top))[:, None] & (co < P)[None, :]
                if WHAT == HIDDEN:
                    beside = _beside(mask, 0, masked, ok, BESIDE)
                else:
                    beside = _beside(residual, back, at, ok, BESIDE)
                more = _beside(before, back, at, ok, MORE)
                # The sum that is needed now comes last: waiting for it waits for all, and the others can move.
                next_here = tl.dot(a, w0, empty, input_precision="ieee")
                next_above = tl.dot(a, w1, here, input_precision="ieee")
                done = tl.dot(a, w2, above, input_precision="ieee")
                above = next_above
                here = next_here
                one, two = _finish(
                    done, beside, more, out, back, at, ok, co, shift, rstd, slope, C, WHAT, DROP, SUMS
                )
                first += one
                second += two
    else:
        pixels = images * H * W
        for tile in range(pid, tl.cdiv(pixels, ROWS), tl.num_programs(0)):
            pixel = tile * ROWS + tl.arange(0, ROWS)
            col = pixel % W
            row = (pixel // W) % H
            real = pixel < pixels
            at = (pixel * P)[:, None] + co[None, :]
            ok = real[:, None] & (co < P)[None, :]
            if WHAT == HIDDEN:
                beside = _beside(mask, 0, (pixel // (H * W) * P)[:, None] + co[None, :], ok, BESIDE)
            else:
                beside = _beside(residual, 0, at, ok, BESIDE)
            more = _beside(before, 0, at, ok, MORE)
            acc = tl.dot(_three(x, pixel - W, real & (row > 0), col, k, W, P), w0, empty, input_precision="ieee")
            acc = tl.dot(_three(x, pixel, real, col, k, W, P), w1, acc, input_precision="ieee")
            acc = tl.dot(_three(x, pixel + W, real & (row < H - 1), col, k, W, P), w2, acc, input_precision="ieee")
            one, two = _finish(acc, beside, more, out, 0, at, ok, co, shift, rstd, slope, C, WHAT, DROP, SUMS)
            first += one
            second += two
    if SUMS:
        tl.store(sums + pid * 2 * WIDTH + co, tl.sum(tl.sum(first, axis=0), axis=0))
        tl.store(sums + pid * 2 * WIDTH + WIDTH + co, tl.sum(tl.sum(second, axis=0), axis=0))


@triton.jit
def _gradient(g, pixel, ok, co, P: tl.constexpr):
    return tl.load(g + (pixel * P)[:, None] + co[None, :], mask=ok[:, None] & (co < P)[None, :], other=0.0)


@triton.jit(do_not_specialize=["images"])
def correlate(
    x,
    g,
    parts,
    images,
    P: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Gradient of the packed weights: a sum over pixels of input times gradient, one part per program.

    The gradient is read at three rows rather than the input, which is three times as wide.
    """
    pid = tl.program_id(0)
    pixels = images * H * W
    co = tl.arange(0, WIDTH)
    k = _taps(DEPTH, NEAR)
    acc0 = tl.zeros([WIDTH, DEPTH], tl.float32)
    acc1 = tl.zeros([WIDTH, DEPTH], tl.float32)
    acc2 = tl.zeros([WIDTH, DEPTH], tl.float32)
    for tile in range(pid, tl.cdiv(pixels, ROWS), tl.num_programs(0)):
        pixel = tile * ROWS + tl.arange(0, ROWS)
        col = pixel % W
        row = (pixel // W) % H
        real = pixel < pixels
        a = _three(x, pixel, real, col, k, W, P)
        below = _gradient(g, pixel + W, real & (row < H - 1), co, P)
        at = _gradient(g, pixel, real, co, P)
        above = _gradient(g, pixel - W, real & (row > 0), co, P)
        acc0 = tl.dot(tl.trans(below), a, acc0, input_precision="ieee")
        acc1 = tl.dot(tl.trans(at), a, acc1, input_precision="ieee")
        acc2 = tl.dot(tl.trans(above), a, acc2, input_precision="ieee")
    to = parts + pid * 3 * DEPTH * WIDTH + tl.arange(0, DEPTH)[None, :] * WIDTH + co[:, None]
    used = (tl.arange(0, DEPTH) < 3 * P)[None, :] & (co < P)[:, None]
    tl.store(to, acc0, mask=used)
    tl.store(to + DEPTH * WIDTH, acc1, mask=used)
    tl.store(to + 2 * DEPTH * WIDTH, acc2, mask=used)
