"""Device code of `steps.py`. Triton.

A sample has taken as many steps as the loop, while it is active. So `steps` gives the slot of its new differences.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit
def picard(
    z, Tz, index, active, residual, least, allowed, steps, arrived, sums, size, atol, rtol, scale, damping,
    FIRST: tl.constexpr, SPLIT: tl.constexpr, TOTAL: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move a part of one sample; the program that comes last of the sample's TOTAL ones tests it.

    `sums` holds the two sums of every program, those for this tensor from FIRST on, added in one order.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    sample = row.to(tl.int64) if index is None else tl.load(index + row)
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


@triton.jit
def products(
    z, Tz, active, steps, before, dR, dG, sums, width, undamped,
    M: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write the new differences. Sum their products with the other ones, and those of r = T(z) - z."""
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(active + sample) != 0:
        kind = sums.dtype.element_ty
        taken = tl.load(steps + sample)
        slot = (taken + M - 1) % M
        row = sample * width
        whole = tl.num_programs(0).to(tl.int64) * width
        length = tl.cdiv(tl.cdiv(width, BLOCK), SPLIT) * BLOCK
        i = tl.arange(0, PADDED)
        norm = tl.zeros((BLOCK,), kind)
        size = tl.zeros((BLOCK,), kind)
        with_new = tl.zeros((PADDED, BLOCK), kind)
        with_r = tl.zeros((PADDED, BLOCK), kind)
        for begin in range(part * length, tl.minimum((part + 1) * length, width), BLOCK):
            at = begin + tl.arange(0, BLOCK)
            inside = at < width
            known = inside & (taken > 0)
            old = tl.load(z + row + at, mask=inside, other=0.0).to(kind)
            new = tl.load(Tz + row + at, mask=inside, other=0.0).to(kind)
            r = new - old
            norm += r * r
            size += new * new
            change = r - tl.load(before + whole + row + at, mask=known, other=0.0)
            change = change.to(dR.dtype.element_ty).to(kind)  # as it is kept
            move = old - tl.load(before + row + at, mask=known, other=0.0)
            others = (i < M)[:, None] & (i != slot)[:, None] & known[None, :]
            dRs = tl.load(dR + i[:, None] * whole + (row + at)[None, :], mask=others, other=0.0).to(kind)
            dRs = tl.where((i == slot)[:, None], change[None, :], dRs)
            with_new += dRs * change[None, :]
            with_r += dRs * r[None, :]
            tl.store(dR + slot * whole + row + at, change, mask=known)
            tl.store(dG + slot * whole + row + at, move + undamped * change, mask=known)
            tl.store(before + row + at, old, mask=inside)
            tl.store(before + whole + row + at, r, mask=inside)
        mine = sums + (sample * SPLIT + part) * (2 * M + 2)
        tl.store(mine + i, tl.sum(with_new, 1), mask=i < M)
        tl.store(mine + M + i, tl.sum(with_r, 1), mask=i < M)
        tl.store(mine + 2 * M, tl.sum(norm, 0))
        tl.store(mine + 2 * M + 1, tl.sum(size, 0))


