"""An adjoint whose norm overflows while its residual is finite is not at rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backward.systems_backward import Reports, solve_adjoint
from banach import AdjointWarning, Picard, Status, Tolerance
from banach.backward.adjoint import Adjoint
from banach.backward.jacobian import Jacobian
from banach.backward.krylov import in_cycles
from banach.latent import Space

J = 1.5 * torch.eye(8)
G = torch.ones(2, 8)


def equation(steps: int = 4) -> Adjoint:
    z, space = torch.zeros(2, 8), Space.of(torch.zeros(2, 8))
    jacobian = Jacobian(lambda z: z @ J, z, (), space, torch.ones(2))
    return Adjoint(jacobian, Tolerance(atol=0, rtol=1e-6, max_steps=steps), 2.0**-23, G, torch.ones(2))


def test_a_diverging_iterate_is_never_called_stalled() -> None:
    """w = (3 1.5^k - 2) g after k steps of Picard's, and its residual is g + w / 2."""
    overflowed = 0
    for steps in range(100, 112):
        w = (3 * 1.5**steps - 2) * G
        finite = torch.linalg.vector_norm(G + w / 2, dim=1).isfinite()
        ends = tuple(Status.MAX_STEPS if fine else Status.NONFINITE for fine in finite.tolist())
        assert equation().ends(w) == ends
        overflowed += int((finite & ~torch.linalg.vector_norm(w, dim=1).isfinite()).any())
    assert overflowed, "at some steps w overflows and the residual does not, or nothing is tested"


@pytest.mark.parametrize("every", [1, 7])
def test_host_checks_bring_a_diverging_iteration_back_to_g(every: int) -> None:
    log = Reports()
    for steps in range(100, 112):
        with pytest.warns(AdjointWarning, match="missed its tolerance"):
            w = solve_adjoint(Picard(), J.expand(2, 8, 8), G, log, max_steps=steps, check_every=every, rtol=1e-6)
        assert torch.equal(w, G)
        assert log.status[-1] == (Status.MAX_STEPS, Status.MAX_STEPS)


def test_a_cycle_that_overflows_is_mended_by_the_next() -> None:
    moves = iter([7e18, -7e18])

    def cycle(equation: Adjoint, r: Tensor, active: Tensor, room: int) -> tuple[Tensor, int]:
        return active[:, None] * torch.full_like(r, next(moves)), 2

    w = in_cycles(equation(), cycle)
    assert (w == 0).all(), "g is beneath the rounding of 7e18, which comes and goes"
