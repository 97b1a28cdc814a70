"""A whole solve as one kernel: u <- R(u, v), step after step, until the residual is small. Triton.

With known statistics every image is solved by one program on its own, which then takes the next one. With those
of the batch all programs work on their images in step: they meet at every batch norm, and the residual of a step
travels with the first batch norm of the next. So the step after the last is begun, and thrown away.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from banach.kernels.latent_block import convolve, hide, join, join_all, settle_all
from banach.kernels.latent_ends import finish, start, turn
from banach.kernels.latent_parts import clear, judge, kept_rows, settle, window
from banach.kernels.latent_together import gathered, meet, statistics


@triton.jit(do_not_specialize=["images", "places", "max_steps", "groups"])
def iterate(
    v, z0, w, bias, known, slots, held, stream, operand, hidden, sums, tests, pivots, counters,
    value, residual, steps, flags,
    images, places, max_steps, groups, atol, rtol, scale, share, eps, inner, outer, slope, slope_after,
    C: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, AREA: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, TRAIN: tl.constexpr, PIXEL: tl.constexpr, RELATIVE: tl.constexpr,
    LATE: tl.constexpr, FROM_ZERO: tl.constexpr, NEAR: tl.constexpr, SPLIT: tl.constexpr, SPINS: tl.constexpr,
    ALONE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """places: images that memory of the programs' own has room for. LATE: activate after the sum, not before.
    ALONE: a program has one tile, whose values it keeps while the programs meet. KEEP: as in
    `LatentTile`. In training, where a program has several tiles, batch norm of a block waits for the next one: the
    stream has values before it, and x_mean and x_rstd say how they are to be normalised."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    co = tl.arange(0, WIDTH)
    LAYERS: tl.constexpr = 2 * BLOCKS
    LAYER: tl.constexpr = GROUPS * DEPTH * WIDTH
    if TRAIN:
        first_place = pid * images // programs
        own = (pid + 1) * images // programs - first_place
        image = first_place
    else:
        first_place = pid
        own = 1
        image = tl.atomic_add(counters + 1, 1)
    size = places * (H * W * P)
    low = places * AREA
    begin = first_place * (H * W)
    end = begin + own * (H * W)
    x_mean = tl.zeros([WIDTH], tl.float32)
    x_rstd = tl.full([WIDTH], 1.0, tl.float32)
    for half in tl.static_range(2 if SPLIT else 1):
        clear(operand + half * low, first_place * AREA, (first_place + own) * AREA)
        clear(hidden + half * low, first_place * AREA, (first_place + own) * AREA)
    clear(pivots, pid * BLOCKS * WIDTH, (pid + 1) * BLOCKS * WIDTH)
    tl.debug_barrier()
    while image < images:
        shift = (image - first_place) * (H * W)
        start(
            v, z0, held, slots, stream, operand, begin, end, shift, low, inner, C, P, WIDTH, H, W, AREA, ROWS,
            FROM_ZERO, SPLIT,
        )  # fmt: skip
        made = 0  # evaluations so far
        met = 0  # times that the programs have met
        code = 0  # what `judge` says; 3: the programs have lost each other
        old, new, best = 0, 1, 0  # slots of z, of T(z), and of the iterate whose residual is least
        reached, least = float("inf"), float("inf")
        top, total, top_T, total_T = 0.0, 0.0, 0.0, 0.0
        while (code == 0) & (made < max_steps):
            for block in range(BLOCKS):
                if code == 0:
                    last = block == BLOCKS - 1
                    hide(
                        operand, hidden, w + block * 2 * LAYER, bias + block * 2 * WIDTH, begin, end, low, groups,
                        slope, P, WIDTH, DEPTH, GROUPS, H, W, AREA, LAYERS, ROWS, STAGES, NEAR, SPLIT, KEEP,
                    )  # fmt: skip
                    if last:
                        top, total, top_T, total_T = 0.0, 0.0, 0.0, 0.0
                    if TRAIN:
                        pivot = pivots + (pid * BLOCKS + block) * WIDTH + co
                        mean = tl.load(pivot)
                        rstd = mean
                    else:
                        mean = tl.load(known + block * WIDTH + co)
                        rstd = tl.load(known + (BLOCKS + block) * WIDTH + co)
                    first = tl.zeros([WIDTH], tl.float32)
                    second = tl.zeros([WIDTH], tl.float32)
                    kept = tl.zeros([ROWS if ALONE else 1, WIDTH], tl.float32)
                    second_w = w + (block * 2 + 1) * LAYER
                    second_bias = bias + (block * 2 + 1) * WIDTH
                    if TRAIN and not ALONE:
                        first, second = join_all(
                            hidden, stream, second_w, second_bias, x_mean, x_rstd, mean, begin, end, low, groups,
                            slope_after, P, WIDTH, DEPTH, GROUPS, H, W, AREA, LAYERS, ROWS, STAGES, NEAR, SPLIT,
                            KEEP, LATE,
                        )  # fmt: skip
                    else:
                        w0, w1, w2 = kept_rows(second_w, WIDTH, DEPTH, KEEP)
                        second_shift = tl.load(second_bias + co)
                        for tile in tl.range(begin, begin + 1 if ALONE else end, ROWS, num_stages=1):
                            m = tile + tl.arange(0, ROWS)
                            here = (m < end)[:, None] & (co < P)[None, :]
                            at = window(tl.minimum(m, end - 1), H, W, P, AREA)
                            y = convolve(
                                hidden, second_w, w0, w1, w2, at, low, groups, P, WIDTH, DEPTH, GROUPS, W, LAYERS,
                                STAGES, NEAR, SPLIT, KEEP,
                            )  # fmt: skip
                            x = tl.load(stream + (m * P)[:, None] + co[None, :], mask=here, other=0.0)
                            y = join(y, x, second_shift, slope_after, LATE)
                            if ALONE:
                                kept = y
                                y = tl.where(here, y - mean[None, :], 0.0)
                                first, second = tl.sum(y, axis=0), tl.sum(y * y, axis=0)
                            else:
                                a, b, c, d = settle(
                                    y, m, m < end, mean, rstd, last, inner, outer, slots + old * size,
                                    slots + new * size, held, stream, operand, low, P, H, W, AREA, RELATIVE, SPLIT,
                                    False,
                                )  # fmt: skip
                                top, top_T = tl.maximum(top, a), tl.maximum(top_T, c)
                                total, total_T = total + b, total_T + d
                    tl.debug_barrier()
                    if TRAIN:
                        # Buffers alternate: a program may be writing its next sums while others read these.
                        all_sums = sums + met % 2 * programs * (2 * WIDTH)
                        tl.store(all_sums + pid * 2 * WIDTH + co, first)
                        tl.store(all_sums + pid * 2 * WIDTH + WIDTH + co, second)
                        met += 1
                        together = meet(counters, met * programs, SPINS)
                        if (block == 0) & (made > 0):
                            a, b, c, d = gathered(tests + made % 2 * programs * 4, programs, CHUNK)
                            reached, code = judge(a, b, c, d, atol, rtol, PIXEL, RELATIVE)
                            least, old, new, best = turn(reached, least, old, new, best)
                        code = tl.where(together == 0, 3, code)
                        if code == 0:
                            mean, rstd = statistics(all_sums, mean, programs, share, eps, P, WIDTH, CHUNK)
                            tl.store(pivot, mean)
                            if ALONE:
                                m = begin + tl.arange(0, ROWS)
                                top, total, top_T, total_T = settle(
                                    kept, m, m < end, mean, rstd, last, inner, outer, slots + old * size,
                                    slots + new * size, held, stream, operand, low, P, H, W, AREA, RELATIVE, SPLIT,
                                    False,
                                )  # fmt: skip
                            else:
                                top, total, top_T, total_T = settle_all(
                                    mean, rstd, last, inner, outer, slots + old * size, slots + new * size, held,
                                    stream, operand, begin, end, low, P, WIDTH, H, W, AREA, ROWS, RELATIVE, SPLIT,
                                )  # fmt: skip
                                # The next block normalises its input for itself; what follows the last is ready.
                                x_mean = tl.where(last, 0.0, mean)
                                x_rstd = tl.where(last, 1.0, rstd)
                            tl.debug_barrier()
            if code == 0:
                made += 1
                if TRAIN:
                    mine = tests + (made % 2 * programs + pid) * 4
                    tl.store(mine, top)
                    tl.store(mine + 1, total)
                    tl.store(mine + 2, top_T)
                    tl.store(mine + 3, total_T)
                else:
                    reached, code = judge(top, total, top_T, total_T, atol, rtol, PIXEL, RELATIVE)
                    least, old, new, best = turn(reached, least, old, new, best)
        if TRAIN and (code == 0) & (made > 0):
            together = meet(counters, (met + 1) * programs, SPINS)
            a, b, c, d = gathered(tests + made % 2 * programs * 4, programs, CHUNK)
            reached, code = judge(a, b, c, d, atol, rtol, PIXEL, RELATIVE)
            least, old, new, best = turn(reached, least, old, new, best)
            code = tl.where(together == 0, 3, code)
        finish(
            slots + tl.where(code == 2, best, old) * size, value, residual, steps, flags, begin, end, shift, image,
            own, images, code, made, tl.where(code == 2, least, reached) * scale, C, P, WIDTH, ROWS,
        )  # fmt: skip
        image = images if TRAIN else tl.atomic_add(counters + 1, 1)
