"""Device code of `picard.py`. Triton."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit
def step(
    z,
    Tz,
    index,
    active,
    residual,
    allowed,
    steps,
    sums,
    size,
    atol,
    rtol,
    scale,
    damping,
    ALL: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Let one program be one sample. A sample that has stopped costs one load."""
    row = tl.program_id(0)
    sample = row.to(tl.int64) if ALL else tl.load(index + row)
    if tl.load(active + sample) != 0:
        kind = residual.dtype.element_ty
        start = row.to(tl.int64) * size
        moved = tl.zeros((BLOCK,), kind)
        length = tl.zeros((BLOCK,), kind)
        for begin in range(0, size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            old = tl.load(z + start + at, mask=at < size, other=0.0).to(kind)
            new = tl.load(Tz + start + at, mask=at < size, other=0.0).to(kind)
            change = new - old
            moved += change * change
            length += new * new
            tl.store(z + start + at, new - damping * change, mask=at < size)
        r, t = tl.sum(moved, 0), tl.sum(length, 0)
        if not FIRST:
            r += tl.load(sums + 2 * row)
            t += tl.load(sums + 2 * row + 1)
        if LAST:
            r, t = tl.sqrt(r) * scale, tl.sqrt(t) * scale
            bound = atol + rtol * t
            inside = (r < float("inf")) & (t < float("inf"))
            tl.store(residual + sample, r)
            tl.store(allowed + sample, bound)
            tl.store(steps + sample, tl.load(steps + sample) + 1)
            tl.store(active + sample, inside & (r > bound))
        else:
            tl.store(sums + 2 * row, r)
            tl.store(sums + 2 * row + 1, t)
