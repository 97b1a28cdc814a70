"""Weights of R as the solve for a latent multiplies them. Triton."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from banach.kernels.latent_parts import put


@triton.jit
def pack(
    w,
    out,
    counters,
    C: tl.constexpr,
    P: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    LAYERS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Weights (layers, C, C, 3, 3) as (layers, groups, WIDTH outputs, DEPTH inputs), one tap a program.

    And the counters of the solve that comes next begin at zero: so it can be replayed.
    """
    layer = tl.program_id(0) // 9
    tap = tl.program_id(0) % 9
    if tl.program_id(0) == 0:
        tl.store(counters + tl.arange(0, 2), tl.zeros([2], tl.int32))
    ci = tl.arange(0, DEPTH)
    co = tl.arange(0, WIDTH)
    real = (co < C)[:, None] & (ci < C)[None, :]
    weight = tl.load(w + (layer * C * C + co * C)[:, None] * 9 + (ci * 9)[None, :] + tap, mask=real, other=0.0)
    group = tap // 3 if GROUPS == 3 else tap
    column = tap % 3 * P if GROUPS == 3 else 0
    # The last tap of a group fills it up with zeros.
    fills = tl.where(tap % 3 == 2, DEPTH - 2 * P, P) if GROUPS == 3 else DEPTH
    to = out + ((layer * GROUPS + group) * WIDTH + co)[:, None] * DEPTH + (column + ci)[None, :]
    here = (co < WIDTH)[:, None] & (ci < fills)[None, :]
    put(to, LAYERS * GROUPS * DEPTH * WIDTH, weight, here, SPLIT)
