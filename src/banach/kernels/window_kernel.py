"""Convolutions of few channels as matrix products: what pixels see through their windows, times the weights.

Triton. Pixels lie in rows, channels side by side. The places of a window and their channels are counted by one
number, in chunks; WHOLE: a chunk is channels of one place, so that it lies side by side in memory. FROM_...: the
strides of the weights.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit
def _through(
    row, col, place, H: tl.constexpr, W: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr,
    PAD: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """What a pixel sees at a place of its window: row, column, and whether that is in the image.

    BACK: from a pixel of the input to the output whose window it was seen through at that place, if there is one.
    """
    if BACK:
        y = row + PAD - place // SIDE
        x = col + PAD - place % SIDE
        ok = (y >= 0) & (x >= 0)
        if STRIDE > 1:
            ok = ok & (y % STRIDE == 0) & (x % STRIDE == 0)
            y = y // STRIDE
            x = x // STRIDE
    else:
        y = row * STRIDE + place // SIDE - PAD
        x = col * STRIDE + place % SIDE - PAD
        ok = (y >= 0) & (x >= 0)
    return y, x, ok & (y < H) & (x < W)


@triton.jit
def _seen(
    x, m, pixels, chunk,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ROWS_OUT: tl.constexpr, COLUMNS_OUT: tl.constexpr,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BACK: tl.constexpr, DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """A chunk of what the pixels m see; zero outside the image."""
    image = m // (ROWS_OUT * COLUMNS_OUT)
    row = m // COLUMNS_OUT % ROWS_OUT
    col = m % COLUMNS_OUT
    if WHOLE:
        c = tl.arange(0, DEPTH)
        if C > DEPTH:
            c += chunk % (C // DEPTH) * DEPTH
        y, at, ok = _through(row, col, chunk // (C // DEPTH), H, W, SIDE, STRIDE, PAD, BACK)
        at = ((image * H + y) * W + at) * C
        seen = tl.load(x + at[:, None] + c[None, :], mask=((m < pixels) & ok)[:, None], other=0.0)
    else:
        k = chunk * DEPTH + tl.arange(0, DEPTH)
        y, at, ok = _through(
            row[:, None], col[:, None], (k // C)[None, :], H, W, SIDE, STRIDE, PAD, BACK
        )  # fmt: skip
        at = ((image[:, None] * H + y) * W + at) * C + (k % C)[None, :]
        ok = ok & (m < pixels)[:, None] & (k < C * SIDE * SIDE)[None, :]
        seen = tl.load(x + at, mask=ok, other=0.0)
    return seen


@triton.jit(do_not_specialize=["pixels"])
def look(
    x, w, bias, out, pixels, FROM_SUMMED: tl.constexpr, FROM_MADE: tl.constexpr, FROM_ROW: tl.constexpr,
    FROM_COLUMN: tl.constexpr, C: tl.constexpr, MADE: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    ROWS_OUT: tl.constexpr, COLUMNS_OUT: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr,
    PAD: tl.constexpr, BACK: tl.constexpr,
    BIAS: tl.constexpr, DEPTH: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The convolution, or BACK the gradient of its input, at ROWS pixels."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDTH)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        a = _seen(x, m, pixels, chunk, C, H, W, ROWS_OUT, COLUMNS_OUT, SIDE, STRIDE, PAD, BACK, DEPTH, WHOLE)
        k = chunk * DEPTH + tl.arange(0, DEPTH)
        at = k % C * FROM_SUMMED + k // C // SIDE * FROM_ROW + k // C % SIDE * FROM_COLUMN
        real = (k < C * SIDE * SIDE)[:, None] & (j < MADE)[None, :]
        b = tl.load(w + at[:, None] + (j * FROM_MADE)[None, :], mask=real, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + j, mask=j < MADE, other=0.0).to(tl.float32)[None, :]
    real = (m < pixels)[:, None] & (j < MADE)[None, :]
    tl.store(out + (m * MADE)[:, None] + j[None, :], acc.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["images"])
def look_back(
    g, w, out, images, FROM_SUMMED: tl.constexpr, FROM_MADE: tl.constexpr, FROM_ROW: tl.constexpr,
    FROM_COLUMN: tl.constexpr, C: tl.constexpr, MADE: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    ROWS_OUT: tl.constexpr, COLUMNS_OUT: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr,
    PAD: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the input where windows step on by STRIDE. Pixels that windows see at the same places go
    together, one kind a program: so no product is of zeros. A chunk is channels of one place."""
    kind_y = tl.program_id(1) // STRIDE  # the first place, and every STRIDE-th after it
    kind_x = tl.program_id(1) % STRIDE
    DOWN: tl.constexpr = (ROWS_OUT + STRIDE - 1) // STRIDE
    ACROSS: tl.constexpr = (COLUMNS_OUT + STRIDE - 1) // STRIDE
    PER: tl.constexpr = C // DEPTH
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    image = m // (DOWN * ACROSS)
    row = m // ACROSS % DOWN * STRIDE + (kind_y + (STRIDE - 1) * PAD) % STRIDE
    col = m % ACROSS * STRIDE + (kind_x + (STRIDE - 1) * PAD) % STRIDE
    ok = (image < images) & (row < ROWS_OUT) & (col < COLUMNS_OUT)
    top = (row + PAD - kind_y) // STRIDE
    left = (col + PAD - kind_x) // STRIDE
    places_down = (SIDE - kind_y + STRIDE - 1) // STRIDE
    places_across = (SIDE - kind_x + STRIDE - 1) // STRIDE
    j = tl.arange(0, WIDTH)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for chunk in tl.range(0, places_down * places_across * PER, num_stages=STAGES):
        down = chunk // PER // places_across
        across = chunk // PER % places_across
        y = top - down
        x = left - across
        seen = ok & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        c = tl.arange(0, DEPTH)
        if PER > 1:
            c += chunk % PER * DEPTH
        a = tl.load(g + (((image * H + y) * W + x) * C)[:, None] + c[None, :], mask=seen[:, None], other=0.0)
        at = c * FROM_SUMMED + (kind_y + down * STRIDE) * FROM_ROW + (kind_x + across * STRIDE) * FROM_COLUMN
        b = tl.load(w + at[:, None] + (j * FROM_MADE)[None, :], mask=(j < MADE)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    to = ((image * ROWS_OUT + row) * COLUMNS_OUT + col) * MADE
    tl.store(out + to[:, None] + j[None, :], acc.to(out.dtype.element_ty), mask=ok[:, None] & (j < MADE)[None, :])


@triton.jit(do_not_specialize=["pixels", "share"])
def correlate(
    x, g, parts, bias_parts, pixels, share,
    C: tl.constexpr, MADE: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ROWS_OUT: tl.constexpr,
    COLUMNS_OUT: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BIAS: tl.constexpr,
    DEPTH: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The gradient of a chunk of the weights, and of the bias, from `share` tiles of pixels: one part of a sum."""
    part = tl.program_id(0)
    chunk = tl.program_id(1)
    j = tl.arange(0, WIDTH)
    acc = tl.zeros([WIDTH, DEPTH], tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    last = tl.minimum((part + 1) * share, tl.cdiv(pixels, ROWS))
    for tile in tl.range(part * share, last, num_stages=STAGES):
        m = tile * ROWS + tl.arange(0, ROWS)
        a = _seen(x, m, pixels, chunk, C, H, W, ROWS_OUT, COLUMNS_OUT, SIDE, STRIDE, PAD, False, DEPTH, WHOLE)
        real = (m < pixels)[:, None] & (j < MADE)[None, :]
        back = tl.load(g + (m * MADE)[:, None] + j[None, :], mask=real, other=0.0)
        acc = tl.dot(tl.trans(back), a, acc, input_precision=PRECISION)
        if BIAS:
            total += tl.sum(back.to(tl.float32), axis=0)
    k = chunk * DEPTH + tl.arange(0, DEPTH)
    tl.store(parts + ((part * WIDTH + j) * (CHUNKS * DEPTH))[:, None] + k[None, :], acc)
    if BIAS and chunk == 0:
        tl.store(bias_parts + part * WIDTH + j, total)


@triton.jit(do_not_specialize=["count"])
def add(
    parts, bias_parts, dw, db, count, FROM_SUMMED: tl.constexpr, FROM_MADE: tl.constexpr, FROM_ROW: tl.constexpr,
    FROM_COLUMN: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr, BIAS: tl.constexpr, TOTAL: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The parts of the gradients, summed in a fixed order, for one output channel: written as the weights lie."""
    j = tl.program_id(1)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = k < C * SIDE * SIDE
    acc = tl.zeros([CHUNK, BLOCK], tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    for first in range(0, count, CHUNK):
        part = first + tl.arange(0, CHUNK)
        at = parts + ((part * WIDTH + j) * TOTAL)[:, None] + k[None, :]
        acc += tl.load(at, mask=(part < count)[:, None] & real[None, :], other=0.0)
        if BIAS:
            total += tl.load(bias_parts + part * WIDTH + j, mask=part < count, other=0.0)
    to = dw + j * FROM_MADE + k % C * FROM_SUMMED + k // C // SIDE * FROM_ROW + k // C % SIDE * FROM_COLUMN
    tl.store(to, tl.sum(acc, axis=0).to(dw.dtype.element_ty), mask=real)
    if BIAS and tl.program_id(0) == 0:
        tl.store(db + j, tl.sum(total, axis=0).to(db.dtype.element_ty))
