"""The Lipschitz constant in the data and the bound on du*/dd, against dense matrices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import ImplicitNetwork, Tolerance
from banach.diagnose import measure_sensitivity

EXACT: dict[str, Any] = {"rtol": 1e-12, "max_steps": 300}


def fixed_point(net: ImplicitNetwork, d: Tensor) -> Tensor:
    with torch.no_grad():
        v = net.Q(d)
        u = torch.zeros_like(v)
        for _ in range(200):
            u = net.R(u, v)
    return u


def moves(net: ImplicitNetwork, d: Tensor, jacobian: Any) -> Tensor:
    """du*/dd = (I - J)^-1 K, by finite differences and a dense solve."""
    u = fixed_point(net, d)
    J = jacobian(lambda u: net.R(u, net.Q(d)), u)
    return torch.linalg.solve(torch.eye(len(J), dtype=J.dtype) - J, jacobian(lambda x: net.R(u, net.Q(x)), d))


def test_per_sample_against_dense(tiny: Any, data: Tensor, jacobian: Any) -> None:
    net = tiny(gain=0.8)
    found = measure_sensitivity(net, data, exact=True, **EXACT)
    for i in range(2):
        d = data[i : i + 1]
        u = fixed_point(net, d)
        K = jacobian(lambda x, u=u: net.R(u, net.Q(x)), d)
        J = jacobian(lambda u, d=d: net.R(u, net.Q(d)), u)
        whole = jacobian(lambda x: fixed_point(net, x), d)  # du*/dd itself, through the iteration
        L, gamma = torch.linalg.matrix_norm(K, 2), torch.linalg.matrix_norm(J, 2)
        torch.testing.assert_close(found.L[i], L, rtol=1e-7, atol=0)
        torch.testing.assert_close(found.gamma[i], gamma, rtol=1e-7, atol=0)
        torch.testing.assert_close(found.bound[i], L / (1 - gamma), rtol=1e-6, atol=0)
        assert found.measured is not None
        torch.testing.assert_close(found.measured[i], torch.linalg.matrix_norm(whole, 2), rtol=1e-6, atol=0)
        assert found.measured[i] <= found.bound[i]


def test_batch_norm_in_R_couples(tiny: Any, data: Tensor, jacobian: Any) -> None:
    net = tiny(norm=True)
    with torch.no_grad():
        net.R.norm.weight.fill_(0.3)
    found = measure_sensitivity(net, data, exact=True, **EXACT)
    twin = copy.deepcopy(net)
    whole = moves(twin, data, jacobian)
    assert found.coupled
    assert found.measured is not None
    torch.testing.assert_close(found.measured, torch.linalg.matrix_norm(whole, 2).expand(6), rtol=1e-6, atol=0)
    assert (found.measured <= found.bound).all()


def test_batch_norm_in_Q_couples_too(tiny: Any, data: Tensor, jacobian: Any, unchanged: Any) -> None:
    net = tiny()
    net.Q = nn.Sequential(net.Q, nn.BatchNorm1d(5).double())
    with unchanged(net):
        found = measure_sensitivity(net, data, **EXACT)
    twin = copy.deepcopy(net)
    u = fixed_point(twin, data)
    K = jacobian(lambda x: twin.R(u, twin.Q(x)), data)
    assert found.coupled
    torch.testing.assert_close(found.L, torch.linalg.matrix_norm(K, 2).expand(6), rtol=1e-6, atol=0)
    assert found.measured is None


def test_layouts_are_matched() -> None:
    """A latent in channels_last and a dictionary whose order T changes: the two Jacobians still multiply."""
    weight = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    class R(nn.Module):
        def forward(self, u: dict[str, Tensor], v: dict[str, Tensor]) -> dict[str, Tensor]:
            mixed = torch.einsum("ij,bjhw->bihw", 0.2 * weight, u["a"])
            return {"b": 0.5 * u["b"] + v["b"], "a": (mixed + v["a"]).contiguous()}

    def Q(d: Tensor) -> dict[str, Tensor]:
        return {"a": d.to(memory_format=torch.channels_last), "b": 2 * d.sum((1, 2, 3))[:, None]}

    net = ImplicitNetwork(Q, R(), lambda u: u["a"], tolerance=Tolerance(atol=1e-12, max_steps=300))
    d = torch.ones(1, 3, 2, 2, dtype=torch.float64)
    found = measure_sensitivity(net, d, exact=True, **EXACT)
    inverse = torch.linalg.inv(torch.eye(3, dtype=torch.float64) - 0.2 * weight)
    top = torch.kron(inverse.contiguous(), torch.eye(4, dtype=torch.float64))
    dense = torch.cat([top, 4 * torch.ones(1, 12, dtype=torch.float64)])
    assert found.measured is not None
    torch.testing.assert_close(found.measured[0], torch.linalg.matrix_norm(dense, 2), rtol=1e-8, atol=0)


def test_no_bound_without_contraction(tiny: Any, data: Tensor) -> None:
    net = tiny(n=2)
    with torch.no_grad():
        net.R.linear.weight.copy_(torch.tensor([[0.3, 3.0], [0.0, 0.3]]))
    found = measure_sensitivity(net, 0.1 * data, exact=True)
    assert found.bound[found.gamma >= 1].isinf().all()
    assert (found.gamma >= 1).any()
    assert found.measured is not None
    assert found.measured.isfinite().all()


def test_data_that_has_no_derivative_is_refused(tiny: Any) -> None:
    with pytest.raises(TypeError, match=r"floating-point data, got torch\.int64; call d\.float\(\)"):
        measure_sensitivity(tiny(), torch.zeros(2, 4, dtype=torch.long))
