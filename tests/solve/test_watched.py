"""A solve is the same, bit by bit, whether the host or the device keeps the numbers, and in a captured loop."""

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import RMS, Anderson, Broyden, Picard, Solution, Solver, Status, Tolerance, WorstPixel, solve
from banach.solve import Norm, context
from banach.solve.context import loops_by
from banach.solve.device import loop_eagerly
from contracts import same

SOLVERS: list[Solver] = [Picard(), Picard(0.3), Anderson(3), Broyden(4)]
solvers = pytest.mark.parametrize("solver", SOLVERS, ids=repr)
rtols = pytest.mark.parametrize("rtol", [0.0, 1e-3])


def kinds(z: Tensor, rate: Tensor, x: Tensor) -> Tensor:
    """Samples that converge at many rates; one that grows without bound, one that meets NaN, one that rounding
    keeps from its fixed point, one that circles."""
    value = rate * z + x
    spoilt = torch.where(z[4:5].abs().amax() > 3, torch.nan, value[4:5])
    rounded = 1.5 + torch.finfo(z.dtype).eps * (z[5:6] <= 1.5).to(z.dtype)
    return torch.cat([value[:3], value[3:4], spoilt, rounded, -z[6:7], value[7:]])


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    rate = torch.linspace(0.1, 0.9, 12, dtype=dtype).view(12, 1, 1, 1).repeat(1, 2, 3, 3)
    rate[3], rate[4] = 1e6, 1.5
    x = torch.rand(12, 2, 3, 3, generator=draw, dtype=dtype) + 0.1
    z0 = torch.zeros(12, 2, 3, 3, dtype=dtype)
    z0[5:7] = 1.5
    return z0, rate, x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [RMS(), WorstPixel()], ids=repr)
@rtols
@solvers
def test_every_way_to_end(
    solver: Solver, rtol: float, norm: Norm, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host finds is what the device finds."""
    tolerance = Tolerance(atol=0.0 if rtol else 1e-18, rtol=rtol, max_steps=40, norm=norm)
    z0, *inputs = problem(dtype)

    def once() -> tuple[Solution, list[Tensor]]:
        seen: list[Tensor] = []
        given: dict[str, Any] = {"inputs": tuple(inputs), "tolerance": tolerance, "record": True}
        return solve(kinds, z0, solver, on_step=lambda k, z: seen.append(z.clone()), **given), seen

    host, seen = once()
    monkeypatch.setattr(context, "is_compiling", lambda: True)  # so the device keeps the numbers
    monkeypatch.setattr(torch.compiler, "disable", lambda function: function)
    device, seen_there = once()
    same(host, device)
    assert (host.failures, host.fault) == (device.failures, device.fault)
    torch.testing.assert_close((host.trace, seen), (device.trace, seen_there), rtol=0, atol=0, equal_nan=True)
    assert solver != Picard() or rtol or set(host.status) == set(Status)


SLOPES = torch.tensor([0.1, 0.5, 0.8, 0.95], dtype=torch.float64)


def slow(u: Tensor, v: Tensor) -> Tensor:
    """Each sample contracts at its own rate, and not linearly."""
    return v + SLOPES[: len(u), None] * torch.tanh(u).roll(1, 1)


def data(count: int = 4) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def in_place(body: Any, active: Tensor, steps: Tensor, **limits: int) -> None:
    """Run a loop as a while node does: every run of the body reads and writes the same memory."""
    state = inspect.getclosurevars(body).nonlocals["state"]

    def addresses() -> list[int]:
        return [part.data_ptr() for part in (state.z, state.best_z, state.active, state.stats, *state.memory)]

    def checked() -> None:
        before = addresses()
        body()
        assert addresses() == before

    loop_eagerly(checked, active, steps, **limits)


@pytest.mark.parametrize("max_steps", [0, 1, 2, 6, 12, 45])
@pytest.mark.parametrize("rtol", [0.0, 1e-3])
@solvers
def test_a_solve_that_is_captured_is_the_same_solve(solver: Solver, rtol: float, max_steps: int) -> None:
    v, tolerance = data(), Tolerance(atol=1e-4, rtol=rtol, max_steps=max_steps)
    found = []
    for around in (nullcontext(), loops_by(in_place)):
        with around:
            found.append(solve(slow, torch.zeros_like(v), solver, inputs=(v,), tolerance=tolerance))
    same(*found)
