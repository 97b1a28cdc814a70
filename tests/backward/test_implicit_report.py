"""What Implicit tells: true products, residuals and statuses; one warning, and none for a bad cotangent."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from backward.maps_backward import batch_norm, layer
from backward.systems_backward import (
    Told,
    cotangents,
    dense,
    hard_contraction,
    mixed,
    residual,
    solve_adjoint,
    worst,
)
from banach import GMRES, JFB, AdjointWarning, Anderson, Broyden, Implicit, NormalCG, Picard, Status, Tolerance
from banach.backward.jacobian import Jacobian
from problems import contraction, normal

METHODS = [NormalCG(), GMRES(), GMRES(4), Picard(), Anderson(), Broyden()]
every = pytest.mark.parametrize("method", METHODS, ids=str)
COUNT: Counter[str] = Counter()


class Counted(torch.autograd.Function):
    """The identity; its derivative counts products with J', and that one's derivative products with J."""

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        if name == "J'":
            COUNT[name] += len(x)
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if ctx.name == "J'":
            COUNT["J"] += len(g)
            return g, None
        return Counted.apply(g, "J'"), None


@every
@pytest.mark.parametrize("rtol", [1e-2, 1e-9])
def test_products_are_counted_truly(method: Any, rtol: float) -> None:
    """Against a counter inside T itself. Nothing else of the pass goes through the derivative in z."""
    COUNT.clear()
    W, x, told = contraction(7, 0.9), normal(5, 7, seed=60).requires_grad_(), Told()
    evaluations = 0

    def T(z: Tensor, x: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return torch.tanh(Counted.apply(z, "T") @ W.T + x)

    mode = Implicit(method, Tolerance(atol=0, rtol=rtol, max_steps=500), report=told)
    value = mode.attach(T, normal(5, 7, seed=61), (x,))
    value.backward(cotangents(5, 7))
    assert told.products == [COUNT["J"] + COUNT["J'"]]
    assert evaluations == 2  # one forward, one in the backward pass
    assert (COUNT["J"] > 0) == (method == NormalCG())


def test_products_of_known_runs() -> None:
    """J = c I, two samples: the start, one step, and the check that ends it, which is not computed twice."""
    J, g, told = 0.5 * torch.eye(4, dtype=torch.float64).expand(2, 4, 4), cotangents(2, 4), Told()
    solve_adjoint(GMRES(), J, g, told)
    solve_adjoint(NormalCG(), J, g, told)
    assert told.products == [2 * 3, 2 * 4]
    solve_adjoint(Picard(), 0 * J, g, told)
    assert told.products[-1] == 2 * 2
    solve_adjoint(NormalCG(), J, 0 * g, told)
    assert told.products[-1] == 2


def test_a_coupled_product_counts_its_samples() -> None:
    case, told = batch_norm(), Told()
    T, inputs = case.build(*case.fresh())
    Implicit(GMRES(), report=told).attach(T, case.z_star, inputs, coupled=True).sum().backward()
    assert told.products[0] % 4 == 0
    assert told.status[0] == (Status.CONVERGED,) * 4
    assert told.residual[0].shape == (4,)
    assert len(set(told.residual[0].tolist())) == 1


@every
@pytest.mark.filterwarnings("ignore:the adjoint equation missed")
@pytest.mark.parametrize("max_steps", [0, 1, 3, 200])
def test_the_residual_is_true_and_per_sample(method: Any, max_steps: int) -> None:
    J, g, told = mixed(), cotangents(6, 6), Told()
    w = solve_adjoint(method, J, g, told, rtol=1e-6, max_steps=max_steps)
    true = residual(J, g, w)
    assert torch.allclose(told.residual[0], true, rtol=1e-6, atol=1e-14)
    met = true <= 1e-6 * g.square().mean(1).sqrt()
    assert told.status[0] == tuple(Status.CONVERGED if m else Status.MAX_STEPS for m in met.tolist())


def test_one_report_for_every_backward_pass() -> None:
    case, told = layer(), Told()
    T, inputs = case.build(*case.fresh())
    mode = Implicit(report=told)
    value = mode.attach(T, case.z_star, inputs)
    value.sum().backward(retain_graph=True)
    value.sum().backward()
    mode.attach(T, case.z_star, inputs).sum().backward()
    with torch.no_grad():
        mode.attach(T, case.z_star, inputs)
    assert len(told.products) == 3
    assert len(set(told.products)) == 1
    assert isinstance(told.products[0], int)
    assert isinstance(told.status[0], tuple)


@every
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_at_a_fixed_depth_products_are_known_beforehand(
    method: Any, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = [], Jacobian._hand_over

    def counted(self: Jacobian, rows: Tensor) -> Any:
        made.append(len(rows))
        return real(self, rows)

    monkeypatch.setattr(Jacobian, "_hand_over", counted)
    J, g = contraction(6, 0.9).expand(2, 6, 6), cotangents(2, 6)
    w = solve_adjoint(method, J, g, max_steps=steps, check_every=0)
    mode = Implicit(method, Tolerance(max_steps=steps, check_every=0))
    assert mode.products == len(made)
    assert not mode.asks_the_host
    assert steps or torch.equal(w, g)
    assert Implicit(method).products is None  # there residuals decide
    assert Implicit(method, mode.tolerance, report=print).asks_the_host


def test_a_linear_solver_of_ones_own_need_not_count() -> None:
    class Nothing:
        def solve(self, equation: Any) -> Any:
            return equation.g

    assert Implicit(Nothing(), Tolerance(max_steps=3, check_every=0)).products is None


def test_a_report_at_a_fixed_depth() -> None:
    """check_every = 0 asks the host for nothing, so it cannot warn; a report is asked for, and is given."""
    J, g, told = contraction(5, 0.9).expand(2, 5, 5), cotangents(2, 5), Told()
    solve_adjoint(NormalCG(), J, g, max_steps=1, check_every=0)
    with pytest.warns(AdjointWarning, match="missed its tolerance"):
        solve_adjoint(NormalCG(), J, g, told, max_steps=1, check_every=0)
    assert told.status == [(Status.MAX_STEPS, Status.MAX_STEPS)]


@every
def test_an_unmet_tolerance_warns_in_one_sentence(method: Any) -> None:
    """One warning without a number, so that Python's default filter shows it once; numbers are in the report."""
    J, g, told = hard_contraction().expand(3, 12, 12), cotangents(3, 12), Told()
    g[1] = 0
    with pytest.warns(AdjointWarning, match="missed") as caught:
        solve_adjoint(method, J, g, told, max_steps=3)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith("the adjoint equation missed its tolerance: allow more max_steps")
    assert not any(character.isdigit() for character in text)
    assert "\n" not in text
    assert told.status == [(Status.MAX_STEPS, Status.CONVERGED, Status.MAX_STEPS)]


