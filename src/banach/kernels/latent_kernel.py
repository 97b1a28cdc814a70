"""Device code of `latent.py`: u <- R(u, v) until the residual is small, in one Triton kernel.

With known statistics (eval mode) one program solves one image, then takes the next. With batch statistics (train
mode) all programs run in step, each on its own images, and wait for each other at every batch norm. The residual
of a step is exchanged together with the first batch norm of the next, so one step more is started and dropped.
Images that are convolved have a border of zeros in memory: no load needs a border test. K: see `latent.Constants`.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

# A float32 number is multiplied as a sum of two float16 numbers: its leading 11 bits and, times FINER, the rest.
# Pixels are divided by LESS first, so that they may be as large as 10^6.
FINER = tl.constexpr(2048.0)
LESS = tl.constexpr(16.0)
LOST = tl.constexpr(3)  # exit code: a program waited in vain for the others


@triton.jit
def pack(w, out, counters, K: tl.constexpr):
    """Rearrange weights (layers, C, C, 3, 3) to (layers, groups, columns out, depth in), one tap per program."""
    layer = tl.program_id(0) // 9
    tap = tl.program_id(0) % 9
    if tl.program_id(0) == 0:  # so that a captured solve can be replayed
        tl.store(counters + tl.arange(0, 2), tl.zeros([2], tl.int32))
    ci = tl.arange(0, K.depth)
    co = tl.arange(0, K.columns)
    C: tl.constexpr = K.channels
    real = (co < C)[:, None] & (ci < C)[None, :]
    weight = tl.load(w + (layer * C * C + co * C)[:, None] * 9 + (ci * 9)[None, :] + tap, mask=real, other=0.0)
    group = tap // 3 if K.groups == 3 else tap
    column = tap % 3 * K.pitch if K.groups == 3 else 0
    # The last tap of a group pads it with zeros.
    fills = tl.where(tap % 3 == 2, K.depth - 2 * K.pitch, K.pitch) if K.groups == 3 else K.depth
    to = out + ((layer * K.groups + group) * K.columns + co)[:, None] * K.depth + (column + ci)[None, :]
    here = (co < K.columns)[:, None] & (ci < fills)[None, :]
    _store_operand(to, 2 * K.blocks * K.groups * K.depth * K.columns, weight, here, K)


@triton.jit
def _window(m, K: tl.constexpr):
    """Return where the 3x3 window of each pixel begins in an image with a border."""
    q = m % (K.height * K.width)
    return m // (K.height * K.width) * K.area + (q // K.width * (K.width + 2) + q % K.width) * K.pitch


@triton.jit
def _product(x, w, begin, low, groups, K: tl.constexpr):
    """Convolve at some pixels: one matrix product per tap or, of three groups, per row of the kernel.

    K.split: numbers have two parts, the second `low` elements further on; the least of four products is left out.
    """
    k = tl.arange(0, K.depth)
    co = tl.arange(0, K.columns)
    acc = tl.zeros([begin.shape[0], K.columns], tl.float32)
    one = acc
    two = acc
    from_x = x + begin[:, None] + k[None, :]
    if K.near:
        # Copies of 8 bytes go through the L1 cache, where other taps find the same pixel.
        from_x = tl.max_contiguous(from_x, (1, 4))
    from_w = w + (co * K.depth)[:, None] + k[None, :]
    LOW: tl.constexpr = 2 * K.blocks * K.groups * K.depth * K.columns
    # A constant nine would be unrolled and run out of registers: then the count is an argument.
    for group in tl.range(0, groups if K.groups == 9 else K.groups, num_stages=K.stages):
        row = group if K.groups == 3 else group // 3
        column = 0 if K.groups == 3 else group % 3
        at_x = from_x + (row * (K.width + 2) + column) * K.pitch
        at_w = from_w + group * (K.depth * K.columns)
        a = tl.load(at_x)
        b = tl.load(at_w)
        if K.split:
            # Three sums: a single one, passed from product to product, would move between warps.
            one = tl.dot(tl.load(at_x + low), tl.trans(b), one)
            two = tl.dot(a, tl.trans(tl.load(at_w + LOW)), two)
            acc = tl.dot(a, tl.trans(b), acc)
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return LESS * (acc + (one + two) / FINER) if K.split else acc


@triton.jit
def _kept_weights(w, K: tl.constexpr):
    """Load the weights of the three rows of a kernel, if they are kept for all tiles of pixels."""
    w0, w1, w2 = 0.0, 0.0, 0.0
    if K.keep:
        at = w + (tl.arange(0, K.columns) * K.depth)[:, None] + tl.arange(0, K.depth)[None, :]
        w0 = tl.load(at)
        w1 = tl.load(at + K.depth * K.columns)
        w2 = tl.load(at + 2 * K.depth * K.columns)
    return w0, w1, w2


@triton.jit
def _convolve(x, w, w0, w1, w2, begin, low, groups, K: tl.constexpr):
    """Convolve at pixels whose windows begin at `begin`, with weights that are kept (w0, w1, w2) or in memory."""
    if K.keep:
        # Pixels go through the L1 cache, where one row of the window finds those of another.
        from_x = x + begin[:, None] + tl.arange(0, K.depth)[None, :]
        a0 = tl.load(from_x)
        a1 = tl.load(from_x + (K.width + 2) * K.pitch)
        a2 = tl.load(from_x + 2 * (K.width + 2) * K.pitch)
        y = tl.zeros([begin.shape[0], K.columns], tl.float32)
        y = tl.dot(a0, tl.trans(w0), y, input_precision="ieee")
        y = tl.dot(a1, tl.trans(w1), y, input_precision="ieee")
        y = tl.dot(a2, tl.trans(w2), y, input_precision="ieee")
    else:
        y = _product(x, w, begin, low, groups, K)
    return y


@triton.jit
def _store_operand(to, low, value, here, K: tl.constexpr):
    """Store numbers for a product. What is too large for the stored type becomes infinite, so not finite."""
    high = value.to(to.dtype.element_ty)
    tl.store(to, high, mask=here)
    if K.split:
        rest = (value - high.to(tl.float32)) * FINER
        tl.store(to + low, rest.to(to.dtype.element_ty), mask=here)


@triton.jit
def _store_pixels(p, windows, low, value, here, K: tl.constexpr):
    """Store pixels, whose windows begin at `windows`, for a product."""
    center = windows + (K.width + 3) * K.pitch
    to = p + center[:, None] + tl.arange(0, K.columns)[None, :]
    _store_operand(to, low, value / LESS if K.split else value, here, K)


@triton.jit
def _tile(m, end, K: tl.constexpr):
    """Return offsets of the pixels m, and which numbers exist."""
    co = tl.arange(0, K.columns)
    return (m * K.pitch)[:, None] + co[None, :], (m < end)[:, None] & (co < K.pitch)[None, :]


@triton.jit
def _leaky(value, slope):
    return tl.where(value > 0, value, value * slope)


@triton.jit
def _zero(p, begin, end):
    for start in range(begin, end, 2048):
        at = start + tl.arange(0, 2048)
        tl.store(p + at, tl.zeros([2048], p.dtype.element_ty), mask=at < end)


@triton.jit
def _hidden(operand, hidden, w, bias, begin, end, low, groups, slope, K: tl.constexpr):
    """Compute the first convolution of a block and its leaky ReLU, at all pixels of a program."""
    shift = tl.load(bias + tl.arange(0, K.columns))
    w0, w1, w2 = _kept_weights(w, K)
    for tile in tl.range(begin, end, K.rows, num_stages=1):
        m = tile + tl.arange(0, K.rows)
        windows = _window(tl.minimum(m, end - 1), K)
        y = _convolve(operand, w, w0, w1, w2, windows, low, groups, K)
        _, here = _tile(m, end, K)
        _store_pixels(hidden, windows, low, _leaky(y + shift[None, :], slope), here, K)
    tl.debug_barrier()


@triton.jit
def _square(value, here, K: tl.constexpr):
    """Return the squared norm of a tile: of its worst pixel, or of all. Infinite if a number is not finite."""
    value = tl.where(here, value, 0.0)
    pixels = tl.sum(value * value, axis=1)
    pixels = tl.where(pixels < float("inf"), pixels, float("inf"))  # a maximum would ignore NaN
    return tl.max(pixels, axis=0) if K.worst_pixel else tl.sum(pixels, axis=0)


@triton.jit
def _both(a, b, K: tl.constexpr):
    """Return the squared norm of two parts, from that of each."""
    return tl.maximum(a, b) if K.worst_pixel else a + b


@triton.jit
def _normalise(y, m, end, mean, rstd, last, before, after, parts, K: tl.constexpr):
    """Normalise what a block gave, the next block's input or iterate; return squared norms of residual and T(z).

    K.lazy: `stream` keeps what the block gave, except after the last block.
    """
    stream, operand, held, low, inner, outer = parts
    at, here = _tile(m, end, K)
    x = (y - mean[None, :]) * rstd[None, :]
    moved, size = 0.0, 0.0
    if last:
        z = outer * x
        moved = _square(z - tl.load(before + at, mask=here, other=0.0), here, K)
        if K.relative:
            size = _square(z, here, K)
        tl.store(after + at, z, mask=here)
        x = tl.load(held + at, mask=here, other=0.0) + inner * z
        if K.lazy:
            tl.store(stream + at, x, mask=here)
    if not K.lazy:
        tl.store(stream + at, x, mask=here)
    _store_pixels(operand, _window(m, K), low, x, here, K)
    return moved, size


@triton.jit
def _barrier(counter, target, K: tl.constexpr):
    """Wait for all programs, 0 if in vain. Reads after it that bypass the L1 cache (.cg) see earlier writes."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")
    seen = tl.load(counter, volatile=True)  # polled by loads: atomics would delay programs that still count
    reads = 0
    while (seen < target) & (reads < K.spins):
        seen = tl.load(counter, volatile=True)
        reads += 1
    seen = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()
    return (seen >= target).to(tl.int32)


