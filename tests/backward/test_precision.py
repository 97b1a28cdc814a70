"""Short types and autocast: the products are in T's type, the algebra between them in at least float32."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize

from backward.contracts_backward import PLAIN, error, name
from backward.systems_backward import METHODS, Reports
from banach import (
    AdjointWarning,
    Anderson,
    ConvergenceWarning,
    Implicit,
    ImplicitNetwork,
    Mode,
    Status,
    Tolerance,
    Unroll,
    solve,
)
from problems import contraction, normal

UNREACHABLE = Tolerance(atol=0, rtol=1e-6, max_steps=500)
LOOSE = Tolerance(atol=0, rtol=2e-2, max_steps=100)
MODES: list[Mode] = [*(Implicit(method, LOOSE) for method in METHODS), *PLAIN, Unroll(3, checkpoint=True)]
every = pytest.mark.parametrize("mode", MODES, ids=name)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def layer(dtype: torch.dtype, gamma: float = 0.7) -> tuple[Tensor, Tensor]:
    return contraction(16, gamma).to(dtype).requires_grad_(), normal(4, 16, seed=70).to(dtype).requires_grad_()


def run(mode: Mode, W: Tensor, x: Tensor, forward: bool = False, backward: bool = False) -> Tensor:
    """One pass, with the forward or the backward part under autocast: the gradients."""
    with autocast() if forward else nullcontext():
        value = attached(mode, W, x)
    with autocast() if backward else nullcontext():
        loss = (value.to(torch.float64) * normal(4, 16, seed=71)).sum()
        found = torch.autograd.grad(loss, (W, x))
    assert [part.dtype for part in found] == [W.dtype, x.dtype]
    return torch.cat([part.flatten().double() for part in found])


def attached(mode: Mode, W: Tensor, x: Tensor) -> Tensor:
    def T(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(torch.nn.functional.linear(z, W) + x)

    tolerance = Tolerance(atol=1e-12 if x.dtype == torch.float64 else 1e-2, max_steps=400)
    u = solve(T, torch.zeros_like(x), inputs=(x,), tolerance=tolerance).value
    value = mode.attach(T, u, (x,))
    assert value.dtype == x.dtype or torch.is_autocast_enabled("cpu")
    return value


def reference(mode: Mode) -> Tensor:
    W, x = layer(torch.float64)
    return run(Implicit(tolerance=Tolerance(atol=0, rtol=1e-10)) if isinstance(mode, Implicit) else mode, W, x)


@every
@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)], ids=str)
def test_short_latents(mode: Mode, dtype: torch.dtype, eps: float) -> None:
    assert error(run(mode, *layer(dtype)), reference(mode)) <= 6 * max(eps, 4e-3)


@every
def test_autocast_forward_and_backward_outside(mode: Mode) -> None:
    """The usual way. T is evaluated again in the backward pass, under the autocast of the forward pass."""
    found = run(mode, *layer(torch.float32), forward=True)
    assert error(found, reference(mode)) <= 3e-2
    assert error(found, run(mode, *layer(torch.float32))) > 1e-5


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_backward_under_an_autocast_that_forward_did_not_have(method: Any) -> None:
    """J is that of the forward pass, and the solver's algebra is not in bfloat16. Seen in the gradient in x, since
    T's own backward pass multiplies by nothing there that autocast would shorten."""
    W, x = layer(torch.float32)
    mode = Implicit(method, Tolerance(atol=0, rtol=1e-6, max_steps=200))
    assert error(run(mode, W, x, backward=True)[W.numel() :], run(mode, W, x)[W.numel() :]) <= 1e-6


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_an_unreachable_tolerance_does_not_burn_steps(method: Any, kind: str) -> None:
    """bfloat16 cannot meet 1e-6. Found as 500 products per sample for nothing, at every training step."""
    log = Reports()
    W, x = layer(torch.bfloat16 if kind == "bfloat16" else torch.float32, gamma=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(Implicit(method, UNREACHABLE, report=log), W, x, forward=kind == "autocast")
    assert len(caught) == 1
    assert "rounding of T allows no better" in str(caught[0].message)
    assert log.products[0] <= 4 * 150
    assert Status.STALLED in log.status[0]
    assert Status.MAX_STEPS not in log.status[0]
    assert found.isfinite().all()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_part_of_T_that_is_kept_out_of_autocast_stays_out(method: Any) -> None:
    """Its products with J' are in float32 too, so the tolerance of float32 can be met."""
    W, x = layer(torch.float32)

    def T(z: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(torch.nn.functional.linear(z, W) + x)

    u, g = normal(4, 16, seed=74).float(), normal(4, 16, seed=75).float()
    tolerance = Tolerance(atol=0, rtol=1e-6, max_steps=500)

    def w() -> Tensor:
        return torch.autograd.grad(Implicit(method, tolerance).attach(T, u, (x,)), x, g)[0]

    with autocast():
        under = w()
    assert error(under, w()) <= 1e-5


def test_an_adjoint_that_fails_is_probed_under_the_autocast_of_the_forward_pass() -> None:
    """T gives bfloat16 there. Found as a TypeError in the backward pass."""
    W, x = layer(torch.float32)
    short = x.detach().bfloat16().requires_grad_()
    with pytest.warns(AdjointWarning, match="allow more max_steps"):
        run(Implicit(tolerance=Tolerance(atol=0, rtol=1e-3, max_steps=1)), W, short, forward=True)


def test_weights_cached_in_a_failed_solve_keep_their_gradient() -> None:
    """A solve that fails is probed without autograd. Found as weights without a gradient under `cached()`."""
    layer: Any = parametrizations.orthogonal(torch.nn.Linear(3, 3, bias=False))
    net = ImplicitNetwork(torch.nn.Identity(), lambda u, v: 2 * layer(u) + v, torch.nn.Identity())
    net.solver, net.tolerance = Anderson(), Tolerance(max_steps=2)
    with parametrize.cached(), pytest.warns(ConvergenceWarning):
        net(normal(4, 3, seed=76).float()).sum().backward()
    assert layer.parametrizations.weight.original.grad is not None


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_torchs_attention_under_autocast(method: Any) -> None:
    """The pullback of its pullback mixes float32 and bfloat16 in torch.func. Found as a RuntimeError."""
    W, x = 0.2 * normal(8, 8, seed=77), normal(3, 5, 8, seed=78)

    def gradient(W: Tensor, x: Tensor, context: AbstractContextManager[Any], attend: Any) -> Tensor:
        def T(u: Tensor, x: Tensor) -> Tensor:
            h = torch.nn.functional.linear(u, W)
            value: Tensor = attend(h, h, h) + x
            return value

        W = W.clone().requires_grad_()
        u = solve(T, torch.zeros_like(x), inputs=(x,), tolerance=Tolerance(atol=1e-6, max_steps=99)).value
        with context:
            mode = Implicit(method, Tolerance(atol=0, rtol=5e-2, max_steps=100))
            loss = mode.attach(T, u, (x,)).to(torch.float64).square().sum()
        return torch.autograd.grad(loss, W)[0].double()

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT / 8**0.5, -1) @ v

    found = gradient(W.float(), x.float(), autocast(), torch.nn.functional.scaled_dot_product_attention)
    assert error(found, gradient(W, x, nullcontext(), dense)) <= 3e-2


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_compiled_part_in_a_shorter_type_is_no_other_t(method: Any) -> None:
    """torch.compile rounds once where eager code rounds after every operation, and J-products run eagerly.

    Found as an AdjointWarning (an error here) for a compiled R with bfloat16 weights and a float32 latent.
    """
    W, v = 0.3 * normal(64, 64, seed=79) / 8, normal(3, 64, seed=80)
    values = list[Tensor]()

    def T(u: Tensor, v: Tensor, W: Tensor) -> Tensor:
        fused = not torch._C._are_functorch_transforms_active()
        h = (u if fused else u.bfloat16()) @ (W if fused else W.bfloat16())
        for _ in range(2):
            h = 1.5 * torch.sin(0.6 * h)
        values.append((h.bfloat16().float() + v).detach())
        return h.bfloat16().float() + v

    def exact(u: Tensor, v: Tensor, W: Tensor) -> Tensor:
        return 1.5 * torch.sin(0.9 * torch.sin(0.6 * u @ W)) + v

    def gradient(T: Any, mode: Any, v: Tensor, W: Tensor) -> Tensor:
        u = solve(exact, torch.zeros_like(v), inputs=(v, W), tolerance=Tolerance(atol=1e-5)).value
        return torch.autograd.grad(mode.attach(T, u, (v, W)).square().sum(), W)[0].double()

    mode = Implicit(method, Tolerance(atol=0, rtol=2e-2))
    got = gradient(T, mode, v.float(), W.float().bfloat16().float().requires_grad_())
    wanted = gradient(exact, Implicit(), v, W.requires_grad_())
    assert error(got, wanted) <= 3e-2
    first, *later = values
    assert max(float((one - first).norm() / first.norm()) for one in later) > 0
