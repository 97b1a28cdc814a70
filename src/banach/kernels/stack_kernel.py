"""Device code of `stack.py`: 3x3 convolutions as matrix products with epilogues, packing, batch norm. Triton.

The three pixels under a row of a kernel are neighbours in memory, so each row of a kernel is one product of depth
3 * pitch. `convolve` walks down columns of the images and reads each pixel once, with sums of three output rows in
registers. K: see `stack.Layout`.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

# What `convolve` does with a product before it is stored.
HIDDEN = tl.constexpr(0)  # leaky ReLU, then zero where a mask is zero
JOIN = tl.constexpr(1)  # plus the normalised residual, leaky ReLU
GATE = tl.constexpr(2)  # times the leaky ReLU's slope where the residual is negative, zero where it was dropped
ADD = tl.constexpr(3)  # plus the residual


@triton.jit
def _with_ones(value, co, K: tl.constexpr):
    """Set the first three spare channels to one, the others to zero."""
    return tl.where((co >= K.channels)[None, :], tl.where((co < K.channels + 3)[None, :], 1.0, 0.0), value)


@triton.jit(do_not_specialize=["M"])
def enter(x, out, before, sums, M, K: tl.constexpr):
    """Copy pixels of C channels to their pitch. With `before`: no ones; sum values and products with it."""
    co = tl.arange(0, K.columns)
    first = tl.zeros([K.columns], tl.float32)
    second = tl.zeros([K.columns], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, K.rows), tl.num_programs(0)):
        m = tile * K.rows + tl.arange(0, K.rows)
        held = (m < M)[:, None] & (co < K.channels)[None, :]
        here = (m < M)[:, None] & (co < K.pitch)[None, :]
        at = (m * K.pitch)[:, None] + co[None, :]
        value = tl.load(x + (m * K.channels)[:, None] + co[None, :], mask=held, other=0.0).to(tl.float32)
        if before is None:
            value = _with_ones(value, co, K)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=here)
        if before is not None:
            first += tl.sum(value, axis=0)
            second += tl.sum(value * tl.load(before + at, mask=here, other=0.0).to(tl.float32), axis=0)
    if before is not None:
        at = sums + tl.program_id(0) * 2 * K.columns + co
        tl.store(at, first)
        tl.store(at + K.columns, second)


@triton.jit(do_not_specialize=["M"])
def leave(x, out, stats, M, K: tl.constexpr):
    """Copy pixels at their pitch to pixels of C channels, normalised if there are statistics."""
    co = tl.arange(0, K.columns)
    m = tl.program_id(0) * K.rows + tl.arange(0, K.rows)
    held = (m < M)[:, None] & (co < K.channels)[None, :]
    value = tl.load(x + (m * K.pitch)[:, None] + co[None, :], mask=held, other=0.0).to(tl.float32)
    if stats is not None:
        value = (value - tl.load(stats + co)[None, :]) * tl.load(stats + K.columns + co)[None, :]
    tl.store(out + (m * K.channels)[:, None] + co[None, :], value.to(out.dtype.element_ty), mask=held)


@triton.jit
def _total(sums, programs, co, CHUNK: tl.constexpr, K: tl.constexpr):
    """Add the sums of all programs for some channels, in a fixed order."""
    first = tl.zeros([CHUNK, co.shape[0]], tl.float32)
    second = tl.zeros([CHUNK, co.shape[0]], tl.float32)
    for start in range(0, programs, CHUNK):
        part = start + tl.arange(0, CHUNK)
        at = sums + (part * 2 * K.columns)[:, None] + co[None, :]
        first += tl.load(at, mask=(part < programs)[:, None], other=0.0)
        second += tl.load(at + K.columns, mask=(part < programs)[:, None], other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit(do_not_specialize=["programs"])
def average(sums, stats, out, programs, share, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr):
    """Compute means of g and of g * normalised y from sums of g and of g * y; some channels per program."""
    co = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first, second = _total(sums, programs, co, CHUNK, K)
    normal = (second - first * tl.load(stats + co)) * tl.load(stats + K.columns + co)
    tl.store(out + co, first * share)
    tl.store(out + K.columns + co, normal * share)


@triton.jit(do_not_specialize=["M"])
def unnormalise(g, y, out, stats, means, M, slope, K: tl.constexpr):
    """Differentiate batch norm and a leaky ReLU. means: those of g and of g * normalised y."""
    co = tl.arange(0, K.columns)
    m = tl.program_id(0) * K.rows + tl.arange(0, K.rows)
    at = (m * K.pitch)[:, None] + co[None, :]
    here = (m < M)[:, None] & (co < K.pitch)[None, :]
    value = tl.load(y + at, mask=here, other=0.0).to(tl.float32)
    rstd = tl.load(stats + K.columns + co)[None, :]
    normal = (value - tl.load(stats + co)[None, :]) * rstd
    back = tl.load(g + at, mask=here, other=0.0).to(tl.float32) - tl.load(means + co)[None, :]
    back = (back - normal * tl.load(means + K.columns + co)[None, :]) * rstd
    back = tl.where(value > 0, back, back * slope)
    tl.store(out + at, tl.where((co < K.channels)[None, :], back, 0.0).to(out.dtype.element_ty), mask=here)


# One compiled kernel for all layers: their weights begin at different alignments.
@triton.jit(do_not_specialize=["programs"], do_not_specialize_on_alignment=["w", "b"])
def fold(
    w, b, stats, sums, out, programs, share, eps, PACK: tl.constexpr, TURN: tl.constexpr, CHUNK: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Pack weights, one tap per program: a batch norm's scale into the weights, shift and bias into rows of ones.

    With `sums`, every program computes the statistics from them: cheaper than a launch. TURN: for gradients.
    """
    layer = tl.program_id(0) // 9
    tap = tl.program_id(0) % 9
    co = tl.arange(0, K.columns)
    real = co < K.channels
    weight = tl.zeros([K.columns, K.columns], tl.float32)
    shift = tl.zeros([K.columns], tl.float32)
    if PACK:  # loaded before the sums, so that the loads overlap
        C: tl.constexpr = K.channels
        if TURN:
            at = w + layer * C * C * 9 + (co * C * 9)[:, None] + (co * 9)[None, :] + 8 - tap
        else:
            at = w + layer * C * C * 9 + (co * 9)[:, None] + (co * C * 9)[None, :] + tap
        weight = tl.load(at, mask=real[:, None] & real[None, :], other=0.0).to(tl.float32)
        shift = tl.load(b + layer * K.channels + co, mask=real & (tap == 4), other=0.0).to(tl.float32)
    if sums is not None:
        first, second = _total(sums, programs, co, CHUNK, K)
        mean = first * share
        variance = tl.maximum(second * share - mean * mean, 0.0)
        rstd = 1.0 / tl.sqrt(variance + eps)
        if tap == 0:
            tl.store(stats + co, mean)
            tl.store(stats + K.columns + co, rstd)
            tl.store(stats + 2 * K.columns + co, variance)
    else:
        mean = tl.load(stats + layer * 3 * K.columns + co)
        rstd = tl.load(stats + layer * 3 * K.columns + K.columns + co)
    if PACK:
        folded = (weight * rstd[:, None]).to(out.dtype.element_ty)
        rows = out + ((layer * 3 + tap // 3) * K.depth + tap % 3 * K.pitch) * K.columns
        here = real[:, None] & (co < K.columns)[None, :]
        tl.store(rows + (co * K.columns)[:, None] + co[None, :], folded, mask=here)
        if not TURN:
            shift -= tl.sum(folded.to(tl.float32) * mean[:, None], axis=0)
            for part in tl.static_range(3):
                rounded = shift.to(out.dtype.element_ty)
                tl.store(rows + (K.channels + part) * K.columns + co, rounded)
                shift -= rounded.to(tl.float32)


@triton.jit(do_not_specialize=["programs"])
def unfold(
    parts, stats, dw, db, programs, LAST: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Add the parts of a packed gradient in a fixed order, and unpack it. LAST: to channels_last."""
    C: tl.constexpr = K.channels
    PART: tl.constexpr = 3 * K.depth * K.columns
    tap = tl.program_id(0)
    ci = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    co = tl.arange(0, K.columns)
    rows = parts + ((tap // 3) * K.depth + tap % 3 * K.pitch) * K.columns
    real = (ci < C)[None, :, None] & (co < C)[None, None, :]
    weight = tl.zeros([CHUNK, ROWS, K.columns], tl.float32)
    ones = tl.zeros([CHUNK, K.columns], tl.float32)
    for start in range(0, programs, CHUNK):
        part = start + tl.arange(0, CHUNK)
        of = rows + (part * PART)[:, None, None] + (ci * K.columns)[None, :, None] + co[None, None, :]
        weight += tl.load(of, mask=(part < programs)[:, None, None] & real, other=0.0)
        of_ones = rows + (part * PART)[:, None] + C * K.columns + co[None, :]
        ones += tl.load(of_ones, mask=(part < programs)[:, None] & (co < C)[None, :], other=0.0)
    gradient = tl.sum(weight, axis=0)
    sums = tl.sum(ones, axis=0)
    if stats is not None:
        mean = tl.load(stats + ci, mask=ci < C, other=0.0)
        rstd = tl.load(stats + K.columns + ci, mask=ci < C, other=0.0)
        gradient = (gradient - mean[:, None] * sums[None, :]) * rstd[:, None]
    at = tap * C + ci if LAST else ci * 9 + tap
    tl.store(dw + (co * C * 9)[None, :] + at[:, None], gradient, mask=(ci < C)[:, None] & (co < C)[None, :])
    if tap == 4 and tl.program_id(1) == 0:
        tl.store(db + co, sums, mask=co < C)


@triton.jit
def _three(x, pixel, inside, col, k, K: tl.constexpr):
    """Load the pixels left of, at and right of each of `pixel` as one row; zero outside the image."""
    left = (col > 0)[:, None] | (k >= K.pitch)[None, :]
    right = (col < K.width - 1)[:, None] | (k < 2 * K.pitch)[None, :]
    ok = inside[:, None] & left & right & (k < 3 * K.pitch)[None, :]
    return tl.load(x + ((pixel - 1) * K.pitch)[:, None] + k[None, :], mask=ok, other=0.0)


@triton.jit
def _pairs(value):
    """Add pixels i and i + 8, which one thread holds. The rest is added at the end."""
    return tl.sum(tl.reshape(value, [value.shape[0] // 16, 2, 8, value.shape[1]]), axis=1)


@triton.jit
def _finish(value, early, shift, rstd, slope, WHAT: tl.constexpr, DROP: tl.constexpr, K: tl.constexpr):
    """Apply the epilogue WHAT to a product."""
    if WHAT == HIDDEN:
        value = tl.where(value > 0, value, value * slope)
        if DROP:
            # Only what is dropped is stored as zero, so that the backward pass needs no mask: see GATE.
            value = tl.where(early != 0, tl.where(value == 0, -1e-30, value), 0.0)
    if WHAT == JOIN:
        value += early.to(tl.float32) * rstd[None, :] + shift[None, :]
        value = tl.where(value > 0, value, value * slope)
    if WHAT == GATE:
        seen = early.to(tl.float32)
        value = tl.where(seen > 0, value, value * slope)
        if DROP:
            value = tl.where(seen == 0, 0.0, value)
    if WHAT == ADD:
        value += early.to(tl.float32)
    return _with_ones(value, tl.arange(0, K.columns), K) if WHAT <= JOIN else value


@triton.jit(do_not_specialize=["images"])
def convolve(
    x, w, out, beside, before, stats, sums, images, slope, WHAT: tl.constexpr, DROP: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Convolve. A program works through many tiles, so that sums per channel are few and in a fixed order.

    `beside` holds the mask of HIDDEN, and what the other epilogues call the residual.
    """
    pid = tl.program_id(0)
    co = tl.arange(0, K.columns)
    # Copies of 16 bytes are half as many as the 8-byte ones that would go through the L1 cache.
    k = tl.max_contiguous(tl.arange(0, K.depth), 8)
    shift = tl.zeros([K.columns], tl.float32)
    rstd = tl.zeros([K.columns], tl.float32)
    first = tl.zeros([K.rows // 16, 8, K.columns], tl.float32)
    second = tl.zeros([K.rows // 16, 8, K.columns], tl.float32)
    empty = tl.zeros([K.rows, K.columns], tl.float32)
    if WHAT == JOIN:
        rstd = tl.load(stats + K.columns + co)
        shift = -tl.load(stats + co) * rstd
    weights = w + tl.arange(0, K.depth)[:, None] * K.columns + co[None, :]
    w0 = tl.load(weights)  # loaded once: they stay in shared memory for all tiles
    w1 = tl.load(weights + K.depth * K.columns)
    w2 = tl.load(weights + 2 * K.depth * K.columns)
    # A program has an equal share of all rows of all columns of tiles, and walks down each column it meets.
    rows = tl.cdiv(images * K.width, K.rows) * K.height
    share = tl.cdiv(rows, tl.num_programs(0))
    start = pid * share
    stop = tl.minimum(start + share, rows)
    for column in range(start // K.height, tl.cdiv(stop, K.height)):
        top = tl.maximum(start - column * K.height, 0)
        bottom = tl.minimum(stop - column * K.height, K.height)
        place = column * K.rows + tl.arange(0, K.rows)
        image = place // K.width
        pixel = image * (K.height * K.width) + place % K.width
        real = place < images * K.width
        at = (pixel * K.pitch)[:, None] + co[None, :]
        beside_at = (image * K.pitch)[:, None] + co[None, :] if WHAT == HIDDEN else at
        above = empty
        here = empty
        for row in range(top - 1, bottom + 1):
            inside = real & (row >= 0) & (row < K.height)
            a = _three(x + row * (K.width * K.pitch), pixel, inside, place % K.width, k, K)
            back = (row - 1) * (K.width * K.pitch)
            ok = (real & (row > top))[:, None] & (co < K.pitch)[None, :]
            # Tiles for the epilogue are loaded before the products, so that they arrive with them.
            early, more = empty, empty
            if beside is not None:
                early = tl.load(beside + (0 if WHAT == HIDDEN else back) + beside_at, mask=ok, other=0.0)
            if before is not None:
                more = tl.load(before + back + at, mask=ok, other=0.0)
            # The sum that is needed now comes last: waiting for it waits for all, and the others can move.
            next_here = tl.dot(a, w0, empty, input_precision="ieee")
            next_above = tl.dot(a, w1, here, input_precision="ieee")
            done = tl.dot(a, w2, above, input_precision="ieee")
            above = next_above
            here = next_here
            value = _finish(done, early, shift, rstd, slope, WHAT, DROP, K)
            tl.store(out + back + at, value.to(out.dtype.element_ty), mask=ok)
            # Sums are of values before rounding: a second conversion would cost more than the whole sum.
            if sums is not None:
                value = tl.where(ok, value, 0.0)
                first += _pairs(value)
                second += _pairs(value * (more.to(tl.float32) if WHAT == ADD else value))
    if sums is not None:
        tl.store(sums + pid * 2 * K.columns + co, tl.sum(tl.sum(first, axis=0), axis=0))
        tl.store(sums + pid * 2 * K.columns + K.columns + co, tl.sum(tl.sum(second, axis=0), axis=0))


@triton.jit
def _gradient(g, pixel, ok, co, K: tl.constexpr):
    here = ok[:, None] & (co < K.pitch)[None, :]
    return tl.load(g + (pixel * K.pitch)[:, None] + co[None, :], mask=here, other=0.0)


@triton.jit(do_not_specialize=["images"])
def correlate(x, g, parts, images, K: tl.constexpr):
    """Compute the gradient of packed weights: a sum over pixels of input times gradient, one part per program."""
    pid = tl.program_id(0)
    pixels = images * K.height * K.width
    co = tl.arange(0, K.columns)
    # Copies of 16 bytes are half as many as the 8-byte ones that would go through the L1 cache.
    k = tl.max_contiguous(tl.arange(0, K.depth), 8)
    acc0 = tl.zeros([K.columns, K.depth], tl.float32)
    acc1 = tl.zeros([K.columns, K.depth], tl.float32)
    acc2 = tl.zeros([K.columns, K.depth], tl.float32)
    for tile in range(pid, tl.cdiv(pixels, K.rows), tl.num_programs(0)):
        pixel = tile * K.rows + tl.arange(0, K.rows)
        col = pixel % K.width
        row = (pixel // K.width) % K.height
        real = pixel < pixels
        a = _three(x, pixel, real, col, k, K)
        # The gradient is read at three rows rather than the input, which is three times as wide.
        below = _gradient(g, pixel + K.width, real & (row < K.height - 1), co, K)
        at = _gradient(g, pixel, real, co, K)
        above = _gradient(g, pixel - K.width, real & (row > 0), co, K)
        acc0 = tl.dot(tl.trans(below), a, acc0, input_precision="ieee")
        acc1 = tl.dot(tl.trans(at), a, acc1, input_precision="ieee")
        acc2 = tl.dot(tl.trans(above), a, acc2, input_precision="ieee")
    to = parts + pid * 3 * K.depth * K.columns + tl.arange(0, K.depth)[None, :] * K.columns + co[:, None]
    used = (tl.arange(0, K.depth) < 3 * K.pitch)[None, :] & (co < K.pitch)[:, None]
    tl.store(to, acc0, mask=used)
    tl.store(to + K.depth * K.columns, acc1, mask=used)
    tl.store(to + 2 * K.depth * K.columns, acc2, mask=used)
