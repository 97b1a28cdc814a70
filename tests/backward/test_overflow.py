"""An adjoint whose norm overflows while its residual is finite is not at rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backward.systems_backward import Told, solve_adjoint
from banach import AdjointWarning, Picard, Status, Tolerance
from banach.backward.adjoint import Adjoint
from banach.backward.jacobian import Jacobian
from banach.backward.krylov import in_cycles
from banach.latent import Space

J = 1.5 * torch.eye(8)
G = torch.ones(2, 8)


def overflows(w: Tensor) -> Tensor:
    """(samples,): w overflows, and its residual g + w / 2 does not."""
    residual = torch.linalg.vector_norm(G + w / 2, dim=1)
    return residual.isfinite() & ~torch.linalg.vector_norm(w, dim=1).isfinite()


@pytest.mark.filterwarnings("ignore:the adjoint equation missed its tolerance")
def test_a_diverging_iteration_is_never_called_stalled() -> None:
    """w_k = (3 1.5^k - 2) g diverges, past the largest number: w = g is kept, which has the least residual."""
    for steps in (1, 5, *range(100, 112)):
        told = Told()
        w = solve_adjoint(Picard(), J.expand(2, 8, 8), G, told, max_steps=steps, check_every=0, rtol=1e-6)
        torch.testing.assert_close(w, (3 * 1.5**steps - 2) * G if steps < 6 else G, rtol=1e-4, atol=0)
        assert told.status == [(Status.MAX_STEPS, Status.MAX_STEPS)]


@pytest.mark.parametrize("every", [1, 7])
def test_host_checks_bring_a_diverging_iteration_back_to_g(every: int) -> None:
    told = Told()
    for steps in range(100, 112):
        with pytest.warns(AdjointWarning, match="missed its tolerance"):
            w = solve_adjoint(Picard(), J.expand(2, 8, 8), G, told, max_steps=steps, check_every=every, rtol=1e-6)
        assert torch.equal(w, G)
        assert told.status[-1] == (Status.MAX_STEPS, Status.MAX_STEPS)


def test_a_cycle_that_overflows_is_mended_by_the_next() -> None:
    z, space = torch.zeros(2, 8), Space.of(torch.zeros(2, 8))
    jacobian = Jacobian(lambda z: z @ J, z, (), space, torch.ones(2))
    equation = Adjoint(jacobian, Tolerance(atol=0, rtol=1e-6, max_steps=4), 2.0**-23, G, torch.ones(2))
    moves = iter([7e18, -7e18])

    def cycle(equation: Adjoint, r: Tensor, active: Tensor, room: int) -> tuple[Tensor, int]:
        return active[:, None] * torch.full_like(r, next(moves)), 2

    assert (in_cycles(equation, cycle) == 0).all(), "g is beneath the rounding of 7e18, which comes and goes"