def test_rounding_that_allows_no_better_is_called_by_its_name() -> None:
    """float32 cannot meet 1e-9; it is not for want of steps, and they are not burnt."""
    J, g, told = contraction(8, 0.9).float().expand(3, 8, 8), cotangents(3, 8).float(), Told()
    for method in (NormalCG(), GMRES(), Picard()):
        with pytest.warns(AdjointWarning, match="rounding of T allows no better"):
            w = solve_adjoint(method, J, g, told, rtol=1e-9, max_steps=10000)
        assert worst(w.double(), dense(J, g)) <= 1e-5
    assert told.status == [(Status.STALLED,) * 3] * 3
    assert max(told.products) <= 3 * 200


def test_a_tight_tolerance_can_be_met_in_float32() -> None:
    """CGLS's own residual drifts from the true one; found as a warning from an ordinary layer."""
    for seed in range(20):
        J, g = contraction(64, 0.95, seed=seed).float().expand(16, 64, 64), cotangents(16, 64, seed=seed).float()
        solve_adjoint(NormalCG(), J, g, rtol=1e-6, max_steps=500)


@every
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_nonfinite_cotangent_stays_in_its_sample_and_does_not_warn(method: Any, bad: float) -> None:
    J, g, told = contraction(6, 0.8).expand(4, 6, 6), cotangents(4, 6), Told()
    g[2, 3] = bad
    w = solve_adjoint(method, J, g, told)
    rest = [0, 1, 3]
    assert not w[2].isfinite().all()
    assert worst(w[rest], dense(J, g)[rest]) <= 1e-10
    converged = Status.CONVERGED
    assert told.status == [(converged, converged, Status.NONFINITE, converged)]
    assert told.residual[0].isnan().tolist() == [False, False, True, False]


@every
def test_a_sample_lost_in_the_forward_pass_does_not_warn(method: Any) -> None:
    """There T is not finite, and so neither is the cotangent: the scaler is told, and that is enough."""
    J, g, told = contraction(6, 0.8).repeat(3, 1, 1), cotangents(3, 6), Told()
    J[1], g[1] = torch.nan, torch.nan
    w = solve_adjoint(method, J, g, told)
    assert w[1].isnan().all()
    assert told.status[0][1] is Status.NONFINITE
    assert worst(w[[0, 2]], dense(J[[0, 2]], g[[0, 2]])) <= 1e-10


def test_a_nonfinite_cotangent_reaches_the_parameters() -> None:
    """So that a gradient scaler sees it."""
    case = layer()
    theta = case.fresh()
    T, inputs = case.build(*theta)
    g = torch.ones_like(case.z_star)
    g[0, 0] = torch.inf
    Implicit().attach(T, case.z_star, inputs).backward(g)
    assert theta[0].grad is not None
    assert not theta[0].grad.isfinite().all()


def test_a_nonfinite_cotangent_and_an_unmet_tolerance() -> None:
    J, g = contraction(6, 0.8).expand(3, 6, 6), cotangents(3, 6)
    g[0] = torch.nan
    with pytest.warns(AdjointWarning, match="missed its tolerance: allow more"):
        solve_adjoint(NormalCG(), J, g, max_steps=1)


@every
def test_a_map_that_is_not_finite_at_z_star(method: Any) -> None:
    """The sample that is not finite says so; the others get their gradient."""
    J, g, told = contraction(6, 0.8).repeat(3, 1, 1), cotangents(3, 6), Told()
    J[1, 2, 2] = torch.nan
    with pytest.warns(AdjointWarning, match="finite at z"):
        w = solve_adjoint(method, J, g, told)
    assert torch.equal(w[1], g[1])
    assert told.status[0][1] is Status.NONFINITE
    assert worst(w[[0, 2]], dense(J[[0, 2]], g[[0, 2]])) <= 1e-10


@pytest.mark.parametrize("mode", [Implicit(), JFB()], ids=["Implicit", "JFB"])
def test_nothing_keeps_the_graph_alive(mode: Any) -> None:
    """Memory that only the garbage collector finds grows while training."""
    case = layer()
    gc.collect()
    gc.disable()
    try:
        T, inputs = case.build(*case.fresh())
        value = mode.attach(T, case.z_star, inputs)
        value.sum().backward()
        alive = weakref.ref(inputs[0]), weakref.ref(value)
        del T, inputs, value
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


def test_no_warning_when_all_is_well() -> None:
    case = layer()
    T, inputs = case.build(*case.fresh())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Implicit().attach(T, case.z_star, inputs).sum().backward()
