"""MonotoneLinear: the inequality, and how its fixed point is found where plain Picard diverges."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from banach import Picard, Status, Tolerance, solve
from banach.nn import ForwardBackward, MonotoneLinear
from banach.nn.monotone import inverse_of
from banach.solve.context import loops_by
from banach.solve.device import loop_eagerly
from nn.parts_nn import EXACT, gradients, network, normal


def layer(m: float = 0.5, scale: float = 1.5, width: int = 6) -> MonotoneLinear:
    torch.manual_seed(1)
    made = MonotoneLinear(width, m).double()
    with torch.no_grad():
        made.A.mul_(scale)
        made.B.mul_(scale)
    return made


@pytest.mark.parametrize("m", [0.05, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_inequality(m: float, scale: float) -> None:
    made = layer(m, scale)
    W = made.weight.detach()
    eye = torch.eye(6, dtype=torch.float64)
    least = torch.linalg.eigvalsh(eye - (W + W.T) / 2)[0]
    assert float(least) >= m * (1 - 1e-9) - 1e-12 * scale**2
    expected = (1 - m) * eye - made.A.T @ made.A + made.B - made.B.T
    assert torch.allclose(W, expected.detach(), atol=1e-12)
    x = normal(3, 6)
    assert torch.allclose(made(x), x @ W.T, atol=1e-12 * scale**2)
    assert not torch.allclose(W, W.T)


def test_damping_solves_what_plain_picard_does_not() -> None:
    made = layer(scale=2.0)
    W, v = made.weight.detach(), normal(4, 6, seed=3)
    assert float(torch.linalg.eigvals(W).abs().max()) > 1.5

    def T(z: Tensor, v: Tensor) -> Tensor:
        return torch.relu(z @ W.T + v)

    tolerance = Tolerance(atol=1e-12, max_steps=2000)
    z0 = torch.zeros_like(v)
    plain = solve(T, z0, Picard(), inputs=(v,), tolerance=tolerance)
    assert not plain.converged.any()
    damped = solve(T, z0, Picard(damping=0.9), inputs=(v,), tolerance=tolerance)
    assert damped.status == (Status.CONVERGED,) * 4
    z = damped.value
    assert torch.allclose(z, T(z, v), atol=1e-10)
    # The linear equations of the samples' active sets, solved densely. (Damping lets the others decay to zero.)
    assert (z < 1e-6).any()
    for row, right in zip(z, v, strict=True):
        on = row > 1e-6
        assert (W[~on] @ row + right[~on] < 1e-9).all()
        exact = torch.linalg.solve(torch.eye(int(on.sum()), dtype=torch.float64) - W[on][:, on], right[on])
        assert torch.allclose(row[on], exact, atol=1e-9)


def test_forward_backward_contracts_and_has_the_same_fixed_point() -> None:
    made = layer(scale=2.0)
    W = made.weight.detach()
    eye = torch.eye(6, dtype=torch.float64)
    L = float(torch.linalg.matrix_norm(eye - W, 2))
    alpha = made.m / L**2
    factor = (1 - 2 * alpha * made.m + alpha**2 * L**2) ** 0.5
    assert float(torch.linalg.matrix_norm(eye - alpha * (eye - W), 2)) <= factor * (1 + 1e-12) < 1
    v = normal(4, 6, seed=3)
    R = ForwardBackward(made, alpha)
    with torch.no_grad():
        found = solve(R, torch.zeros_like(v), inputs=(v,), tolerance=Tolerance(atol=1e-13, max_steps=5000))
    assert bool(found.converged.all())
    z = found.value
    assert torch.allclose(z, torch.relu(z @ W.T + v), atol=1e-9)
    rates = [torch.func.jacrev(lambda u: R(u[None], v[:1])[0])(normal(6, seed=s)) for s in range(5)]
    assert all(float(torch.linalg.matrix_norm(J.detach(), 2)) <= factor * (1 + 1e-12) for J in rates)


def test_in_a_network_the_gradient_reaches_both_parts() -> None:
    made = layer(scale=1.0)
    net = network(ForwardBackward(made, 0.1), backward=EXACT, tolerance=Tolerance(atol=1e-14, max_steps=5000))
    d = normal(4, 4)
    got = gradients(net, net(d).square().sum())

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = made

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return torch.relu(self.layer(u) + v)

    damped = network(Mixed(), backward=EXACT, solver=Picard(damping=0.8), tolerance=net.tolerance)
    expected = gradients(damped, damped(d).square().sum())
    assert got.keys() == expected.keys()
    for name in got:
        assert torch.allclose(got[name], expected[name], atol=1e-7), name
    assert got["R.layer.A"].abs().max() > 1e-6
    twin = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert torch.equal(twin(d), net(d))


def test_bad_input_gets_one_sentence() -> None:
    with pytest.raises(ValueError, match="m must be above 0, got 0"):
        MonotoneLinear(3, 0)
    with pytest.raises(ValueError, match="alpha must be above 0, got -1"):
        ForwardBackward(layer(), -1)
    assert repr(MonotoneLinear(3, 0.5)) == "MonotoneLinear(width=3, m=0.5)"


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.complex64])
def test_inverses_in_a_capture_need_no_lapack(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    M = 3 * torch.eye(9, dtype=dtype) + torch.randn(2, 5, 9, 9, generator=draw, dtype=torch.float64).to(dtype) / 2
    with loops_by(loop_eagerly):
        made = inverse_of(M)
    torch.testing.assert_close(made, torch.linalg.inv(M), atol=1e-5 if dtype == torch.complex64 else 1e-12, rtol=0)
