"""The rules for status, steps, value and residual, against a plain Python loop over one sample at a time."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import Picard, Status, Tolerance, solve


def kinds(z: Tensor, kind: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a z + b; kinds 1 and 2 overflow far from 0, to NaN and infinity; kind 3 ends in a cycle of one rounding."""
    line = a * z + b
    far = torch.where(kind == 1, torch.nan, torch.inf).to(z)
    line = torch.where((kind > 0) & (z.abs() > 1e3), far, line)
    return torch.where(kind == 3, torch.where(z > b, b, torch.nextafter(b, b + 1)), line)


def one_by_one(z: Tensor, inputs: Any, damping: float, tolerance: Tolerance, every: int) -> tuple[Any, ...]:
    """Return (status, value, residual, steps) of a single sample, by the words of the documentation."""
    best, best_at, least = z, 0, math.inf
    residual = math.inf
    for k in range(1, tolerance.max_steps + 1):
        Tz = kinds(z, *inputs)
        residual, size = (float(x.double().square().mean().sqrt()) for x in (Tz - z, Tz))
        if not math.isfinite(residual):
            return Status.NONFINITE, best, least, k
        if residual < least:
            best, best_at, least = z, k, residual
        z = damping * z + (1 - damping) * Tz
        if residual <= tolerance.atol + tolerance.rtol * size:
            return Status.CONVERGED, z, residual, k
        checked = every and (k % every == 0 or k == tolerance.max_steps)
        if checked and residual <= torch.finfo(z.dtype).eps * size and k - best_at >= 10:
            return Status.STALLED, z, residual, k
    return Status.MAX_STEPS, *((best, least) if residual > 10 * least else (z, residual)), tolerance.max_steps


@pytest.mark.parametrize("every", [None, 0, 1, 3])
@pytest.mark.parametrize("path", ["plain", "record", "compact", "on_step"])
def test_every_path_keeps_the_rules(path: str, every: int | None) -> None:
    draw = torch.Generator().manual_seed(0)
    ends: set[Status] = set()
    options: Any = {} if path == "plain" else {path: (lambda k, z: None) if path == "on_step" else True}
    for case in range(12):
        dtype, n = (torch.float32, torch.float64)[case % 2], 6
        kind = torch.arange(n)[:, None] % 4
        slopes = torch.tensor([0.1, 0.5, 0.9, -0.5, -1, 1.16, 2, -3, 1, 0, 10.5], dtype=dtype)
        a = slopes[torch.randint(11, (n, 1), generator=draw)]
        b = torch.rand(n, 1 + case % 3, generator=draw).to(dtype) + 0.1
        z0 = torch.randn(b.shape, generator=draw).to(dtype)
        tolerance = Tolerance(
            atol=(0, 1e-4, 1e-9)[case % 3], rtol=(0, 0, 1e-3, 0)[case % 4], max_steps=(2, 17, 40)[case // 4],
            check_every=every,
        )  # fmt: skip
        solver = Picard(damping=(0, 0, 0.25)[case // 2 % 3])
        found = solve(kinds, z0, solver, inputs=(kind, a, b), tolerance=tolerance, **options)
        for i, status in enumerate(found.status):
            row = slice(i, i + 1)
            inputs = kind[row], a[row], b[row]
            wanted = one_by_one(z0[row], inputs, solver.damping, tolerance, 1 if every is None else every)
            assert (status, int(found.steps[i])) == (wanted[0], wanted[3])
            near: dict[str, Any] = (
                {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
            )
            torch.testing.assert_close(found.value[row], wanted[1], **near)
            torch.testing.assert_close(float(found.residual[i]), wanted[2], **near)
            ends.add(status)
    assert ends == (set(Status) - {Status.STALLED} if every == 0 else set(Status))
