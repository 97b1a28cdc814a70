"""What is left between the convolutions: in and out of the layout, and batch norm's backward pass. Triton."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def enter(
    x,
    out,
    before,
    sums,
    M,
    C: tl.constexpr,
    P: tl.constexpr,
    WIDTH: tl.constexpr,
    ONES: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Pixels of C channels become pixels of P. SUMS: of the values, and of their products with `before`."""
    co = tl.arange(0, WIDTH)
    first = tl.zeros([WIDTH], tl.float32)
    second = tl.zeros([WIDTH], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        m = tile * ROWS + tl.arange(0, ROWS)
        held = (m < M)[:, None] & (co < C)[None, :]
        here = (m < M)[:, None] & (co < P)[None, :]
        at = (m * P)[:, None] + co[None, :]
        value = tl.load(x + (m * C)[:, None] + co[None, :], mask=held, other=0.0).to(tl.float32)
        if ONES:
            value = tl.where((co >= C)[None, :], tl.where((co < C + 3)[None, :], 1.0, 0.0), value)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=here)
        if SUMS:
            first += tl.sum(value, axis=0)
            second += tl.sum(value * tl.load(before + at, mask=here, other=0.0).to(tl.float32), axis=0)
    if SUMS:
        at = sums + tl.program_id(0) * 2 * WIDTH + co
        tl.store(at, first)
        tl.store(at + WIDTH, second)


@triton.jit(do_not_specialize=["M"])
def leave(
    x,
    out,
    stats,
    M,
    C: tl.constexpr,
    P: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Pixels of P channels become pixels of C, normalised where NORM."""
    co = tl.arange(0, WIDTH)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = (m < M)[:, None] & (co < C)[None, :]
    value = tl.load(x + (m * P)[:, None] + co[None, :], mask=held, other=0.0).to(tl.float32)
    if NORM:
        value = (value - tl.load(stats + co)[None, :]) * tl.load(stats + WIDTH + co)[None, :]
    tl.store(out + (m * C)[:, None] + co[None, :], value.to(out.dtype.element_ty), mask=held)


@triton.jit
def total(sums, programs, co, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Sums over programs of some channels, in a fixed order."""
    first = tl.zeros([CHUNK, co.shape[0]], tl.float32)
    second = tl.zeros([CHUNK, co.shape[0]], tl.float32)
    for start in range(0, programs, CHUNK):
        part = start + tl.arange(0, CHUNK)
        at = sums + (part * 2 * WIDTH)[:, None] + co[None, :]
        first += tl.load(at, mask=(part < programs)[:, None], other=0.0)
        second += tl.load(at + WIDTH, mask=(part < programs)[:, None], other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit(do_not_specialize=["programs"])
def average(sums, stats, out, programs, share, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """Means of g and of g times normalised y, from sums of g and of g times y: some channels a program."""
    co = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first, second = total(sums, programs, co, WIDTH, CHUNK)
    normal = (second - first * tl.load(stats + co)) * tl.load(stats + WIDTH + co)
    tl.store(out + co, first * share)
    tl.store(out + WIDTH + co, normal * share)


@triton.jit(do_not_specialize=["M"])
def unnormalise(
    g,
    y,
    out,
    stats,
    means,
    M,
    slope,
    C: tl.constexpr,
    P: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Back through batch norm and a leaky ReLU. means: those of g and of g times normalised y."""
    co = tl.arange(0, WIDTH)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = (m * P)[:, None] + co[None, :]
    here = (m < M)[:, None] & (co < P)[None, :]
    value = tl.load(y + at, mask=here, other=0.0).to(tl.float32)
    rstd = tl.load(stats + WIDTH + co)[None, :]
    normal = (value - tl.load(stats + co)[None, :]) * rstd
    back = tl.load(g + at, mask=here, other=0.0).to(tl.float32) - tl.load(means + co)[None, :]
    back = (back - normal * tl.load(means + WIDTH + co)[None, :]) * rstd
    back = tl.where(value > 0, back, back * slope)
    tl.store(out + at, tl.where((co < C)[None, :], back, 0.0).to(out.dtype.element_ty), mask=here)