@triton.jit
def fit(
    active, residual, least, allowed, steps, least_at, moves, gram, c, sums,
    atol, rtol, scale, ridge, bound, growth, patience,
    BOUNDED: tl.constexpr, M: tl.constexpr, PADDED: tl.constexpr, SPLIT: tl.constexpr, PADDED_SPLIT: tl.constexpr,
):  # fmt: skip
    """Test a sample, and solve for its coefficients c: zero where the fit cannot be trusted."""
    sample = tl.program_id(0).to(tl.int64)
    moving = tl.load(active + sample) != 0
    tl.store(moves + sample, moving)
    if moving:
        part = tl.arange(0, PADDED_SPLIT)
        mine = sums + (sample * SPLIT + part) * (2 * M + 2)
        here = part < SPLIT
        r = tl.sqrt(tl.sum(tl.load(mine + 2 * M, mask=here, other=0.0), 0))
        t = tl.sqrt(tl.sum(tl.load(mine + 2 * M + 1, mask=here, other=0.0), 0))
        taken = tl.load(steps + sample)
        r, t = r * scale, t * scale
        best, best_at = tl.load(least + sample), tl.load(least_at + sample)
        better = r < best
        best = tl.where(better, r, best)
        best_at = tl.where(better, (taken + 1).to(best.dtype), best_at)
        tl.store(least + sample, best)
        tl.store(least_at + sample, best_at)
        i = tl.arange(0, PADDED)
        j = i[None, :]
        entry = gram + sample * M * M + i[:, None] * M + j
        within = (i[:, None] < M) & (j < M)
        one = tl.where(i[:, None] == j, 1.0, 0.0).to(r.dtype)
        coefficients = tl.zeros((PADDED,), r.dtype)
        A = one
        if taken > 0:
            each = sums + (sample * SPLIT + part)[:, None] * (2 * M + 2) + j
            known = here[:, None] & (j < M)
            slot = (taken + M - 1) % M
            row = tl.sum(tl.load(each, mask=known, other=0.0), 0)
            b = tl.sum(tl.load(each + M, mask=known, other=0.0), 0)
            row = tl.where(i == slot, row * (1 + ridge), row)
            if taken > 1:
                A = tl.load(entry, mask=within, other=0.0) + tl.where(within, 0.0, one)
            A = tl.where(i[:, None] == slot, row[None, :], tl.where(j == slot, row[:, None], A))
            A = tl.where(within, A, one)
            tl.store(entry, A, mask=within)
            b = tl.where(i < M, b, 0.0)
            for k in tl.static_range(M):  # Gauss and Jordan; the matrix is symmetric and definite, or not trusted
                pivot_row = tl.sum(tl.where(i[:, None] == k, A, 0.0), 0)
                pivot = tl.sum(tl.where(i == k, pivot_row, 0.0), 0)
                right = tl.sum(tl.where(i == k, b, 0.0), 0) / pivot
                column = tl.sum(tl.where(j == k, A, 0.0), 1)
                column = tl.where(i == k, 0.0, column)
                A = A - column[:, None] * (pivot_row / pivot)[None, :]
                b = tl.where(i == k, right, b - column * right)
                A = tl.where(i[:, None] == k, (pivot_row / pivot)[None, :], A)
            coefficients = b
            size = tl.sqrt(tl.sum(b * b, 0))
            if not BOUNDED:
                size = size * 0.0  # NaN and infinity become NaN
            doubt = size + r / best * (bound / growth) - best_at * (bound / patience)
            trusted = doubt <= bound * (1.0 - (taken + 1) / patience)
            coefficients = tl.where(trusted, coefficients, 0.0)
        tl.store(c + sample * M + i, coefficients, mask=i < M)
        allowance = atol + rtol * t
        finite = (r < float("inf")) & (t < float("inf"))
        tl.store(residual + sample, r)
        tl.store(allowed + sample, allowance)
        tl.store(steps + sample, taken + 1)
        tl.store(active + sample, finite & (r > allowance))


@triton.jit
def mix(
    z, Tz, moves, c, dG, width, damping,
    M: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, DAMPED: tl.constexpr,
):  # fmt: skip
    """z <- damping z + (1 - damping) T(z) - dG c."""
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(moves + sample) != 0:
        kind = c.dtype.element_ty
        row = sample * width
        whole = tl.num_programs(0).to(tl.int64) * width
        length = tl.cdiv(tl.cdiv(width, BLOCK), SPLIT) * BLOCK
        for begin in range(part * length, tl.minimum((part + 1) * length, width), BLOCK):
            at = begin + tl.arange(0, BLOCK)
            inside = at < width
            value = tl.load(Tz + row + at, mask=inside, other=0.0).to(kind)
            if DAMPED:
                value += damping * (tl.load(z + row + at, mask=inside, other=0.0).to(kind) - value)
            for i in tl.static_range(M):
                share = tl.load(c + sample * M + i)
                if share != 0.0:
                    value -= share * tl.load(dG + i * whole + row + at, mask=inside, other=0.0).to(kind)
            tl.store(z + row + at, value, mask=inside)
