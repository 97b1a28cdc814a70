"""The linear solvers of Implicit: hard systems against dense solves, and a w that is never worse than g."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from backward.systems_backward import (
    METHODS,
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
    Implicit,
    NormalCG,
    Picard,
    Status,
    Tolerance,
    WorstPixel,
    fixed_point,
)
from banach.latent import Space
from banach.solve.context import loops_by
from banach.solve.device import loop_eagerly
from problems import contraction, normal

every = pytest.mark.parametrize("method", METHODS, ids=str)
missed = pytest.mark.filterwarnings("ignore:the adjoint equation missed:banach.AdjointWarning")


TWO = torch.tensor([0.5] * 4 + [-0.7] * 4, dtype=torch.float64)
HARD: list[tuple[Any, Tensor, dict[str, Any], float]] = [
    *((method, hard_contraction(), {"max_steps": 5000}, 1e-8) for method in (NormalCG(), GMRES(6), Anderson())),
    *((method, J(), {}, 1e-9) for method in (NormalCG(), GMRES()) for J in (expanding, turning, non_normal)),
    # Two distinct eigenvalues: the Krylov space ends after two steps, and the basis has no third vector.
    (GMRES(), spectrum(TWO), {"rtol": 1e-15, "max_steps": 40}, 1e-13),
    # Condition 1e14; orthogonalised once instead of twice, w is off in the eleventh digit.
    (GMRES(80), 5 * shift(20), {"check_every": 0}, 5e-12),
]


@pytest.mark.parametrize(("method", "J", "tolerance", "allowed"), HARD)
def test_hard_systems(method: Any, J: Tensor, tolerance: dict[str, Any], allowed: float) -> None:
    """Ill-conditioned, or not contractive but invertible."""
    J, g = J.expand(3, *J.shape), cotangents(3, len(J))
    assert worst(solve_adjoint(method, J, g, **tolerance), dense(J, g)) <= allowed


@every
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


@every
@pytest.mark.parametrize("power", [-100, 100])
def test_the_size_of_the_cotangent_does_not_matter(method: Any, power: int) -> None:
    """In float32 the square of 1e-30 is zero: found as a gradient that stayed at its first guess."""
    J, g = contraction(6, 0.8).float().expand(2, 6, 6), -cotangents(2, 6).float().abs()
    scale = 2.0**power
    small = solve_adjoint(method, J, g * scale, rtol=1e-5)
    assert worst(small.double() / scale, dense(J, g)) <= 1e-4


@every
@pytest.mark.parametrize("norm", [Euclidean(), WorstPixel()], ids=str)
def test_other_norms_and_an_absolute_tolerance(method: Any, norm: Any) -> None:
    J, g, log = contraction(30, 0.8).expand(2, 30, 30), cotangents(2, 30), Reports()
    assert worst(solve_adjoint(method, J, g, norm=norm), dense(J, g)) <= 1e-10
    solve_adjoint(method, J, g, log, atol=1e-3, rtol=0)
    assert ((log.residual[0] <= 1e-3) & (log.residual[0] > 1e-9)).all()


@every
@pytest.mark.parametrize("order", [1, 2])
def test_a_fixed_depth_syncs_with_host_for_nothing(
    method: Any, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    J, g = mixed()[:4], cotangents(4, 6)

    def asked(*_: Any) -> None:
        raise AssertionError("the host was asked")

    for question in ("__bool__", "item", "tolist", "__float__", "__int__", "numpy"):
        monkeypatch.setattr(torch.Tensor, question, asked)
    w = solve_adjoint(method, J, g, order=order, max_steps=400, check_every=0)
    monkeypatch.undo()
    assert worst(w, dense(J, g)) <= 1e-10


# The safeguard.

MAPS, MIXING, WIDTH, BATCH = 250, 125, 5, 3  # of each kind, in float32 and float64: 1,000 in all


def weights(count: int, n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random matrices of norm from .2 to 20: some contract, most do not."""
    W = normal(count, n, n, seed=seed)
    scale = torch.logspace(-0.7, 1.3, count, dtype=torch.float64) / torch.linalg.matrix_norm(W, 2)
    return (W * scale[:, None, None]).to(dtype)


