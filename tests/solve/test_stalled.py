"""STALLED: the exact condition, on scripted residuals, and the cases it is meant for."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import Anderson, Broyden, Picard, Solver, Status, Tolerance, solve
from problems import tanh_network

ULP = 2.0**-23  # of float32 numbers in [1, 2): eps(float32) times the norm of 1
STALLED, MAX_STEPS, CONVERGED = Status.STALLED, Status.MAX_STEPS, Status.CONVERGED


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize(
    ("ulps", "every", "status", "steps"),
    [
        ([1] * 30, 1, STALLED, 11),  # ten evaluations without a new least
        ([1] * 10, 1, MAX_STEPS, 10),
        ([1] * 11, 1, STALLED, 11),
        ([3, 3, 3, 2, 2, 2, 1] + [1] * 30, 1, STALLED, 17),  # a new least starts the count again
        ([2, 1] + [1] * 30, 1, STALLED, 12),  # an equal residual is no new least
        # eps * |T(z)| is 1.25 ULP: 2 ULP is above it, 1 ULP below; judged by the residual it has then.
        ([2] * 40, 1, MAX_STEPS, 40),
        ([1] + [2] * 20 + [1, 2, 2], 1, STALLED, 22),
        ([1] * 40, 2, STALLED, 12),  # judged at checks only
        ([1] * 40, 3, STALLED, 12),
        ([1] * 40, 7, STALLED, 14),
        ([1] * 40, 11, STALLED, 11),
        ([1] * 40, 0, MAX_STEPS, 40),  # never without checks
        ([1] * 40, 41, STALLED, 40),  # the last step is checked
        ([1] * 10 + [0, 1], 1, CONVERGED, 11),  # convergence comes first
    ],
)
def test_scripted_residuals(ulps: list[int], every: int, status: Status, steps: int, coupled: bool) -> None:
    """T(z) = z +- so many roundings, in turn: residuals are exactly `ulps` * ULP, and z stays in (1, 1.5)."""
    moves, seen = iter(range(len(ulps))), list[Tensor]()

    def T(z: Tensor) -> Tensor:
        k = next(moves)
        return z + (ULP if k % 2 == 0 else -ULP) * ulps[k]

    tolerance = Tolerance(atol=1e-12, max_steps=len(ulps), check_every=every)
    how: dict[str, Any] = {"coupled": coupled, "on_step": lambda k, z: seen.append(z)}
    found = solve(T, torch.full((1, 1), 1.25), tolerance=tolerance, **how)
    assert (found.status, found.steps.tolist()) == ((status,), [steps])
    assert (found.residual == ulps[steps - 1] * ULP).all(), "the residual is that of the last evaluation"
    assert torch.equal(found.value, seen[steps - 1]), "the value is the last iterate"
    assert found.converged.tolist() == [status is CONVERGED]


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("every", "steps"), [(1, 11), (3, 12), (5, 15)])
def test_one_stalls_while_others_go_on(compact: bool, every: int, steps: int) -> None:
    flip = torch.tensor([[ULP], [0.0], [0.0]])
    rate = torch.tensor([[0.0], [0.99], [0.5]])

    def T(z: Tensor, flip: Tensor, rate: Tensor) -> Tensor:
        return torch.where(flip > 0, torch.where(z > 1.25, 1.25, 1.25 + flip), rate * z)

    z0 = torch.tensor([[1.25], [1.0], [1.0]])
    tolerance = Tolerance(atol=1e-7, max_steps=60, check_every=every)
    found = solve(T, z0, inputs=(flip, rate), tolerance=tolerance, compact=compact)
    assert found.status == (STALLED, MAX_STEPS, CONVERGED)
    assert found.failures == {STALLED, MAX_STEPS}
    assert found.steps.tolist() == [steps, 60, 24]
    assert found.value[0].item() == (1.25 + ULP if steps % 2 else 1.25), "it stays where it stalled"


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden()], ids=repr)
@pytest.mark.parametrize(("bf16", "atol", "most"), [(False, 1e-12, 120), (True, 1e-6, 500)])
def test_a_tolerance_that_the_arithmetic_cannot_meet(solver: Solver, bf16: bool, atol: float, most: int) -> None:
    p = tanh_network(batch=6, n=64, gamma=0.9, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        found = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=Tolerance(atol=atol, max_steps=2000))
    assert set(found.status) <= {STALLED, CONVERGED}
    assert STALLED in found.status
    assert int(found.steps.max()) < most, "says so instead of spending the steps"
    size = p.closed(found.value).square().mean(1).sqrt()
    assert (found.residual[found.stalled] <= ((2.0**-7 if bf16 else ULP) * size * 1.01)[found.stalled]).all()


BF16 = torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("where", "dtype", "bits", "status"),
    [
        (nullcontext(), torch.float32, 10, MAX_STEPS),
        (BF16, torch.float32, 10, STALLED),
        (BF16, torch.float64, 10, MAX_STEPS),  # autocast leaves float64 alone
        (nullcontext(), torch.float32, 7, MAX_STEPS),
        (nullcontext(), torch.bfloat16, 7, STALLED),
    ],
)
def test_the_rounding_is_that_of_the_type_T_computes_in(
    where: AbstractContextManager[Any], dtype: torch.dtype, bits: int, status: Status
) -> None:
    """The residual is 2^-bits of T: above float32's rounding, at or below bfloat16's 2^-7."""

    def T(z: Tensor) -> Tensor:
        return torch.where(z > 1.0, 1.0, 1.0 + 2.0**-bits).to(z.dtype)

    with where:
        found = solve(T, torch.ones(1, 1, dtype=dtype), tolerance=Tolerance(atol=1e-6, max_steps=40))
    assert found.status == (status,)
