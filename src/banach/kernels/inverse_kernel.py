"""Device code of `inverse.py`. Triton."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit
def gauss_jordan(given, found, n, N: tl.constexpr):
    """Invert the complex matrix x + iy of this program, padded with zeros to N rows."""
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    at = (tl.program_id(0).to(tl.int64) * n * n + row * n + column) * 2
    inside = (row < n) & (column < n)
    x = tl.load(given + at, mask=inside, other=0.0)
    y = tl.load(given + at + 1, mask=inside, other=0.0)
    for k in range(n):
        # Column k is a + ib, row k is c + id, the pivot p + iq. A column of the inverse overwrites column k.
        a, b = tl.sum(tl.where(column == k, x, 0.0), 1)[:, None], tl.sum(tl.where(column == k, y, 0.0), 1)[:, None]
        c, d = tl.sum(tl.where(row == k, x, 0.0), 0)[None, :], tl.sum(tl.where(row == k, y, 0.0), 0)[None, :]
        p, q = tl.sum(tl.where(column == k, c, 0.0), 1)[:, None], tl.sum(tl.where(column == k, d, 0.0), 1)[:, None]
        c, d = tl.where(column == k, 1.0, c), tl.where(column == k, 0.0, d)
        scale = 1.0 / (p * p + q * q)
        c, d = (c * p + d * q) * scale, (d * p - c * q) * scale
        x, y = tl.where(column == k, 0.0, x), tl.where(column == k, 0.0, y)
        x = tl.where(row == k, c, x - (a * c - b * d))
        y = tl.where(row == k, d, y - (a * d + b * c))
    tl.store(found + at, x, mask=inside)
    tl.store(found + at + 1, y, mask=inside)
