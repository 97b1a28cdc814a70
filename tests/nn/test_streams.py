"""TwoStream: its Lipschitz constants by dense Jacobians, and its use as a ready R."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import ImplicitNetwork
from banach.nn import Lipschitz, TwoStream
from nn.parts_nn import EXACT, TIGHT, largest, normal, same, state


def inflate(R: TwoStream, factor: float = 5.0) -> TwoStream:
    """Weights far above their bounds, so that every bound is at work."""
    with torch.no_grad():
        for module in R.modules():
            if isinstance(module, Lipschitz):
                module.layer.weight.mul_(factor)
                module.refine()
    return R


def vectors(**options: Any) -> TwoStream:
    torch.manual_seed(2)
    return inflate(TwoStream.linear(7, 5, **options).double())


def images(**options: Any) -> TwoStream:
    torch.manual_seed(2)
    return inflate(TwoStream.conv(3, (5, 4), 2, **options).double())


def jacobians(R: TwoStream, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    in_u, in_v = torch.func.jacrev(R, argnums=(0, 1))(u, v)
    return in_u.reshape(u.numel(), u.numel()), in_v.reshape(u.numel(), v.numel())


SETTINGS: list[dict[str, Any]] = [
    {"gamma": 0.9},
    {"gamma": 0.5, "ell": 3.0},
    {"gamma": 0.8, "ell": 2.0, "layers": (3, 2, 2), "activation": nn.Tanh},
    {"gamma": 0.7, "layers": (0, 1, 0)},
    {"gamma": 0.0, "ell": 0.5, "layers": (2, 3, 0), "activation": lambda: nn.LeakyReLU(0.1)},
]


@pytest.mark.parametrize("make", [vectors, images])
@pytest.mark.parametrize("options", SETTINGS)
def test_the_bounds_hold(make: Callable[..., TwoStream], options: dict[str, Any]) -> None:
    R = make(**options).eval()
    gamma = options["gamma"]
    bound = options.get("ell", 1.0) ** options.get("layers", (1, 1, 1))[1]
    for seed in range(5):
        u = normal(1, *((7,) if make is vectors else (3, 5, 4)), seed=seed)
        v = normal(1, *((5,) if make is vectors else (2, 5, 4)), seed=10 + seed)
        in_u, in_v = jacobians(R, u, v)
        assert largest(in_u) <= gamma * (1 + 1e-9)
        assert largest(in_v) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("make", [vectors, images])
def test_a_ready_r(make: Callable[..., TwoStream]) -> None:
    gamma = 0.8
    R = make(gamma=gamma, ell=2.0)
    torch.manual_seed(4)
    Q: nn.Module
    S: nn.Module
    if make is vectors:
        Q, S, d = nn.Linear(3, 5).double(), nn.Linear(7, 2).double(), normal(6, 3)
        z0 = torch.zeros(6, 7, dtype=torch.float64)
    else:
        Q, S = nn.Conv2d(1, 2, 1).double(), nn.Flatten()
        d, z0 = normal(6, 1, 5, 4), torch.zeros(6, 3, 5, 4, dtype=torch.float64)
    net = ImplicitNetwork(Q, R, S, tolerance=TIGHT, backward=EXACT)
    kept = state(net)
    y, found = net(d, z0=z0, solution=True)
    assert bool(found.converged.all())
    assert int(found.steps.max()) <= 145  # 0.8^n is below 1e-14 by then
    y.square().sum().backward()
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all()
    assert not same(state(net), kept)  # train mode follows the weights
    twin = pickle.loads(pickle.dumps(copy.deepcopy(net))).eval()
    assert torch.equal(net.eval()(d, z0=z0), twin(d, z0=z0))


def test_own_streams() -> None:
    R = TwoStream(nn.Identity(), nn.Identity(), gamma=0.5)
    u, v = normal(2, 3), normal(2, 3, seed=1)
    assert torch.equal(R(u, v), 0.5 * u + v)


def test_bad_input_gets_one_sentence() -> None:
    with pytest.raises(ValueError, match="gamma must be at least 0 and below 1, got 1"):
        TwoStream.linear(3, gamma=1.0)
    with pytest.raises(ValueError, match="bound must be above 0"):
        TwoStream.linear(3, ell=0.0)
    with pytest.raises(ValueError, match=r"layers must count .* got \(1, -1, 1\)"):
        TwoStream.linear(3, layers=(1, -1, 1))
    with pytest.raises(ValueError, match="turns 2 features into 3 needs at least one"):
        TwoStream.conv(3, (4, 4), 2, layers=(1, 0, 1))
