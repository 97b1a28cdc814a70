"""The monitor warns with the figures, once, and leaves the run alone; the verdict says what they mean."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from banach import JFB, ImplicitNetwork, Neumann, Picard, Solution, Tolerance
from banach.diagnose import (
    Agreement,
    Contraction,
    ContractionMonitor,
    ContractionWarning,
    Descent,
    measure_contraction,
    suggested_order,
    verdict,
)
from diagnose.parts_diagnose import DATA, tiny, unchanged


@pytest.fixture
def steep() -> ImplicitNetwork:
    """sigma about 3 near zero, and yet every iteration converges: J is nearly nilpotent."""
    net = tiny(n=2)
    with torch.no_grad():
        net.R.linear.weight.copy_(torch.tensor([[0.3, 3.0], [0.0, 0.3]]))
    return net


def test_silent_on_a_contraction() -> None:
    monitor = ContractionMonitor()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured: Any = monitor(tiny(gain=0.5), DATA)
    assert measured.contracts
    (reading,) = monitor.history
    assert (reading.call, reading.samples, reading.violations) == (1, 6, 0)
    assert reading.sigma == pytest.approx(float(measured.sigma.max()))
    assert reading.rate == pytest.approx(float(measured.rate.max()))


def test_only_tensors_with_the_batch_axis_are_cut() -> None:
    plain = tiny(gain=0.5)
    alone = measure_contraction(plain, DATA[:2])
    net = ImplicitNetwork(
        lambda x, scale, mask: plain.Q(x) * scale * mask.diagonal(), plain.R, plain.S, tolerance=plain.tolerance
    )
    data = DATA, torch.ones((), dtype=DATA.dtype), torch.eye(5, dtype=DATA.dtype)
    measured = ContractionMonitor(samples=2)(net, data)
    assert measured is not None
    torch.testing.assert_close(measured.sigma, alone.sigma)


def test_warns_once_with_the_figures(steep: Any) -> None:
    monitor = ContractionMonitor()
    with unchanged(steep), pytest.warns(ContractionWarning) as caught:
        measured: Any = monitor(steep, 0.1 * DATA)
    assert measured.violations == int((measured.sigma >= 1).sum()) > 0
    assert (measured.rate < 1).all()
    assert measured.error[measured.sigma >= 1].isinf().all()
    (warning,) = caught
    said = str(warning.message)
    assert issubclass(ContractionWarning, RuntimeWarning)
    assert f"does not contract on {measured.violations} of 6 samples" in said
    assert f"up to {float(measured.sigma.max()):.3g}" in said
    assert f"converges, observed rate at most {float(measured.rate.max()):.3g}" in said
    assert warning.filename == __file__  # it points at the training loop
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor(steep, 0.1 * DATA)
    assert [reading.violations for reading in monitor.history] == [measured.violations] * 2


def test_every_and_samples() -> None:
    monitor = ContractionMonitor(every=3, samples=2)
    net = tiny()
    found = [monitor(net, DATA) for _ in range(7)]
    assert [one is not None for one in found] == [True, False, False, True, False, False, True]
    assert [reading.call for reading in monitor.history] == [1, 4, 7]
    assert {reading.samples for reading in monitor.history} == {2}
    whole = ContractionMonitor(samples=None)
    whole(net, DATA)
    assert whole.history[0].samples == 6


def test_monitor_refusals() -> None:
    for options in ({"every": 0}, {"samples": 0}, {"samples": True}):
        with pytest.raises(ValueError, match="must be a whole number, at least 1"):
            ContractionMonitor(**options)


def solved(converged: bool = True, count: int = 3) -> Solution:
    ends = torch.full((count,), converged)
    flags = torch.zeros(count, dtype=torch.bool)
    return Solution(torch.zeros(count, 1), torch.zeros(count), ends, torch.ones(count), flags, flags, flags)


def measured(sigma: list[float], rate: list[float]) -> Contraction:
    s, r = torch.tensor(sigma), torch.tensor(rate)
    return Contraction(s, r, torch.zeros_like(s), torch.zeros_like(s), False, solved())


def compared(cosine: float, ratio: float = 0.8, converged: bool = True, mode: object = JFB()) -> Descent:
    return Descent(cosine, ratio, {"R": Agreement(cosine, ratio)}, 1.0, mode, JFB(), solved(converged))  # type: ignore[arg-type]


NAN = float("nan")


@pytest.mark.parametrize(
    ("sigma", "rate", "said"),
    [
        ([0.5, 0.7], [0.4, 0.5], "T contracts on all 2 samples: sigma_max at most 0.7, observed rate at most 0.5"),
        ([0.5, 1.4], [0.4, 0.75], "converges, observed rate at most 0.75 per step, though T does not contract"),
        ([0.5, 1.4], [0.4, 1.07], "on 1 of 2 samples: its residual changes by a factor of up to 1.07 per step"),
        ([0.5, 1.4], [0.4, 0.99999], "does not converge on 1 of 2 samples"),
        ([0.5, 0.9999985], [0.4, 0.99], "sigma_max just below 1, observed rate at most 0.99 per step (230 "),
        ([0.5, 0.6], [NAN] * 2, "T contracts on all 2 samples: sigma_max at most 0.6, too few residuals"),
        ([0.5, 1.6], [NAN] * 2, "does not contract on 1 of 2 samples (sigma_max up to 1.6), and there were too"),
        ([0.5, NAN], [0.5] * 2, "T is not finite at 1 of 2 samples"),
        ([], [], "Nothing was measured"),
    ],
)
def test_verdict_on_the_iteration(sigma: list[float], rate: list[float], said: str) -> None:
    assert said in verdict(measured(sigma, rate))


def test_advice_is_given_only_where_the_solver_fails() -> None:
    """A damped network converges though T iterated as it is does not."""
    net = ImplicitNetwork(nn.Identity(), lambda u, v: v - 2 * u, nn.Identity(), solver=Picard(damping=0.5))
    helped = verdict(measure_contraction(net, torch.ones(2, 3)))
    assert helped.startswith("The undamped iteration does not converge on 2 of 2 samples")
    assert helped.endswith("the solver of the network met its tolerance on all samples.")
    net.tolerance = Tolerance(max_steps=1)
    assert "or use damping or Anderson" in verdict(measure_contraction(net, torch.ones(2, 3)))


def test_verdict_on_the_gradient() -> None:
    fine = measured([0.5], [0.5])
    assert "The gradient of JFB is good: cosine 0.98, norm ratio 0.8." in verdict(fine, compared(0.98))
    rough = verdict(fine, compared(0.6))
    assert "points downhill, but roughly: cosine 0.6, norm ratio 0.8; use Neumann(4) or Implicit()" in rough
    assert "is no descent direction" in verdict(fine, compared(-0.1))
    assert "use Implicit()." in verdict(measured([2.0], [1.2]), compared(0.5))
    assert "; use Implicit()." in verdict(measured([1.4], [0.95]), compared(0.6)), "not Neumann(58)"
    assert "away from the fixed point" in verdict(fine, compared(0.98, converged=False))
    assert "a gradient is zero" in verdict(fine, compared(NAN))
    assert "The gradient of Neumann(order=3) is good" in verdict(fine, compared(0.99, mode=Neumann(3)))


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.75, 0.95])
def test_suggested_order_is_the_least(rate: float) -> None:
    k: Any = suggested_order(rate)
    assert rate ** (k + 1) <= 0.05 + 1e-12
    assert k == 0 or rate**k > 0.05
