"""STALLED: the exact condition, on scripted residuals, and the cases it is meant for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from banach import Anderson, Broyden, Picard, Solver, Status, Tolerance, solve
from problems import affine, tanh_network

ULP = 2.0**-23  # of float32 numbers in [1, 2): eps(float32) times the norm of 1


def scripted(ulps: list[int]) -> Callable[[Tensor], Tensor]:
    """T(z) = z +- so many roundings, in turn: residuals are exactly `ulps` * ULP, and z stays in (1, 1.5)."""
    moves = iter(range(len(ulps)))

    def T(z: Tensor) -> Tensor:
        k = next(moves)
        return z + (ULP if k % 2 == 0 else -ULP) * ulps[k]

    return T


def run(ulps: list[int], *, check_every: int = 1, coupled: bool = False) -> tuple[Status, int]:
    tolerance = Tolerance(atol=1e-12, max_steps=len(ulps), check_every=check_every)
    found = solve(scripted(ulps), torch.full((1, 1), 1.25), tolerance=tolerance, coupled=coupled)
    assert (found.residual == ulps[int(found.steps) - 1] * ULP).all(), (
        "the residual is that of the last evaluation"
    )
    return found.status[0], int(found.steps)


def test_ten_evaluations_without_a_new_least() -> None:
    assert run([1] * 30) == (Status.STALLED, 11)
    assert run([1] * 10) == (Status.MAX_STEPS, 10)
    assert run([1] * 11) == (Status.STALLED, 11)


def test_a_new_least_starts_the_count_again() -> None:
    assert run([3, 3, 3, 2, 2, 2, 1] + [1] * 30) == (Status.STALLED, 17)


def test_an_equal_residual_is_no_new_least() -> None:
    assert run([2, 1] + [1] * 30) == (Status.STALLED, 12)


def test_only_at_a_residual_below_rounding() -> None:
    # eps * |T(z)| is 1.25 ULP: 2 ULP is above it, 1 ULP below.
    assert run([2] * 40) == (Status.MAX_STEPS, 40)
    assert run([1] + [2] * 20 + [1, 2, 2]) == (Status.STALLED, 22), "judged by the residual it has then"


@pytest.mark.parametrize(("every", "steps"), [(2, 12), (3, 12), (4, 12), (7, 14), (11, 11)])
def test_judged_at_checks_only(every: int, steps: int) -> None:
    assert run([1] * 40, check_every=every) == (Status.STALLED, steps)


def test_never_without_checks() -> None:
    assert run([1] * 40, check_every=0) == (Status.MAX_STEPS, 40)
    assert run([1] * 40, check_every=41) == (Status.STALLED, 40), "the last step is checked"


def test_convergence_comes_first() -> None:
    assert run([1] * 10 + [0, 1]) == (Status.CONVERGED, 11)


def test_coupled() -> None:
    assert run([1] * 30, coupled=True) == (Status.STALLED, 11)


def test_value_is_the_last_iterate() -> None:
    seen: list[Tensor] = []
    tolerance = Tolerance(atol=1e-12, max_steps=40)
    found = solve(
        scripted([1] * 40), torch.full((1, 1), 1.25), tolerance=tolerance, on_step=lambda k, z: seen.append(z)
    )
    assert torch.equal(found.value, seen[10])
    assert not found.converged.any()


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
    assert found.status == (Status.STALLED, Status.MAX_STEPS, Status.CONVERGED)
    assert found.steps.tolist() == [steps, 60, 24]
    assert found.value[0].item() == (1.25 + ULP if steps % 2 else 1.25), "it stays where it stalled"


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden()], ids=repr)
def test_float32_that_is_asked_for_too_much(solver: Solver) -> None:
    p = tanh_network(batch=6, n=64, gamma=0.9, dtype=torch.float32)
    found = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=Tolerance(atol=1e-12, max_steps=2000))
    assert set(found.status) <= {Status.STALLED, Status.CONVERGED}
    assert Status.STALLED in found.status
    assert int(found.steps.max()) < 120, "says so instead of burning steps"
    size = p.closed(found.value).square().mean(1).sqrt()
    stalled = torch.tensor([status is Status.STALLED for status in found.status])
    assert (found.residual[stalled] <= 2.0**-23 * size[stalled] * 1.01).all()


def test_float64_is_not_called_stalled_at_the_rounding_of_float32() -> None:
    p = affine(gamma=0.9)
    found = solve(p.T, p.z0, inputs=p.inputs, tolerance=Tolerance(atol=1e-12, max_steps=2000))
    assert set(found.status) == {Status.CONVERGED}


@pytest.mark.parametrize("solver", [Picard(), Anderson()], ids=repr)
def test_bfloat16_autocast_cannot_meet_the_default(solver: Solver) -> None:
    p = tanh_network(batch=16, n=32, gamma=0.95, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=Tolerance(atol=1e-6, max_steps=1000))
    assert set(found.status) <= {Status.STALLED, Status.CONVERGED}
    assert Status.STALLED in found.status
    assert int(found.steps.max()) < 500
    size = p.closed(found.value).square().mean(1).sqrt()
    assert (found.residual <= 2.0**-7 * size * 1.01).all()


def test_autocast_widens_the_rounding() -> None:
    # The residual is 2^-10 of T: far above float32's rounding, below bfloat16's.
    def T(z: Tensor) -> Tensor:
        return torch.where(z > 1.0, 1.0, 1.0 + 2.0**-10)

    tolerance = Tolerance(atol=1e-6, max_steps=40)
    assert solve(T, torch.ones(1, 1), tolerance=tolerance).status == (Status.MAX_STEPS,)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert solve(T, torch.ones(1, 1), tolerance=tolerance).status == (Status.STALLED,)
        wide = solve(T, torch.ones(1, 1, dtype=torch.float64), tolerance=tolerance)
        assert wide.status == (Status.MAX_STEPS,), "autocast leaves float64 alone"


def test_bfloat16_latents_have_their_own_rounding() -> None:
    def T(z: Tensor) -> Tensor:
        return torch.where(z > 1.0, 1.0, 1.0 + 2.0**-7).to(z.dtype)

    tolerance = Tolerance(atol=1e-6, max_steps=40)
    assert solve(T, torch.ones(1, 1), tolerance=tolerance).status == (Status.MAX_STEPS,)
    found = solve(T, torch.ones(1, 1, dtype=torch.bfloat16), tolerance=tolerance)
    assert (found.status, found.steps.item()) == ((Status.STALLED,), 11)
