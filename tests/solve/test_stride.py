"""stride(), which Picard takes on a GPU: the same answers as the loop that checks every step. Here on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from banach import RMS, Picard, Solution, Tolerance, WorstPixel, solve
from banach.latent import Latent, leaves, map_leaves
from banach.solve.run import Run
from banach.solve.stride import stride
from problems import normal


def strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the steps that a GPU would take, from here on."""
    monkeypatch.setattr(Run, "sprint", lambda self, state, k, *, compact: stride(self, state, k))


def both(monkeypatch: pytest.MonkeyPatch, T: Any, z0: Latent, **options: Any) -> tuple[Solution, Solution]:
    """Return the solution with a check at every step, and that of stride()."""
    expected = solve(T, z0, **options)
    strides(monkeypatch)
    found = solve(T, z0, **options)
    monkeypatch.undo()
    return found, expected


def assert_equal(found: Solution, expected: Solution) -> None:
    for one, other in zip(leaves(found.value), leaves(expected.value), strict=True):
        assert torch.equal(one, other)
    assert found.steps.tolist() == expected.steps.tolist()
    assert found.status == expected.status
    assert torch.equal(found.residual.nan_to_num(-1), expected.residual.nan_to_num(-1))


def rates(z: Tensor, rate: Tensor, b: Tensor) -> Tensor:
    return rate * z.roll(1, 1) + torch.sin(z) * 0.1 * rate + b


def random_problem(seed: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Samples at rates of their own: fast, slow, and a few that diverge or become nonfinite."""
    g = torch.Generator().manual_seed(seed)
    batch, width = int(torch.randint(1, 12, (), generator=g)), 5
    rate = torch.rand(batch, 1, generator=g, dtype=torch.float64) * 0.9
    kind = torch.rand(batch, 1, generator=g)
    rate = torch.where(kind > 0.93, 1.5, rate)
    b = torch.randn(batch, width, generator=g, dtype=torch.float64)
    b = torch.where(torch.rand(batch, 1, generator=g) > 0.97, torch.inf, b)
    return torch.zeros(batch, width, dtype=torch.float64), (rate, b)


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize(
    "limits", [{"atol": 1e-4}, {"atol": 0.0, "rtol": 1e-3}, {"atol": 1e-13, "rtol": 1e-15}], ids=str
)
def test_equal_to_a_check_at_every_step(
    limits: dict[str, Any], damping: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(40):
        z0, inputs = random_problem(seed)
        tolerance = Tolerance(**limits, max_steps=(7, 60)[seed % 2], norm=RMS())
        options: dict[str, Any] = {"solver": Picard(damping), "inputs": inputs, "tolerance": tolerance}
        assert_equal(*both(monkeypatch, rates, z0, **options))


def two_scales(z: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = z
    return 0.4 * torch.tanh(x + v[0]) + 0.1 * y.repeat_interleave(2, -1), 0.5 * torch.cos(y + v[1])


@pytest.mark.parametrize("norm", [RMS(), WorstPixel()], ids=str)
def test_a_nest(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    v = normal(6, 3, 8, seed=1) * torch.logspace(-2, 1, 6)[:, None, None], normal(6, 3, 4, seed=2)
    z0 = map_leaves(torch.zeros_like, v)
    assert_equal(*both(monkeypatch, two_scales, z0, inputs=(v,), tolerance=Tolerance(atol=1e-9, norm=norm)))


def test_coupled_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    z0, (rate, b) = torch.zeros(4, 5), (torch.linspace(0.1, 0.8, 4)[:, None], normal(4, 5, dtype=torch.float32))
    T = lambda z, b: 0.5 * z.roll(1, 0) * rate + b  # noqa: E731
    assert_equal(*both(monkeypatch, T, z0, inputs=(b,), coupled=True))


class Static:
    """T that writes all its values to the same memory, as a replayed CUDA graph does."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.out = tuple(torch.zeros(shape, dtype=torch.float64) for shape in shapes)

    def __call__(self, z: tuple[Tensor, ...], v: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for out in self.out:
            out.zero_()  # so that T sees zeros where its own memory is its input
        for out, x, b in zip(self.out, z, v, strict=True):
            out.copy_(0.7 * x.roll(1, -1) + b)
        return self.out


def test_a_nest_in_memory_that_t_uses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    v = normal(5, 3, 4, seed=3), normal(5, 2, seed=4)
    T, z0 = Static((5, 3, 4), (5, 2)), map_leaves(torch.zeros_like, v)
    fresh = solve(lambda z, v: tuple(0.7 * x.roll(1, -1) + b for x, b in zip(z, v, strict=True)), z0, inputs=(v,))
    strides(monkeypatch)
    assert_equal(solve(T, z0, inputs=(v,)), fresh)


def test_evaluations_between_two_checks_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def T(z: Tensor, b: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 0.5 * z + b

    b = normal(3, 4)
    strides(monkeypatch)
    found = solve(T, torch.zeros_like(b), inputs=(b,), tolerance=Tolerance(atol=1e-6))
    assert int(found.steps.max()) <= calls <= int(found.steps.max()) + 1
