"""The kernel of a Picard step."""

import triton
import triton.language as tl


@triton.jit
def step(z, Tz, active, residual, allowed, steps, sums, count, size, atol, rtol, scale, damping,
         FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program is one sample. A sample that has stopped costs one load."""
    row = tl.program_id(0)
    if tl.load(active + row) != 0:
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
            r += tl.load(sums + row)
            t += tl.load(sums + count + row)
        if LAST:
            r, t = tl.sqrt(r) * scale, tl.sqrt(t) * scale
            bound = atol + rtol * t
            inside = (r < float("inf")) & (t < float("inf"))
            tl.store(residual + row, r)
            tl.store(allowed + row, bound)
            tl.store(steps + row, tl.load(steps + row) + 1)
            tl.store(active + row, inside & (r > bound))
        else:
            tl.store(sums + row, r)
            tl.store(sums + count + row, t)
