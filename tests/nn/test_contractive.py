"""Scaled, ScaledInput and TwoStream: values, Lipschitz constants by dense Jacobians, use as a ready R."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import ImplicitNetwork
from banach.nn import Lipschitz, Scaled, ScaledInput, TwoStream
from nn.parts_nn import EXACT, TIGHT, largest, normal, same, state


class Nonexpansive(nn.Module):
    """R(u, v) = sin(O u) + v, O orthogonal: exactly 1-Lipschitz in u at u = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.O = nn.Parameter(torch.linalg.qr(normal(6, 6, seed=2))[0])

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.sin(u @ self.O.T) + v


def test_values_and_contraction() -> None:
    R, u, v, gamma = Nonexpansive(), normal(1, 6), normal(1, 6, seed=1), 0.9
    outer, inner = Scaled(R, gamma), ScaledInput(R, gamma)
    assert torch.equal(outer(u, v), gamma * (torch.sin(u @ R.O.T) + v))
    assert torch.equal(inner(u, v), torch.sin((gamma * u) @ R.O.T) + v)
    for module in (outer, inner):
        for point in (u, torch.zeros_like(u)):
            J = torch.func.jacrev(lambda z, m=module: m(z, v))(point).view(6, 6)
            assert largest(J) <= gamma * (1 + 1e-12)
        assert largest(J) == pytest.approx(gamma)  # reached at the origin


def inflated(R: TwoStream) -> TwoStream:
    """Weights far above their bounds, so that every bound is at work."""
    with torch.no_grad():
        for module in R.double().modules():
            if isinstance(module, Lipschitz):
                module.layer.weight.mul_(5)
                module.refine()
    return R


KINDS: list[tuple[Callable[..., TwoStream], tuple[int, ...], tuple[int, ...]]] = [
    (partial(TwoStream.linear, 7, 5), (7,), (5,)),
    (partial(TwoStream.conv, 3, (5, 4), 2), (3, 5, 4), (2, 5, 4)),
]
kinds = pytest.mark.parametrize(("make", "latent", "data"), KINDS, ids=["vectors", "images"])
SETTINGS: list[dict[str, Any]] = [
    {"gamma": 0.8, "ell": 2.0, "layers": (3, 2, 2), "activation": nn.Tanh},
    {"gamma": 0.7, "layers": (0, 1, 0)},
]


@kinds
@pytest.mark.parametrize("options", SETTINGS)
def test_the_bounds_hold(make: Any, latent: Any, data: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(2)
    R = inflated(make(**options)).eval()
    bound = options.get("ell", 1.0) ** options.get("layers", (1, 1, 1))[1]
    for seed in range(5):
        u, v = normal(1, *latent, seed=seed), normal(1, *data, seed=10 + seed)
        in_u, in_v = torch.func.jacrev(R, argnums=(0, 1))(u, v)
        assert largest(in_u.reshape(u.numel(), -1)) <= options["gamma"] * (1 + 1e-9)
        assert largest(in_v.reshape(u.numel(), -1)) <= bound * (1 + 1e-9)


@kinds
def test_a_ready_r(make: Any, latent: Any, data: Any) -> None:
    torch.manual_seed(2)
    R = inflated(make(gamma=0.8, ell=2.0))
    Q = nn.Sequential(nn.Linear(3, torch.Size(data).numel()), nn.Unflatten(1, data)).double()
    net = ImplicitNetwork(Q, R, nn.Flatten(), tolerance=TIGHT, backward=EXACT)
    d, z0, kept = normal(6, 3), torch.zeros(6, *latent, dtype=torch.float64), state(net)
    y, found = net(d, z0=z0, solution=True)
    assert bool(found.converged.all())
    assert int(found.steps.max()) <= 145  # 0.8^n is below 1e-14 by then
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert not same(state(net), kept)  # train mode follows the weights
    twin = pickle.loads(pickle.dumps(copy.deepcopy(net))).eval()
    assert torch.equal(net.eval()(d, z0=z0), twin(d, z0=z0))


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: Scaled(Nonexpansive(), -0.1), "gamma must be a number, at least 0 and below 1, got -0.1"),
    (lambda: TwoStream.linear(3, gamma=float("nan")), "gamma must be a number, at least 0 and below 1, got nan"),
    (lambda: TwoStream.linear(3, ell=0.0), "bound must be above 0"),
    (lambda: TwoStream.linear(3, layers=(1, -1, 1)), r"layers must count .* got \(1, -1, 1\)"),
    (lambda: TwoStream.conv(3, (4, 4), 2, layers=(1, 0, 1)), "turns 2 features into 3 needs at least one"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_gets_one_sentence(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