@triton.jit
def _statistics(sums, pivot, programs, share, eps, K: tl.constexpr):
    """Return mean and 1 / deviation from all programs' sums of values minus `pivot`, so that nothing cancels."""
    part = tl.arange(0, K.chunk)
    both = tl.arange(0, 2 * K.columns)
    at = sums + (part * 2 * K.columns)[:, None] + both[None, :]
    here = (part < programs)[:, None] & (both % K.columns < K.pitch)[None, :]
    means = tl.sum(tl.load(at, mask=here, other=0.0, cache_modifier=".cg"), axis=0) * share
    first, second = tl.split(tl.trans(tl.reshape(means, [2, K.columns])))
    variance = tl.maximum(second - first * first, 0.0)
    return pivot + first, 1.0 / tl.sqrt(variance + eps)


@triton.jit
def _gather(tests, programs, K: tl.constexpr):
    """Return the squared norms of the residual and of T(z) over all programs."""
    part = tl.arange(0, K.chunk)
    moved = tl.load(tests + 2 * part, mask=part < programs, other=0.0, cache_modifier=".cg")
    size = tl.load(tests + 2 * part + 1, mask=part < programs, other=0.0, cache_modifier=".cg")
    if K.worst_pixel:
        return tl.max(moved, axis=0), tl.max(size, axis=0)
    return tl.sum(moved, axis=0), tl.sum(size, axis=0)


