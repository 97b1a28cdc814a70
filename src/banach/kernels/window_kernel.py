"""Device code of `window.py`: convolutions of few channels as matrix products of windows and weights. Triton.

Images are channels_last. Places of a window and their channels are counted by one number, in chunks of K.depth;
K.one_place: a chunk holds channels of one place, which are neighbours in memory. K: see `window.Window`.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit
def _source(row, col, place, K: tl.constexpr):
    """Return row and column that a pixel sees (K.back: that see it) at a place of a window, and if they exist."""
    if K.back:
        y = row + K.padding - place // K.side
        x = col + K.padding - place % K.side
    else:
        y = row * K.stride + place // K.side - K.padding
        x = col * K.stride + place % K.side - K.padding
    ok = (y >= 0) & (x >= 0)
    if K.back and K.stride > 1:
        ok = ok & (y % K.stride == 0) & (x % K.stride == 0)
        y, x = y // K.stride, x // K.stride
    return y, x, ok & (y < K.height) & (x < K.width)


@triton.jit
def _load_windows(x, m, pixels, chunk, K: tl.constexpr):
    """Load a chunk of what the pixels m see; zero outside the image."""
    image = m // (K.rows_out * K.columns_out)
    row = m // K.columns_out % K.rows_out
    col = m % K.columns_out
    if K.one_place:
        c = chunk % (K.channels_in // K.depth) * K.depth + tl.arange(0, K.depth)
        y, at, ok = _source(row, col, chunk // (K.channels_in // K.depth), K)
        at = ((image * K.height + y) * K.width + at) * K.channels_in
        seen = tl.load(x + at[:, None] + c[None, :], mask=((m < pixels) & ok)[:, None], other=0.0)
    else:
        k = chunk * K.depth + tl.arange(0, K.depth)
        y, at, ok = _source(row[:, None], col[:, None], (k // K.channels_in)[None, :], K)
        at = ((image[:, None] * K.height + y) * K.width + at) * K.channels_in + (k % K.channels_in)[None, :]
        ok = ok & (m < pixels)[:, None] & (k < K.channels_in * K.side * K.side)[None, :]
        seen = tl.load(x + at, mask=ok, other=0.0)
    return seen


@triton.jit
def _weight_offset(k, K: tl.constexpr):
    """Return the offset of the k-th weight of an output channel."""
    place = k // K.channels_in
    offset = k % K.channels_in * K.w_stride_in + place // K.side * K.w_stride_row
    return offset + place % K.side * K.w_stride_column


@triton.jit(do_not_specialize=["pixels"])
def convolve(x, w, bias, out, pixels, K: tl.constexpr):
    """Compute the convolution or, if K.back, the gradient of its input, at K.rows pixels."""
    m = tl.program_id(0) * K.rows + tl.arange(0, K.rows)
    j = tl.arange(0, K.columns)
    acc = tl.zeros([K.rows, K.columns], tl.float32)
    for chunk in tl.range(0, K.chunks, num_stages=K.stages):
        a = _load_windows(x, m, pixels, chunk, K)
        k = chunk * K.depth + tl.arange(0, K.depth)
        at = _weight_offset(k, K)
        real = (k < K.channels_in * K.side * K.side)[:, None] & (j < K.channels_out)[None, :]
        b = tl.load(w + at[:, None] + (j * K.w_stride_out)[None, :], mask=real, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=K.precision)
    if bias is not None:
        acc += tl.load(bias + j, mask=j < K.channels_out, other=0.0).to(tl.float32)[None, :]
    real = (m < pixels)[:, None] & (j < K.channels_out)[None, :]
    tl.store(out + (m * K.channels_out)[:, None] + j[None, :], acc.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["pixels", "share"])
def correlate(x, g, parts, bias_parts, pixels, share, K: tl.constexpr):
    """Compute one part of the gradients of a chunk of weights and of the bias, from `share` tiles of pixels."""
    part = tl.program_id(0)
    chunk = tl.program_id(1)
    j = tl.arange(0, K.columns)
    acc = tl.zeros([K.columns, K.depth], tl.float32)
    total = tl.zeros([K.columns], tl.float32)
    last = tl.minimum((part + 1) * share, tl.cdiv(pixels, K.rows))
    for tile in tl.range(part * share, last, num_stages=K.stages):
        m = tile * K.rows + tl.arange(0, K.rows)
        a = _load_windows(x, m, pixels, chunk, K)
        real = (m < pixels)[:, None] & (j < K.channels_out)[None, :]
        back = tl.load(g + (m * K.channels_out)[:, None] + j[None, :], mask=real, other=0.0)
        acc = tl.dot(tl.trans(back), a, acc, input_precision=K.precision)
        if bias_parts is not None:
            total += tl.sum(back.to(tl.float32), axis=0)
    k = chunk * K.depth + tl.arange(0, K.depth)
    tl.store(parts + ((part * K.columns + j) * (K.chunks * K.depth))[:, None] + k[None, :], acc)
    if bias_parts is not None and chunk == 0:
        tl.store(bias_parts + part * K.columns + j, total)


@triton.jit(do_not_specialize=["count"])
def add(parts, bias_parts, dw, db, count, BLOCK: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr):
    """Add the parts of the gradients of one output channel, in a fixed order."""
    j = tl.program_id(1)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = k < K.channels_in * K.side * K.side
    acc = tl.zeros([CHUNK, BLOCK], tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    for first in range(0, count, CHUNK):
        part = first + tl.arange(0, CHUNK)
        at = parts + ((part * K.columns + j) * (K.chunks * K.depth))[:, None] + k[None, :]
        acc += tl.load(at, mask=(part < count)[:, None] & real[None, :], other=0.0)
        if bias_parts is not None:
            total += tl.load(bias_parts + part * K.columns + j, mask=part < count, other=0.0)
    to = dw + j * K.w_stride_out + _weight_offset(k, K)
    tl.store(to, tl.sum(acc, axis=0).to(dw.dtype.element_ty), mask=real)
    if bias_parts is not None and tl.program_id(0) == 0:
        tl.store(db + j, tl.sum(total, axis=0).to(db.dtype.element_ty))
