"""The observed rate of an iteration that diverges, circles, or leaves a point that it started near."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from banach import ImplicitNetwork, Status, Tolerance
from banach.diagnose import ContractionMonitor, ContractionWarning, measure_contraction, observed_rate, verdict

GAINS = [0.9, 1.05, 1.3, 1.5, 2.0, 2.5]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


class Affine(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.gain * u + v


class Flip(nn.Module):
    """v - tanh(3 (u - v)): u = v is a fixed point, of slope -3, and all else ends in a circle of two."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return v - torch.tanh(3 * (u - v))


class Turn(nn.Module):
    """A nonlinear expansion."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        nn.init.orthogonal_(self.linear.weight, gain)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu(self.linear(u) + v, 0.8)


def network(R: nn.Module, tolerance: Tolerance = Tolerance()) -> ImplicitNetwork:
    return ImplicitNetwork(nn.Identity(), R, nn.Identity(), tolerance=tolerance)


@dtypes
@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("max_steps", [50, 500])
def test_the_rate_is_the_gain(gain: float, dtype: torch.dtype, max_steps: int) -> None:
    measured = measure_contraction(
        network(Affine(gain), Tolerance(max_steps=max_steps)), torch.ones(2, 8, dtype=dtype)
    )
    torch.testing.assert_close(measured.rate, torch.full((2,), gain, dtype=dtype), rtol=2e-3, atol=0)
    assert measured.contracts is (gain < 1)
    assert ("does not converge on 2 of 2 samples" in verdict(measured)) is (gain > 1)


@pytest.mark.parametrize("gain", [1.6, 2.0, 3.0])
def test_a_nonlinear_expansion_by_hand(gain: float) -> None:
    """In float64, whose norms do not overflow: the mean of the last ten ratios that float32 has finite."""
    torch.manual_seed(0)
    R, v = Turn(gain), torch.randn(4, 16)
    measured = measure_contraction(network(R), v)
    exact, u, residuals = R.double(), torch.zeros(4, 16, dtype=torch.float64), []
    with torch.no_grad():
        for _ in range(100):
            value = exact(u, v.double())
            residuals.append((value - u).norm(dim=1))
            u = value
    trace = torch.stack(residuals)
    for i in range(4):
        own = trace[:, i][trace[:, i].square() < torch.finfo(torch.float32).max]
        by_hand = float((own[-1] / own[-11]) ** 0.1)
        assert abs(float(measured.rate[i]) - by_hand) < 1e-3 * by_hand


@pytest.mark.parametrize("scale", [1e-2, 1e-5, 1e-7, 1e-8])
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
    assert verdict(measured).startswith("The iteration does not converge on 2 of 2 samples")
    with pytest.warns(ContractionWarning, match="undamped Picard does not converge"):
        ContractionMonitor()(net, d)


def test_an_iteration_that_leaves_a_point_at_rounding() -> None:
    """Its first residual is 5e-7 of T(u), which is rounding; those that follow are not."""
    v = torch.ones(2, 8)
    measured = measure_contraction(network(Flip(), Tolerance(atol=0, max_steps=51)), v, v + 1e-7)
    assert measured.solution.status == (Status.MAX_STEPS,) * 2
    assert (measured.rate - 1).abs().max() < 1e-4
    assert not measured.contracts


def column(*residuals: float) -> Tensor:
    return torch.tensor(residuals, dtype=torch.float64)[:, None]


def test_rounding_that_goes_above_the_floor_and_back_is_still_rounding() -> None:
    trace = column(1, 0.1, 0.01, 0.001, 0.0005, 0.0012, 0.0009, 0.0011, 0.0090, 0.0002)
    torch.testing.assert_close(observed_rate(trace, floor=0.001), column(0.1)[0])


def test_nothing_measured() -> None:
    net = network(Affine(0.5))
    assert measure_contraction(net, torch.ones(0, 3)).rate.shape == (0,)
    assert measure_contraction(net, torch.ones(2, 3), steps=0).rate.isnan().all()