@triton.jit
def _judge(moved, size, atol, rtol, least, old, new, best, K: tl.constexpr):
    """Return residual, code (0 continue, 1 converged, 2 not finite), least residual, slots. atol is unscaled."""
    norm = tl.sqrt(moved)
    allowed = atol
    finite = moved < float("inf")
    if K.relative:
        allowed = atol + rtol * tl.sqrt(size)
        finite = finite & (size < float("inf"))
    code = tl.where(finite, tl.where(norm <= allowed, 1, 0), 2).to(tl.int32)
    best = tl.where(norm < least, old, best)
    least = tl.where(norm < least, norm, least)
    free = tl.where((best != 1) & (new != 1), 1, 2)
    return norm, code, least, new, tl.where((best != 0) & (new != 0), 0, free), best


@triton.jit
def _start(v, z0, held, slots, stream, operand, begin, end, shift, low, inner, K: tl.constexpr):
    """Copy v and z0 to the program's memory, and compute the input of the first block."""
    co = tl.arange(0, K.columns)
    for tile in range(begin, end, K.rows):
        m = tile + tl.arange(0, K.rows)
        real = (m < end)[:, None] & (co < K.channels)[None, :]
        given = ((m + shift) * K.channels)[:, None] + co[None, :]
        at, here = _tile(m, end, K)
        x = tl.load(v + given, mask=real, other=0.0).to(tl.float32)
        z = tl.zeros([K.rows, K.columns], tl.float32)
        if z0 is not None:
            z = tl.load(z0 + given, mask=real, other=0.0).to(tl.float32)
        tl.store(held + at, x, mask=here)
        tl.store(slots + at, z, mask=here)
        x += inner * z
        tl.store(stream + at, x, mask=here)
        _store_pixels(operand, _window(m, K), low, x, here, K)
    tl.debug_barrier()


