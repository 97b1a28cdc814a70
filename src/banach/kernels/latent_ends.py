"""How a solve for a latent begins and ends, and what stands between two evaluations. Triton."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from banach.kernels.latent_parts import put_pixels, window


@triton.jit
def start(
    v, z0, held, slots, stream, operand, begin, end, shift, low, inner,
    C: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, AREA: tl.constexpr,
    ROWS: tl.constexpr, FROM_ZERO: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """v and the first iterate at their pitch, and the first input of the first block."""
    co = tl.arange(0, WIDTH)
    for tile in range(begin, end, ROWS):
        m = tile + tl.arange(0, ROWS)
        here = (m < end)[:, None] & (co < P)[None, :]
        real = (m < end)[:, None] & (co < C)[None, :]
        given = ((m + shift) * C)[:, None] + co[None, :]
        at = (m * P)[:, None] + co[None, :]
        x = tl.load(v + given, mask=real, other=0.0).to(tl.float32)
        z = tl.zeros([ROWS, WIDTH], tl.float32)
        if not FROM_ZERO:
            z = tl.load(z0 + given, mask=real, other=0.0).to(tl.float32)
        tl.store(held + at, x, mask=here)
        tl.store(slots + at, z, mask=here)
        x += inner * z
        tl.store(stream + at, x, mask=here)
        center = window(m, H, W, P, AREA) + (W + 3) * P
        put_pixels(operand + center[:, None] + co[None, :], low, x, here, SPLIT)
    tl.debug_barrier()


@triton.jit
def finish(
    slot, value, residual, steps, flags, begin, end, shift, image, count, images, code, made, reached,
    C: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The iterate of a slot, and what was reached, for `count` images from `image` on.

    Programs that did not meet have nothing to show, and it shall be seen.
    """
    co = tl.arange(0, WIDTH)
    for tile in range(begin, end, ROWS):
        m = tile + tl.arange(0, ROWS)
        real = (m < end)[:, None] & (co < C)[None, :]
        z = tl.load(slot + (m * P)[:, None] + co[None, :], mask=real, other=0.0)
        z = tl.where(code == 3, float("nan"), z)
        tl.store(value + ((m + shift) * C)[:, None] + co[None, :], z, mask=real)
    for own in range(image, image + count):
        tl.store(residual + own, tl.where(code == 3, float("nan"), reached))
        tl.store(steps + own, tl.where(code == 3, -1, made).to(tl.int64))
        tl.store(flags + own, tl.where(code == 1, 1, 0).to(tl.int8))
        tl.store(flags + images + own, tl.where(code >= 2, 1, 0).to(tl.int8))
        tl.store(flags + 2 * images + own, tl.where(code < 0, 1, 0).to(tl.int8))
    tl.debug_barrier()


@triton.jit
def turn(reached, least, old, new, best):
    """After an evaluation: its residual is that of `old`. The slots of the next one, and the least residual."""
    best = tl.where(reached < least, old, best)
    least = tl.where(reached < least, reached, least)
    free = tl.where((best != 1) & (new != 1), 1, 2)
    return least, new, tl.where((best != 0) & (new != 0), 0, free), best
