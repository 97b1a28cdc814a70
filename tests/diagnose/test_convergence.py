"""The observed rate, of known traces and of iterations that diverge; Banach's bound against the true error."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import RMS, Euclidean, ImplicitNetwork, Picard, Solution, Tolerance, solve
from banach.diagnose import (
    ContractionMonitor,
    ContractionWarning,
    error_bound,
    measure_contraction,
    observed_rate,
    verdict,
)


def column(*residuals: float) -> Tensor:
    return torch.tensor(residuals, dtype=torch.float64)[:, None]


def picard(A: Tensor, steps: int, norm: RMS | Euclidean = RMS(), atol: float = 0.0) -> tuple[Solution, Tensor]:
    b = torch.ones(1, len(A), dtype=torch.float64)
    tolerance = Tolerance(atol=atol, max_steps=steps, norm=norm)
    found = solve(lambda z: z @ A.T + b, torch.zeros_like(b), Picard(), tolerance=tolerance, record=True)
    return found, torch.linalg.solve(torch.eye(len(A), dtype=A.dtype) - A, b[0])


NAN = float("nan")
SLOW_THEN_FAST = (1.0, 0.9, 0.81, 0.405, 0.2025, 0.10125)
FROZEN = (1, 0.1, 0.01, 0.01, 0.01, 0.01)


@pytest.mark.parametrize(
    ("residuals", "options", "rate"),
    [
        (SLOW_THEN_FAST, {"last": 3}, 0.5),
        (SLOW_THEN_FAST, {"last": 1}, 0.5),
        (SLOW_THEN_FAST, {}, 0.10125**0.2),
        (FROZEN, {"steps": 3}, 0.1),
        ((1, 1, 1, 1), {"steps": 4}, 1.0),  # standing still, not frozen
        ((1, 1, 1, 1), {"steps": 1}, NAN),
        ((1, 1e-4, 1e-8, 1e-12, 3e-16, 4e-16, 2e-16, 3e-16), {}, 1e-4),  # the rest is rounding
        ((1, 0.1, 0.01, 0.009, 0.0095), {"floor": 0.0099}, 0.1),
        ((1, 0.1, 0.01, 0.001, 0.0005, 0.0012, 0.0009, 0.0011, 0.0090, 0.0002), {"floor": 0.001}, 0.1),
        ((1, 0.1, 0.0005, 0.1, 0.2, 0.4), {"floor": 0.001, "last": 2}, 2.0),  # it came near a point, and left
        ((1, 0), {}, 0.0),
        ((1,), {}, NAN),
        ((0, 0), {}, NAN),
        ((1, 2, 4, NAN, NAN), {}, 2.0),
    ],
)
def test_the_rate_of_known_residuals(residuals: tuple[float, ...], options: Any, rate: float) -> None:
    trace = torch.cat([column(*[0.5**k for k in range(len(residuals))]), column(*residuals)], 1)
    steps = torch.tensor([len(residuals), options.pop("steps", len(residuals))])
    assert observed_rate(trace, steps, **options)[1].item() == pytest.approx(rate, rel=1e-9, nan_ok=True)


def test_empty_traces() -> None:
    assert observed_rate(torch.empty(0, 3), torch.zeros(3)).isnan().tolist() == [True] * 3
    assert observed_rate(torch.empty(5, 0), torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("norm", [RMS(), Euclidean()])
@pytest.mark.parametrize("steps", [1, 3, 10, 25])
def test_error_bound_holds(norm: RMS | Euclidean, steps: int) -> None:
    A = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    A *= 0.9 / torch.linalg.matrix_norm(A, 2)
    found, fixed = picard(A, steps, norm)
    scale = 6**-0.5 if isinstance(norm, RMS) else 1.0
    after = float((found.value[0] - fixed).norm()) * scale
    gap = (torch.eye(6, dtype=A.dtype) - A) @ found.value[0] - 1
    now = float(gap.norm()) * scale
    assert after <= error_bound(found.residual, 0.9, after_step=True).item()
    assert after <= error_bound(torch.tensor(now), 0.9).item()
    # The bound of the value after the step must not be met by chance: it is that of before, times gamma.
    torch.testing.assert_close(
        error_bound(found.residual, 0.9, after_step=True), 0.9 * error_bound(found.residual, 0.9)
    )


def test_error_bound_without_contraction() -> None:
    r = torch.tensor([1.0, 1.0, 1.0])
    bound = error_bound(r, torch.tensor([0.5, 1.0, 2.0]))
    assert bound.tolist() == [2.0, float("inf"), float("inf")]
    assert error_bound(r[:1], torch.tensor([float("nan")])).isnan().all()


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"trace must be \(steps, batch\), got shape \(3,\)"):
        observed_rate(torch.ones(3), torch.ones(1))
    with pytest.raises(ValueError, match="last must be a whole number, at least 1, got 0"):
        observed_rate(torch.ones(3, 1), torch.ones(1), last=0)
    with pytest.raises(ValueError, match=r"gamma must be at least 0, got -0\.5"):
        error_bound(torch.ones(1), -0.5)


# Networks that diverge, circle, or leave a point that they started near.


class Affine(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.gain * u + v


def network(R: nn.Module, tolerance: Tolerance = Tolerance()) -> ImplicitNetwork:
    return ImplicitNetwork(nn.Identity(), R, nn.Identity(), tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gain", [0.9, 1.05, 1.5, 2.5])
@pytest.mark.parametrize("max_steps", [50, 500])
def test_the_rate_is_the_gain(gain: float, dtype: torch.dtype, max_steps: int) -> None:
    measured = measure_contraction(
        network(Affine(gain), Tolerance(max_steps=max_steps)), torch.ones(2, 8, dtype=dtype)
    )
    torch.testing.assert_close(measured.rate, torch.full((2,), gain, dtype=dtype), rtol=2e-3, atol=0)
    assert measured.contracts is (gain < 1)
    assert ("does not converge on 2 of 2 samples" in verdict(measured)) is (gain > 1)


@pytest.mark.parametrize("scale", [1e-2, 1e-8])
@pytest.mark.parametrize("near", [True, False])
def test_a_circle_of_two_that_begins_small(scale: float, near: bool) -> None:
    """From near the fixed point it diverges, and the best iterate is its start; from elsewhere it circles."""

    class Circle(nn.Module):
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return v - torch.tanh(3 * u)

    net, d = network(Circle(), Tolerance(atol=0, rtol=1e-3)), scale * torch.ones(2, 8)
    if not near:
        net.start = torch.ones_like
    measured = measure_contraction(net, d)
    assert (measured.rate - 1).abs().max() < 1e-4
    if near:
        torch.testing.assert_close(measured.residual, d[:, 0])
    else:
        assert (measured.residual > 1.9).all()
        assert (measured.sigma < 1).all(), "the slope where it circles is small: sigma alone would be wrong"
    assert not measured.contracts
    assert verdict(measured).startswith("The undamped iteration does not converge on 2 of 2 samples")
    with pytest.warns(ContractionWarning, match="The undamped iteration does not converge on 2 of 2"):
        ContractionMonitor()(net, d)


def test_nothing_measured() -> None:
    net = network(Affine(0.5))
    assert measure_contraction(net, torch.ones(0, 3)).rate.shape == (0,)
    assert measure_contraction(net, torch.ones(2, 3), steps=0).rate.isnan().all()