@triton.jit
def _finish(
    slot, value, residual, steps, flags, begin, end, shift, image, count, images, code, diverged, made, norm,
    K: tl.constexpr,
):  # fmt: skip
    """Write the result of `count` images, from `image` on. After a timeout at a barrier: NaN and -1."""
    co = tl.arange(0, K.columns)
    for tile in range(begin, end, K.rows):
        m = tile + tl.arange(0, K.rows)
        real = (m < end)[:, None] & (co < K.channels)[None, :]
        z = tl.load(slot + (m * K.pitch)[:, None] + co[None, :], mask=real, other=0.0)
        z = tl.where(code == LOST, float("nan"), z)
        tl.store(value + ((m + shift) * K.channels)[:, None] + co[None, :], z, mask=real)
    for own in range(image, image + count):
        tl.store(residual + own, tl.where(code == LOST, float("nan"), norm))
        tl.store(steps + own, tl.where(code == LOST, -1, made).to(tl.int64))
        tl.store(flags + own, tl.where(code == 1, 1, 0).to(tl.int8))
        tl.store(flags + images + own, tl.where(code < 0, 1, 0).to(tl.int8))
        tl.store(flags + 2 * images + own, tl.where(code >= 2, 1, 0).to(tl.int8))
        tl.store(flags + 3 * images + own, tl.where(diverged, 1, 0).to(tl.int8))
    tl.debug_barrier()


