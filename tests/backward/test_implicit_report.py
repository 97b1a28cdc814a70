"""What Implicit tells: true products, residuals and statuses; one warning, and none for a bad cotangent."""

import gc
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from backward.maps_backward import batch_norm, layer
from backward.systems_backward import (
    METHODS,
    Reports,
    cotangents,
    dense,
    hard_contraction,
    mixed,
    residual,
    solve_adjoint,
    worst,
)
from banach import GMRES, JFB, AdjointWarning, Implicit, NormalCG, Status, Tolerance, fixed_point
from problems import contraction, normal

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
    W, x, log = contraction(7, 0.9), normal(5, 7, seed=60).requires_grad_(), Reports()
    evaluations = 0

    def T(z: Tensor, x: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return torch.tanh(Counted.apply(z, "T") @ W.T + x)

    mode = Implicit(method, Tolerance(atol=0, rtol=rtol, max_steps=500), report=log)
    value = mode.attach(T, normal(5, 7, seed=61), (x,))
    value.backward(cotangents(5, 7))
    assert log.products == [COUNT["J"] + COUNT["J'"]]
    assert evaluations == 2  # one forward, one in the backward pass
    assert (COUNT["J"] > 0) == (method == NormalCG())


@every
@pytest.mark.filterwarnings("ignore:the adjoint equation missed")
@pytest.mark.parametrize("max_steps", [0, 1, 3, 200])
def test_the_residual_is_true_and_per_sample(method: Any, max_steps: int) -> None:
    J, g, log = mixed(), cotangents(6, 6), Reports()
    w = solve_adjoint(method, J, g, log, rtol=1e-6, max_steps=max_steps)
    true = residual(J, g, w)
    assert torch.allclose(log.residual[0], true, rtol=1e-6, atol=1e-14)
    met = true <= 1e-6 * g.square().mean(1).sqrt()
    assert log.status[0] == tuple(Status.CONVERGED if m else Status.MAX_STEPS for m in met.tolist())
    assert max_steps or torch.equal(w, g)  # which is JFB


def test_one_report_for_every_backward_pass_and_a_coupled_product_counts_its_samples() -> None:
    case, log = batch_norm(), Reports()
    T, inputs = case.build(*case.fresh())
    mode = Implicit(GMRES(), report=log)
    value = mode.attach(T, case.z_star, inputs, coupled=True)
    value.sum().backward(retain_graph=True)
    value.sum().backward()
    with torch.no_grad():
        mode.attach(T, case.z_star, inputs, coupled=True)
    assert log.products == [log.products[0]] * 2
    assert log.products[0] % 4 == 0
    assert log.status == [(Status.CONVERGED,) * 4] * 2
    assert log.residual[0].tolist() == [float(log.residual[0][0])] * 4


@every
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_at_a_fixed_depth_products_are_counted_on_the_device(method: Any, steps: int) -> None:
    COUNT.clear()
    count = torch.zeros((), dtype=torch.int64)
    W, x, g = contraction(6, 0.9), normal(2, 6, seed=62).requires_grad_(), cotangents(2, 6)
    mode = Implicit(method, Tolerance(atol=0, max_steps=steps, check_every=0), count=count)
    value = mode.attach(lambda z, x: Counted.apply(z, "T") @ W.T + x, torch.zeros_like(g), (x,))
    (w,) = torch.autograd.grad(value, x, g)
    assert int(count) == COUNT["J"] + COUNT["J'"]
    assert not mode.syncs_with_host
    assert steps or torch.equal(w, g)
    assert Implicit(method, mode.tolerance, report=print).syncs_with_host


def test_gmres_that_stagnates_says_so_and_the_advice_helps() -> None:
    """Found on a map of spectral radius 1.5: 500 more steps of GMRES(20) change nothing."""
    M = normal(100, 100, seed=63)
    J, g, log = (1.5 * M / torch.linalg.eigvals(M).abs().max())[None], normal(1, 100, seed=64), Reports()
    for steps in (500, 1000):
        with pytest.warns(AdjointWarning, match=r"use a larger restart, .* or NormalCG\(\)"):
            solve_adjoint(GMRES(), J, g, log, max_steps=steps, rtol=1e-8)
    assert float(log.residual[1] / log.residual[0]) > 0.9
    for method in (GMRES(110), NormalCG()):
        w = solve_adjoint(method, J, g, log, max_steps=500, rtol=1e-8)
        torch.testing.assert_close(w, dense(J, g), rtol=0, atol=1e-5 * float(dense(J, g).norm()))


@every
def test_an_unmet_tolerance_warns_in_one_sentence(method: Any) -> None:
    """One warning without a number, so that Python's default filter shows it once; numbers are in the report."""
    J, g, log = hard_contraction().expand(3, 12, 12), cotangents(3, 12), Reports()
    g[1] = 0
    with pytest.warns(AdjointWarning, match="missed") as caught:
        solve_adjoint(method, J, g, log, max_steps=3)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith("the adjoint equation missed its tolerance: allow more max_steps")
    assert not any(character.isdigit() for character in text)
    assert "\n" not in text
    assert ("larger restart" in text) is isinstance(method, GMRES)
    assert log.status == [(Status.MAX_STEPS, Status.CONVERGED, Status.MAX_STEPS)]
    solve_adjoint(method, J, g, log, max_steps=3, check_every=0)  # reports, but never warns
    assert log.status[1] == log.status[0]


@every
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_nonfinite_cotangent_stays_in_its_sample_and_does_not_warn(method: Any, bad: float) -> None:
    J, g, log = contraction(6, 0.8).expand(4, 6, 6), cotangents(4, 6), Reports()
    g[2, 3] = bad
    w = solve_adjoint(method, J, g, log)
    rest = [0, 1, 3]
    assert not w[2].isfinite().all()  # so that a gradient scaler sees it
    assert worst(w[rest], dense(J, g)[rest]) <= 1e-10
    converged = Status.CONVERGED
    assert log.status == [(converged, converged, Status.NONFINITE, converged)]
    assert log.residual[0].isnan().tolist() == [False, False, True, False]


@every
def test_a_map_that_is_not_finite_at_z_star(method: Any) -> None:
    """The sample that is not finite says so; the others get their gradient."""
    J, g, log = contraction(6, 0.8).repeat(3, 1, 1), cotangents(3, 6), Reports()
    J[1, 2, 2] = torch.nan
    with pytest.warns(AdjointWarning, match="finite at z"):
        w = solve_adjoint(method, J, g, log)
    assert torch.equal(w[1], g[1])
    assert log.status[0][1] is Status.NONFINITE
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


def test_a_script_whose_variable_is_named_like_an_attribute_in_T_keeps_one_graph() -> None:
    """Found as memory that grew by a graph per step: `layer.out` in T kept the global variable `out`."""
    script: dict[str, Any] = {"layer": SimpleNamespace(out=torch.tanh), "mode": Implicit(), "alive": []}
    script |= {
        "fixed_point": fixed_point,
        "ref": weakref.ref,
        "v": normal(3, 4, seed=1).requires_grad_(),
        "z0": normal(3, 4, seed=2),
    }
    step = "out = fixed_point(lambda u: 0.5 * layer.out(u) + v, z0, backward=mode); alive.append(ref(out))"
    exec("for _ in range(3):\n    " + step, script)
    assert [ref() is not None for ref in script["alive"]] == [False, False, True]
