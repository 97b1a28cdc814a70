"""Diverging samples: the fast paths report them as the network does, and keep the best finite iterate."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import banach
from banach import ConvergenceWarning, ImplicitNetwork, Picard, Status, Tolerance
from banach.fast import FastNetwork

RELATIVE = Tolerance(atol=0, rtol=1e-3, max_steps=500)


class Slope(nn.Module):
    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return v * u + 1


class Square(nn.Module):
    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return u * u + v


class Countdown(nn.Module):
    """T(u) = u - 1, but for T(1), which is infinite: 4, 3, 2, 1, and no further."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.where(u == 1, torch.inf, u - v)


def network(R: nn.Module, **options: Any) -> Any:
    return ImplicitNetwork(nn.Identity(), R, nn.Identity(), **options).eval()


def own_answer(net: Any, d: Tensor, z0: Tensor | None = None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return net(d, z0=z0, solution=True)


@pytest.mark.parametrize("slope", [1.2, 3.0, -2.5])
@pytest.mark.parametrize("solver", [Picard(), Picard(damping=0.2)])
def test_growth_without_end_is_no_convergence(slope: float, solver: Any) -> None:
    """The norm of T(z) overflows before z does: then all residuals are below rtol times infinity."""
    net = network(Slope(), solver=solver, tolerance=RELATIVE)
    d = torch.tensor([[slope], [0.5]]).expand(2, 8).contiguous()
    y, found = banach.compile(net)(d, solution=True)
    wanted, own = own_answer(net, d)
    assert found.status == own.status == (Status.NONFINITE, Status.CONVERGED)
    assert found.converged.tolist() == [False, True]
    torch.testing.assert_close(found.value[0], own.value[0])
    torch.testing.assert_close(found.residual[0], own.residual[0])
    torch.testing.assert_close(y[0], wanted[0])
    torch.testing.assert_close(y[1], torch.full((8,), 2.0), rtol=5e-3, atol=0)


@pytest.mark.parametrize("slope", [1.2, 3.0])
def test_a_captured_step_says_so_too(slope: float) -> None:
    """And keeps what is not finite, so that the loss shows it."""
    y, found = FastNetwork(network(Slope(), tolerance=RELATIVE))(torch.tensor([[slope] * 8, [0.5] * 8]))
    assert found is not None
    assert (found.nonfinite.tolist(), found.converged.tolist()) == ([True, False], [False, True])
    torch.testing.assert_close(y[1], torch.full((8,), 2.0), rtol=5e-3, atol=0)


def test_an_overflow_keeps_the_best_iterate() -> None:
    net = network(Square())
    d = torch.tensor([[9.0, 9.0], [0.1, 0.2]])
    y, found = banach.compile(net)(d, solution=True)
    wanted, own = own_answer(net, d)
    assert found.status == (Status.NONFINITE, Status.CONVERGED)
    assert found.value[0].tolist() == own.value[0].tolist() == [0.0, 0.0]
    assert found.residual[0].item() == pytest.approx(9.0)
    assert y[0].tolist() == wanted[0].tolist() == [9.0, 9.0]
    torch.testing.assert_close(y[1], (1 - (1 - 4 * d[1]).sqrt()) / 2, rtol=1e-3, atol=0)


def test_T_is_finite_at_what_is_kept() -> None:
    """The iteration reaches 1, where T is infinite: what is kept is an earlier iterate."""
    net = network(Countdown(), tolerance=Tolerance(max_steps=9))
    d, z0 = torch.ones(2, 3), torch.tensor([[4.0], [40.0]]).expand(2, 3).contiguous()
    y, found = banach.compile(net)(d, z0=z0, solution=True)
    assert found.status == (Status.NONFINITE, Status.MAX_STEPS)
    assert found.value.tolist() == [[4.0] * 3, [31.0] * 3]
    assert y.tolist() == [[3.0] * 3, [30.0] * 3]
    assert found.residual.tolist() == pytest.approx([1.0, 1.0])


def test_where_T_is_finite_nowhere_the_start_is_kept() -> None:
    net = network(Slope())
    found = banach.compile(net)(torch.tensor([[torch.nan], [0.5]]), solution=True)[1]
    assert found.value[0].tolist() == [0.0]
    assert found.residual[0].item() == math.inf
    assert found.status == (Status.NONFINITE, Status.CONVERGED)


@pytest.mark.parametrize("max_steps", [50, 9])
def test_an_iteration_that_diverges_to_the_last_step_keeps_its_best_iterate_and_warns(max_steps: int) -> None:
    """1.2^50 is finite, and not an answer."""
    net = network(Slope(), tolerance=Tolerance(max_steps=max_steps))
    fast, d = banach.compile(net), torch.tensor([[1.2, 1.2], [-1.5, -1.5], [0.1, 0.1]])
    y, found = fast(d, solution=True)
    wanted, own = own_answer(net, d)
    assert found.status == own.status == (Status.MAX_STEPS, Status.MAX_STEPS, Status.CONVERGED)
    assert own.diverged[:2].tolist() == [max_steps == 50, True]
    torch.testing.assert_close(found.value[:2], own.value[:2])
    torch.testing.assert_close(found.residual[:2], own.residual[:2])
    torch.testing.assert_close(y[:2], wanted[:2])
    with pytest.warns(ConvergenceWarning, match="stopped at max_steps above the tolerance; print") as caught:
        torch.testing.assert_close(fast(d), y)
    assert caught[0].filename == __file__
    net.tolerance = Tolerance(max_steps=max_steps, check_every=0)
    fast(d)  # a fixed depth is meant


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_float64_is_judged_in_float64(size: float) -> None:
    """In float32 the square of 1e-25 is nothing, and that of 1e25 is infinite."""

    class Half(nn.Module):
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return 0.5 * u + v

    net = network(Half(), tolerance=Tolerance(atol=0, rtol=1e-6, max_steps=200))
    d = size * torch.ones(1, 4, dtype=torch.float64)
    y, found = banach.compile(net)(d, solution=True)
    assert found.status == (Status.CONVERGED,)
    assert int(found.steps) == int(net(d, solution=True)[1].steps) == 20
    torch.testing.assert_close(y, 2 * d, rtol=1e-6, atol=0)
    reached: Any = FastNetwork(net)(d)[1]
    assert (reached.converged.tolist(), reached.steps.tolist()) == ([True], [20])
    assert reached.residual.dtype == torch.float64