def lengths(J: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """|g - (I - J') w| per sample, in float64; J is that of the whole batch, (samples, width) twice."""
    J, g, w = J.double(), g.double(), w.double()
    return torch.linalg.vector_norm(g - w + torch.einsum("ikjl,ik->jl", J, w), dim=1)


def check_no_worse(J: Tensor, g: Tensor, w: Tensor) -> None:
    """Up to rounding: of the products, and of the terms that cancel in the residual."""
    eps, J = torch.finfo(g.dtype).eps, J.double()
    terms = torch.linalg.vector_norm(w.double()) * (1 + torch.linalg.matrix_norm(J.flatten(2).flatten(0, 1), 2))
    assert w.isfinite().all()
    assert (lengths(J, g, w) <= lengths(J, g, g) * (1 + 20 * eps) + 20 * eps * terms).all()


@missed
@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_random_maps_of_independent_samples(method: Any, dtype: torch.dtype) -> None:
    """One map per sample: tanh(W z + x), at any point. Those that contract are solved all the same."""
    W, x, z = weights(MAPS, WIDTH, dtype, 120), normal(MAPS, WIDTH, seed=121), normal(MAPS, WIDTH, seed=122)
    z, x, g = z.to(dtype), x.to(dtype).requires_grad_(), normal(MAPS, WIDTH, seed=123).to(dtype)

    def T(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(torch.bmm(W, z[..., None])[..., 0]) + x

    log = Reports()
    mode = Implicit(method, Tolerance(atol=0, rtol=1e-4, max_steps=30), report=log)
    (w,) = torch.autograd.grad(mode.attach(T, z, (x,)), x, g)
    slope = 1 - torch.tanh(torch.bmm(W, z[..., None])) ** 2
    for i, J in enumerate(slope * W):
        check_no_worse(J[None, :, None], g[i : i + 1], w[i : i + 1])
    assert all(status is Status.CONVERGED for status in log.status[0][: MAPS // 5])


@missed
@every
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_random_maps_that_mix_samples(method: Any, dtype: torch.dtype, coupled: bool) -> None:
    n = BATCH * WIDTH
    for i, W in enumerate(weights(MIXING, n, dtype, 124 + coupled)):
        x = torch.zeros(BATCH, WIDTH, dtype=dtype, requires_grad=True)
        z, g = (normal(BATCH, WIDTH, seed=1000 * s + i).to(dtype) for s in (1, 2))
        mode = Implicit(method, Tolerance(atol=0, rtol=1e-3, max_steps=4 + i % 5))

        def T(z: Tensor, x: Tensor, W: Tensor = W) -> Tensor:
            return torch.tanh(W @ z.view(n)).view(z.shape) + x

        value = mode.attach(T, z, (x,), coupled=coupled)
        (w,) = torch.autograd.grad(value, x, g)
        J = ((1 - torch.tanh(W @ z.view(n)) ** 2)[:, None] * W).view(BATCH, WIDTH, BATCH, WIDTH)
        if coupled:  # one system, whose residual is that of the whole batch
            J, w, g = J.reshape(1, n, 1, n), w.view(1, n), g.view(1, n)
        check_no_worse(J, g, w)


def test_a_diverged_adjoint_was_minus_2_7e87() -> None:
    """J has one eigenvalue -1.5: Anderson finds the fixed point, and Picard's adjoint diverges."""
    J = spectrum(torch.tensor([-1.5, 0.5, 0.3, -0.2, 0.1, 0.0], dtype=torch.float64))
    theta, b = torch.ones((), dtype=torch.float64, requires_grad=True), normal(1, 6, seed=125)

    def gradient(backward: Implicit) -> Tensor:
        z = fixed_point(
            lambda z: theta * z @ J.T + b,
            torch.zeros_like(b),
            solver=Anderson(),
            tolerance=Tolerance(atol=1e-13, max_steps=500),
            backward=backward,
        )
        return torch.autograd.grad(z.sum(), theta)[0]

    A = torch.eye(6, dtype=torch.float64) - J
    exact = torch.linalg.solve(A, J @ torch.linalg.solve(A, b[0])).sum()
    log = Reports()
    with pytest.warns(AdjointWarning, match=r"use GMRES\(\) or NormalCG\(\)"):
        diverged = gradient(Implicit(Picard(), report=log))
    assert abs(diverged) <= abs(exact)
    assert log.status == [(Status.MAX_STEPS,)]
    assert float(log.residual[0]) <= float(J.T.sum(1).square().mean().sqrt()) * (1 + 1e-12)  # that of g, all ones
    for method in (NormalCG(), GMRES(), Anderson(), Broyden()):
        assert torch.allclose(gradient(Implicit(method)), exact, rtol=1e-6)


@every
@pytest.mark.parametrize(("dtype", "tiny"), [(torch.float32, 1e-8), (torch.float64, -1e-17)])
def test_a_sample_whose_J_is_below_rounding_leaves_the_others_exact(
    method: Any, dtype: torch.dtype, tiny: float
) -> None:
    """Picard, Anderson and Broyden gave all samples w = g, 0.1 of the gradient, and blamed contraction."""
    J = torch.tensor([0.9, tiny, 0.9], dtype=dtype)[:, None, None] * torch.eye(4, dtype=dtype)
    w = solve_adjoint(method, J, torch.ones(3, 4, dtype=dtype), Reports(), rtol=1e-5, max_steps=400)
    torch.testing.assert_close(w[:, 0], 1 / (1 - J[:, 0, 0]), rtol=1e-4, atol=0)


@every
def test_a_forgotten_coupled_is_named(method: Any) -> None:
    """A 1-d latent is ten samples; the gradient was -2.8e5 for 88, and the warning blamed contraction."""
    A, b = contraction(10, 0.95), normal(10, seed=129)
    theta = torch.ones((), dtype=torch.float64, requires_grad=True)
    eye, start = torch.eye(10, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)
    z = torch.linalg.solve(eye - A, b)
    exact = float(torch.linalg.solve(eye - A, A @ z).sum())
    mode = Implicit(method, Tolerance(atol=0, rtol=1e-8, max_steps=20))

    def gradient(mode: Implicit, coupled: bool) -> float:
        value = mode.attach(lambda z: theta * (A @ z) + b, z + start, coupled=coupled)
        return float(torch.autograd.grad(value.sum(), theta)[0])

    with pytest.warns(AdjointWarning, match="T mixes samples: pass coupled=True"):
        found = gradient(mode, coupled=False)
    assert abs(found) <= 10 * abs(exact)
    assert gradient(Implicit(GMRES()), coupled=True) == pytest.approx(exact, rel=1e-6)
    with pytest.warns(AdjointWarning, match="missed its tolerance: (?!T mixes)"):
        gradient(replace(mode, tolerance=Tolerance(atol=0, max_steps=1)), coupled=True)


def test_default_tolerance_follows_the_type_of_the_computation() -> None:
    def rtol(z: Tensor) -> float:
        tolerance = Implicit().tolerance_for(Space.of(z))
        assert (tolerance.atol, tolerance.max_steps) == (0, 500)
        return tolerance.rtol

    z = torch.zeros(2, 3)
    assert [rtol(z.double()), rtol(z), rtol(z.bfloat16()), rtol(z.half())] == [1e-8, 1e-5, 1e-2, 1e-2]
    with torch.autocast("cpu", torch.bfloat16):
        assert [rtol(z.double()), rtol(z)] == [1e-8, 1e-2]
    mine = Tolerance(rtol=1e-3)
    assert Implicit(tolerance=mine).tolerance_for(Space.of(z)) is mine


def test_an_iterate_that_overflows_is_never_called_stalled() -> None:
    """w = (3 1.5^k - 2) g after k steps of Picard: at some k its norm overflows while its residual is finite."""
    J, g, log = 1.5 * torch.eye(8).expand(2, 8, 8), torch.ones(2, 8), Reports()
    for steps in range(100, 112):
        with pytest.warns(AdjointWarning, match="missed its tolerance"):
            assert torch.equal(solve_adjoint(Picard(), J, g, log, max_steps=steps, rtol=1e-6), g)
        assert log.status[-1] == (Status.MAX_STEPS, Status.MAX_STEPS)


# In a captured backward pass the loop runs on the device.

CASES: list[tuple[Any, float]] = [(NormalCG(), -1.5), (Picard(), -1.5), (Anderson(6), -1.5)]
CASES += [(method, 0.4) for method in (NormalCG(), Picard(), Anderson(3), Broyden(4))]


@missed
@pytest.mark.parametrize(("method", "slope"), CASES, ids=repr)
def test_a_captured_adjoint_is_exact(method: Any, slope: float) -> None:
    """Where Picard diverges, a captured one falls back to w = g too."""
    A, g = normal(6, 6), cotangents(3, 6)
    J = (slope * (A + A.T) / torch.linalg.matrix_norm(A + A.T, 2)).expand(3, 6, 6)
    with loops_by(loop_eagerly):
        w = solve_adjoint(method, J, g, rtol=1e-10, max_steps=500)
    diverges = slope == -1.5 and isinstance(method, Picard)
    torch.testing.assert_close(w, g if diverges else dense(J, g), rtol=1e-8, atol=1e-8)
