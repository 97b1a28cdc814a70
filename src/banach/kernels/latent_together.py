"""What the programs of one solve tell each other: sums for batch norm, residuals, and that they are there. Triton.

All programs run at once, so that one can wait for the others. What is exchanged is read past the first cache.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit
def meet(counter, target, SPINS: tl.constexpr):
    """Wait until all programs have come here; 0 if they do not, after so many looks that something is wrong.

    What a program wrote before is seen by the others after, where they read past their first cache.
    """
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")
    seen = tl.load(counter, volatile=True)  # a look is no more than a load: others are still to count themselves
    looks = 0
    while (seen < target) & (looks < SPINS):
        seen = tl.load(counter, volatile=True)
        looks += 1
    seen = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()
    return (seen >= target).to(tl.int32)


@triton.jit
def statistics(sums, pivot, programs, share, eps, P: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Mean and 1 / deviation per channel, from the sums of all programs, added in a fixed order.

    The sums are of what is left of a value without `pivot`, the mean of the evaluation before: nothing cancels.
    """
    part = tl.arange(0, CHUNK)
    both = tl.arange(0, 2 * WIDTH)
    at = sums + (part * 2 * WIDTH)[:, None] + both[None, :]
    here = (part < programs)[:, None] & (both % WIDTH < P)[None, :]
    means = tl.sum(tl.load(at, mask=here, other=0.0, cache_modifier=".cg"), axis=0) * share
    first, second = tl.split(tl.trans(tl.reshape(means, [2, WIDTH])))
    variance = tl.maximum(second - first * first, 0.0)
    return pivot + first, 1.0 / tl.sqrt(variance + eps)


@triton.jit
def gathered(tests, programs, CHUNK: tl.constexpr):
    """Largest and total squares of the residual and of T(z), over all programs."""
    part = tl.arange(0, CHUNK)
    at, here = tests + part * 4, part < programs
    top = tl.max(tl.load(at, mask=here, other=0.0, cache_modifier=".cg"), axis=0)
    total = tl.sum(tl.load(at + 1, mask=here, other=0.0, cache_modifier=".cg"), axis=0)
    top_T = tl.max(tl.load(at + 2, mask=here, other=0.0, cache_modifier=".cg"), axis=0)
    total_T = tl.sum(tl.load(at + 3, mask=here, other=0.0, cache_modifier=".cg"), axis=0)
    return top, total, top_T, total_T