@triton.jit(do_not_specialize=["images", "max_steps", "groups"])
def iterate(
    v, z0, w, bias, known, slots, held, stream, operand, hidden, sums, tests, pivots, counters,
    value, residual, steps, flags,
    images, max_steps, groups, atol, rtol, scale, share, eps, inner, outer, slope, slope_after, K: tl.constexpr,
):  # fmt: skip
    """Solve. Memory of the programs: three `slots` for iterates, `held` for v, `stream` for the input of a block,
    `operand` and `hidden` for what its two convolutions read. `sums` and `tests` are read by all programs.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    co = tl.arange(0, K.columns)
    PIXELS: tl.constexpr = K.height * K.width
    WIDTH: tl.constexpr = K.columns
    LAYER: tl.constexpr = K.groups * K.depth * K.columns
    if K.coupled:
        places = images
        first_place = pid * images // programs
        own = (pid + 1) * images // programs - first_place
        image = first_place
    else:
        places = programs
        first_place = pid
        own = 1
        image = tl.atomic_add(counters + 1, 1)
    slot = places * (PIXELS * K.pitch)
    low = places * K.area
    parts = (stream, operand, held, low, inner, outer)  # of the arguments, for `_normalise`
    begin = first_place * PIXELS
    end = begin + own * PIXELS
    # In train mode with several tiles `stream` holds values before batch norm, with these statistics.
    x_mean = tl.zeros([WIDTH], tl.float32)
    x_rstd = tl.full([WIDTH], 1.0, tl.float32)
    for half in tl.static_range(2 if K.split else 1):
        _zero(operand + half * low, first_place * K.area, (first_place + own) * K.area)
        _zero(hidden + half * low, first_place * K.area, (first_place + own) * K.area)
    _zero(pivots, pid * K.blocks * WIDTH, (pid + 1) * K.blocks * WIDTH)
    tl.debug_barrier()
    while image < images:
        shift = (image - first_place) * PIXELS
        _start(v, z0, held, slots, stream, operand, begin, end, shift, low, inner, K)
        made = 0  # evaluations so far
        met = 0  # barriers so far
        code = 0  # of `_judge`, or LOST
        old, new, best = 0, 1, 0  # slots of z, of T(z), and of the iterate with the least residual
        norm, least = float("inf"), float("inf")
        moved, size = 0.0, 0.0  # squared norms of the residual and of T(z)
        while (code == 0) & (made < max_steps):
            for block in range(K.blocks):
                if code == 0:
                    last = block == K.blocks - 1
                    first_w, first_bias = w + block * 2 * LAYER, bias + block * 2 * WIDTH
                    _hidden(operand, hidden, first_w, first_bias, begin, end, low, groups, slope, K)
                    if last:
                        moved, size = 0.0, 0.0
                    if K.coupled:
                        pivot = pivots + (pid * K.blocks + block) * WIDTH + co
                        mean = tl.load(pivot)
                        rstd = mean
                    else:
                        mean = tl.load(known + block * WIDTH + co)
                        rstd = tl.load(known + (K.blocks + block) * WIDTH + co)
                    first = tl.zeros([K.rows, WIDTH] if K.lazy else [WIDTH], tl.float32)
                    second = tl.zeros([K.rows, WIDTH] if K.lazy else [WIDTH], tl.float32)
                    kept = tl.zeros([K.rows if K.alone else 1, WIDTH], tl.float32)
                    second_w = w + (block * 2 + 1) * LAYER
                    w0, w1, w2 = _kept_weights(second_w, K)
                    second_shift = tl.load(bias + (block * 2 + 1) * WIDTH + co)
                    for tile in tl.range(begin, begin + 1 if K.alone else end, K.rows, num_stages=1):
                        m = tile + tl.arange(0, K.rows)
                        at, here = _tile(m, end, K)
                        windows = _window(tl.minimum(m, end - 1), K)
                        y = _convolve(hidden, second_w, w0, w1, w2, windows, low, groups, K)
                        x = tl.load(stream + at, mask=here, other=0.0)
                        if K.lazy:
                            x = (x - x_mean[None, :]) * x_rstd[None, :]
                        y += second_shift[None, :]
                        y = _leaky(y + x, slope_after) if K.late else _leaky(y, slope_after) + x
                        if K.lazy:
                            tl.store(stream + at, y, mask=here)
                            y = tl.where(here, y - mean[None, :], 0.0)
                            first, second = first + y, second + y * y
                        elif K.alone:
                            kept = y
                            y = tl.where(here, y - mean[None, :], 0.0)
                            first, second = tl.sum(y, axis=0), tl.sum(y * y, axis=0)
                        else:
                            before, after = slots + old * slot, slots + new * slot
                            a, b = _normalise(y, m, end, mean, rstd, last, before, after, parts, K)
                            moved, size = _both(moved, a, K), _both(size, b, K)
                    if K.lazy:
                        first, second = tl.sum(first, axis=0), tl.sum(second, axis=0)
                    tl.debug_barrier()
                    if K.coupled:
                        # Two buffers in turn: a program may write its next sums while others read these.
                        all_sums = sums + met % 2 * programs * (2 * WIDTH)
                        tl.store(all_sums + pid * 2 * WIDTH + co, first)
                        tl.store(all_sums + pid * 2 * WIDTH + WIDTH + co, second)
                        met += 1
                        together = _barrier(counters, met * programs, K)
                        if (block == 0) & (made > 0):
                            a, b = _gather(tests + made % 2 * programs * 2, programs, K)
                            norm, code, least, old, new, best = _judge(a, b, atol, rtol, least, old, new, best, K)
                        code = tl.where(together == 0, LOST, code)
                        if code == 0:
                            mean, rstd = _statistics(all_sums, mean, programs, share, eps, K)
                            tl.store(pivot, mean)
                            before, after = slots + old * slot, slots + new * slot
                            if K.alone:
                                m = begin + tl.arange(0, K.rows)
                                moved, size = _normalise(kept, m, end, mean, rstd, last, before, after, parts, K)
                            else:
                                for tile in range(begin, end, K.rows):
                                    m = tile + tl.arange(0, K.rows)
                                    at, here = _tile(m, end, K)
                                    y = tl.load(stream + at, mask=here, other=0.0)
                                    a, b = _normalise(y, m, end, mean, rstd, last, before, after, parts, K)
                                    moved, size = _both(moved, a, K), _both(size, b, K)
                                # The next block normalises its own input; the next iterate is ready.
                                x_mean = tl.where(last, 0.0, mean)
                                x_rstd = tl.where(last, 1.0, rstd)
                            tl.debug_barrier()
            if code == 0:
                made += 1
                if K.coupled:
                    mine = tests + (made % 2 * programs + pid) * 2
                    tl.store(mine, moved)
                    tl.store(mine + 1, size)
                else:
                    norm, code, least, old, new, best = _judge(moved, size, atol, rtol, least, old, new, best, K)
        if K.coupled and (code == 0) & (made > 0):
            together = _barrier(counters, (met + 1) * programs, K)
            a, b = _gather(tests + made % 2 * programs * 2, programs, K)
            norm, code, least, old, new, best = _judge(a, b, atol, rtol, least, old, new, best, K)
            code = tl.where(together == 0, LOST, code)
        diverged = (code == 0) & (norm > 10.0 * least)  # as `solve` has it: then the best iterate is kept
        worse = diverged | (code == 2)
        _finish(
            slots + tl.where(worse, best, old) * slot, value, residual, steps, flags, begin, end, shift, image,
            own, images, code, diverged, made, tl.where(worse, least, norm) * scale, K,
        )  # fmt: skip
        image = images if K.coupled else tl.atomic_add(counters + 1, 1)
