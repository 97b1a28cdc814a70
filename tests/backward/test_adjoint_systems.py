"""The linear solvers of Implicit on hard systems, each against a dense solve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from backward.systems_backward import (
    Reports,
    cotangents,
    dense,
    expanding,
    hard_contraction,
    mixed,
    non_normal,
    shift,
    solve_adjoint,
    spectrum,
    turning,
    worst,
)
from banach import (
    GMRES,
    AdjointWarning,
    Anderson,
    Broyden,
    Euclidean,
    NormalCG,
    Picard,
    Status,
    Tolerance,
    WorstPixel,
)
from banach.backward.adjoint import Adjoint
from banach.backward.jacobian import Jacobian
from banach.latent import Space
from problems import contraction

METHODS = [NormalCG(), GMRES(), GMRES(3), GMRES(1), Picard(), Picard(damping=0.2), Anderson(), Broyden()]
KRYLOV = [NormalCG(), GMRES()]
every = pytest.mark.parametrize("method", METHODS, ids=str)
krylov = pytest.mark.parametrize("method", KRYLOV, ids=str)
short = pytest.mark.parametrize("method", [NormalCG(), GMRES(3), Picard(), Anderson(), Broyden()], ids=str)


@pytest.mark.parametrize("method", [NormalCG(), GMRES(), GMRES(6), Anderson()], ids=str)
def test_ill_conditioned(method: Any) -> None:
    J, g = hard_contraction().expand(3, 12, 12), cotangents(3, 12)
    assert worst(solve_adjoint(method, J, g, max_steps=5000), dense(J, g)) <= 1e-8


@krylov
@pytest.mark.parametrize("system", [expanding, turning, non_normal], ids=lambda system: system.__name__)
def test_not_contractive_but_invertible(method: Any, system: Callable[[], Tensor]) -> None:
    J, g = system().expand(3, 8, 8), cotangents(3, 8)
    assert worst(solve_adjoint(method, J, g), dense(J, g)) <= 1e-9


def test_a_restart_that_stagnates_is_said() -> None:
    """Restarted GMRES need not converge where the field of values of I - J holds 0; it must not hide that."""
    J, g, log = non_normal().expand(2, 8, 8), cotangents(2, 8), Reports()
    with pytest.warns(AdjointWarning, match="missed its tolerance: allow more max_steps"):
        solve_adjoint(GMRES(2), J, g, log, max_steps=100)
    assert log.status == [(Status.MAX_STEPS, Status.MAX_STEPS)]


@every
@pytest.mark.parametrize("factor", [0.0, 0.5, -0.5])
def test_one_step_is_exact(method: Any, factor: float) -> None:
    """J = c I: an exact hit, after which every direction and difference is zero."""
    J, g, log = factor * torch.eye(5, dtype=torch.float64).expand(2, 5, 5), cotangents(2, 5), Reports()
    assert worst(solve_adjoint(method, J, g, log), g / (1 - factor)) <= 1e-11
    if hasattr(method, "solve"):
        assert log.products[0] <= 2 * 5


def test_gmres_happy_breakdown() -> None:
    """Two distinct eigenvalues: the Krylov space ends after two steps, and the basis has no third vector."""
    J = spectrum(torch.tensor([0.5] * 4 + [-0.7] * 4, dtype=torch.float64)).expand(2, 8, 8)
    g = cotangents(2, 8)
    assert worst(solve_adjoint(GMRES(), J, g, rtol=1e-15, max_steps=40), dense(J, g)) <= 1e-13


def test_gmres_keeps_its_basis_orthogonal() -> None:
    """I - J' has condition 1e14 here; orthogonalised once instead of twice, w is off in the eleventh digit."""
    J, g = 5 * shift(20)[None], cotangents(1, 20)
    z, one = torch.zeros_like(g), g.new_ones(1)
    jacobian = Jacobian(lambda z: torch.bmm(J, z[..., None])[..., 0], z, Space.of(g))
    tolerance = Tolerance(atol=0, rtol=1e-12, max_steps=80)
    w = GMRES(80).solve(Adjoint(jacobian, tolerance, 2.0**-52, g, one))
    assert worst(w, dense(J, g)) <= 1e-13


@short
@pytest.mark.parametrize("check_every", [0, 1, 4])
def test_a_finished_sample_is_frozen(method: Any, check_every: int) -> None:
    """At a loose tolerance the answer is far from exact, and the same to rounding in any batch."""
    J, g = mixed(), cotangents(6, 6)
    loose: dict[str, Any] = {"rtol": 0.03, "max_steps": 60, "check_every": check_every}
    together, exact = solve_adjoint(method, J, g, **loose), dense(J, g)
    for i in range(6):
        alone = solve_adjoint(method, J[i : i + 1], g[i : i + 1], **loose)
        assert worst(together[i : i + 1], alone) <= 1e-12
    assert worst(together, exact) > 1e-4


@short
@pytest.mark.parametrize("power", [-100, 100])
def test_the_size_of_the_cotangent_does_not_matter(method: Any, power: int) -> None:
    """In float32 the square of 1e-30 is zero: found as a gradient that stayed at its first guess."""
    J, g = contraction(6, 0.8).float().expand(2, 6, 6), cotangents(2, 6).float()
    scale = 2.0**power
    small = solve_adjoint(method, J, g * scale, rtol=1e-5)
    assert worst(small.double() / scale, dense(J, g)) <= 1e-4


@short
@pytest.mark.parametrize("norm", [Euclidean(), WorstPixel()], ids=str)
def test_other_norms(method: Any, norm: Any) -> None:
    J, g = contraction(6, 0.8).expand(2, 6, 6), cotangents(2, 6)
    assert worst(solve_adjoint(method, J, g, norm=norm), dense(J, g)) <= 1e-10


@every
def test_an_absolute_tolerance(method: Any) -> None:
    J, g, log = contraction(30, 0.8).expand(2, 30, 30), cotangents(2, 30), Reports()
    solve_adjoint(method, J, g, log, atol=1e-3, rtol=0)
    assert (log.residual[0] <= 1e-3).all()
    assert (log.residual[0] > 1e-9).all()


@short
def test_zero_steps_give_jfb(method: Any) -> None:
    J, g = contraction(6, 0.8).expand(2, 6, 6), cotangents(2, 6)
    with pytest.warns(AdjointWarning, match="missed its tolerance"):
        w = solve_adjoint(method, J, g, max_steps=0)
    assert torch.equal(w, g)


@short
def test_a_fixed_depth_syncs_with_host_for_nothing(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    J, g = mixed()[:4], cotangents(4, 6)

    def asked(*_: Any) -> None:
        raise AssertionError("the host was asked")

    for question in ("__bool__", "item", "tolist", "__float__", "__int__", "numpy"):
        monkeypatch.setattr(torch.Tensor, question, asked)
    w = solve_adjoint(method, J, g, max_steps=400, check_every=0)
    monkeypatch.undo()
    assert worst(w, dense(J, g)) <= 1e-10
