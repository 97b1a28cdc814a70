"""Picard's short loops against the general one, which `record=True` asks for: same numbers, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import RMS, Euclidean, Picard, Tolerance, WorstPixel, solve
from contracts import same
from solve.test_stride import take_strides


def problems() -> list[tuple[Callable[..., Tensor], Tensor, Tensor, Picard, Tolerance]]:
    """Return random maps: some contract, some expand until they overflow, some never get better for long."""
    made = []
    draw = torch.Generator().manual_seed(0)
    for case in range(90):
        dtype = torch.float64 if case % 3 else torch.float32
        n, w = (int(torch.randint(1, most, (), generator=draw)) for most in (9, 6))
        A = torch.randn(n, w, w, generator=draw, dtype=torch.float64)
        A *= (0.2 + 1.1 * torch.rand(n, generator=draw))[:, None, None] / torch.linalg.matrix_norm(A, 2)[
            :, None, None
        ]
        b = torch.randn(n, w, generator=draw, dtype=torch.float64)
        if case % 7 == 5:
            b[0] = (1e30, torch.inf)[case % 2]

        def T(z: Tensor, A: Tensor, b: Tensor, bend: bool = case % 4 == 1) -> Tensor:
            value = (A @ z[..., None])[..., 0] + b
            return torch.sin(value) if bend else value

        rtol = (0, 1e-3, 1e-6, 1e-12)[case % 4]
        tolerance = Tolerance(
            atol=(0 if rtol else 1e-3, 1e-4, 1e-9)[case % 3], rtol=rtol, max_steps=(3, 25, 60)[case // 5 % 3],
            norm=(RMS(), Euclidean(), WorstPixel())[case // 7 % 3],
        )  # fmt: skip
        made.append((T, A.to(dtype), b.to(dtype), Picard(damping=(0, 0, 0.3)[case // 2 % 3]), tolerance))
    return made


@pytest.mark.parametrize("way", ["sprint", "stride", "stride of large iterates", "compact"])
def test_short_loops_are_the_general_one(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stride` is for a GPU: several steps between two host checks."""
    if "stride" in way:
        take_strides(monkeypatch, 0 if "large" in way else None)
    ends: set[str] = set()
    for T, A, b, solver, tolerance in problems():
        start = torch.ones_like(b)
        options: dict[str, Any] = {"inputs": (A, b), "tolerance": tolerance}
        found = solve(T, start, solver, **options, compact=way == "compact")
        wanted = solve(T, start, solver, **options, record=True)
        same(found, wanted)
        assert (found.failures, found.fault) == (wanted.failures, wanted.fault)
        ends |= {status.name for status in found.status}
    assert ends >= {"CONVERGED", "MAX_STEPS", "NONFINITE"}


@pytest.mark.parametrize("way", ["sprint", "stride", "compact", "general"])
def test_a_sample_that_diverges_keeps_its_best_iterate_while_another_stalls(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found as the iterate of another step: as many samples had converged as were active when one stalled."""
    if way == "stride":
        take_strides(monkeypatch)
    above = torch.tensor(1.0).nextafter(torch.tensor(2.0))
    kind = torch.tensor([0, 0, 1, 2])[:, None]  # two converge at once, one stalls, one diverges

    def T(z: Tensor, kind: Tensor) -> Tensor:
        stalls = torch.where(z == 1, above, 1.0)
        return torch.where(kind == 0, 3.0, torch.where(kind == 1, stalls, 1.05 * z))

    options: dict[str, Any] = {"compact": way == "compact", "record": way == "general"}
    found = solve(T, torch.ones(4, 1), inputs=(kind,), tolerance=Tolerance(atol=1e-9, max_steps=60), **options)
    assert [status.name for status in found.status] == ["CONVERGED", "CONVERGED", "STALLED", "MAX_STEPS"]
    residual = (T(found.value, kind) - found.value).abs()[:, 0]
    torch.testing.assert_close(residual, found.residual)
    assert found.value[3] == 1  # where it started, since every step takes it further away


def test_strides_keep_no_answer_that_other_samples_have_moved_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that froze between the same two checks. Found as residuals of 100 times the tolerance."""
    take_strides(monkeypatch)
    draw, found = torch.Generator().manual_seed(0), 0
    for _ in range(150):
        M, b = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((8, 8), (8,)))
        M *= (0.1 + 0.7 * torch.rand((), generator=draw)) / torch.linalg.eigvals(M).abs().max()

        def T(z: Tensor, M: Tensor = M, b: Tensor = b) -> Tensor:
            return (M @ z.flatten() + b).view(z.shape)

        solution = solve(T, torch.zeros(4, 2, dtype=torch.float64), tolerance=Tolerance(max_steps=200))
        found += solution.fault is not None
        residual = (T(solution.value) - solution.value).square().mean(1).sqrt()
        assert solution.fault is not None or residual.max() <= 5e-4
    assert found > 20


def test_strides_of_a_map_that_refuses_nonfinite_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a check T sees the best iterate in place of such a value. Found as an error from T between two checks."""
    rates = torch.tensor([[3.0], [0.5]], dtype=torch.float64)

    def T(z: Tensor) -> Tensor:
        if not z.isfinite().all():
            raise ValueError("not finite")
        return torch.where(z > 50, torch.inf, rates * z + 1)

    start, tolerance = torch.zeros(2, 2, dtype=torch.float64), Tolerance(max_steps=100)
    wanted = solve(T, start, tolerance=tolerance)
    take_strides(monkeypatch)
    found = solve(T, start, tolerance=tolerance)
    assert found.status == wanted.status
    torch.testing.assert_close(found.value, wanted.value, rtol=0, atol=0)
    with pytest.raises(ValueError, match="not finite"):
        solve(T, start + torch.nan)
