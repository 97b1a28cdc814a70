"""Device code of `picard.py`. Triton."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit
def step(
    z, Tz, index, active, residual, least, allowed, steps, arrived, sums, size, atol, rtol, scale, damping,
    FIRST: tl.constexpr, SPLIT: tl.constexpr, TOTAL: tl.constexpr, PADDED: tl.constexpr, ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Move a part of one sample; the program that comes last of the sample's TOTAL ones tests it.

    A sample that has stopped costs one load. `sums` holds the two sums of every program, and its programs for this
    tensor begin at FIRST. They are added in one order, so that a run repeats.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    sample = row.to(tl.int64) if ALL else tl.load(index + row)
    if tl.load(active + sample) != 0:
        kind = residual.dtype.element_ty
        start = row.to(tl.int64) * size
        length = tl.cdiv(tl.cdiv(size, BLOCK), SPLIT) * BLOCK
        moved = tl.zeros((BLOCK,), kind)
        square = tl.zeros((BLOCK,), kind)
        for begin in range(part * length, tl.minimum((part + 1) * length, size), BLOCK):
            at = begin + tl.arange(0, BLOCK)
            old = tl.load(z + start + at, mask=at < size, other=0.0).to(kind)
            new = tl.load(Tz + start + at, mask=at < size, other=0.0).to(kind)
            change = new - old
            moved += change * change
            square += new * new
            tl.store(z + start + at, new - damping * change, mask=at < size)
        r, t = tl.sum(moved, 0), tl.sum(square, 0)
        last = True
        if TOTAL > 1:
            mine = sums + (sample * TOTAL + FIRST + part) * 2
            tl.store(mine, r)
            tl.store(mine + 1, t)
            tl.debug_barrier()
            last = tl.atomic_add(arrived + sample, 1) == TOTAL - 1
        if last:
            if TOTAL > 1:
                tl.store(arrived + sample, 0)
                every = tl.arange(0, PADDED)
                all_of_them = sums + (sample * TOTAL + every) * 2
                r = tl.sum(tl.load(all_of_them, mask=every < TOTAL, other=0.0, volatile=True), 0)
                t = tl.sum(tl.load(all_of_them + 1, mask=every < TOTAL, other=0.0, volatile=True), 0)
            r, t = tl.sqrt(r) * scale, tl.sqrt(t) * scale
            bound = atol + rtol * t
            inside = (r < float("inf")) & (t < float("inf"))
            tl.store(residual + sample, r)
            tl.store(least + sample, tl.minimum(r, tl.load(least + sample)))
            tl.store(allowed + sample, bound)
            tl.store(steps + sample, tl.load(steps + sample) + 1)
            tl.store(active + sample, inside & (r > bound))
