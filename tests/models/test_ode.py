"""Neural ODEs: counts, gradients against unrolled autograd in float64, evaluations, failures."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from banach.models.ode import ODEFailure, ODENet
from nn.parts_nn import gradients

IMAGE = (1, 5, 5)


def small(extra: int = 2, **options: Any) -> ODENet:
    torch.manual_seed(0)
    return ODENet(IMAGE, 3, filters=4, extra=extra, **options).double()


def images(batch: int = 3) -> Tensor:
    return torch.randn(batch, *IMAGE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_hand(net: ODENet, d: Tensor, steps: int = 100) -> Tensor:
    """Runge-Kutta of order 4 with small steps, recorded by autograd; f written out again."""

    def f(t: float, h: Tensor) -> Tensor:
        for i, conv in enumerate((net.f.conv1, net.f.conv2, net.f.conv3)):
            time = torch.full_like(h[:, :1], t)
            h = torch.nn.functional.conv2d(torch.cat([time, h], 1), conv.weight, conv.bias, padding=conv.padding)
            h = h if i == 2 else h.clamp(min=0)
        return h

    h, dt = torch.cat([d, torch.zeros(len(d), net.extra, *IMAGE[1:], dtype=d.dtype)], 1), 1 / steps
    for k in range(steps):
        t = k * dt
        a = f(t, h)
        b = f(t + dt / 2, h + dt / 2 * a)
        c = f(t + dt / 2, h + dt / 2 * b)
        h = h + dt / 6 * (a + 2 * b + 2 * c + f(t + dt, h + dt * c))
    return net.linear(h.flatten(1))


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("adjoint", [True, False])
def test_value_and_gradient_are_those_of_unrolled_autograd(extra: int, adjoint: bool) -> None:
    """Each ReLU stays on one side of its kink, at which fixed steps would lose their order."""
    net, d = small(extra, tolerance=1e-9, adjoint=adjoint), images()
    with torch.no_grad():
        for conv in (net.f.conv1, net.f.conv2):
            assert conv.bias is not None
            conv.bias.copy_(torch.tensor([6.0, 5.0, -5.0, 6.0]))
    expected = by_hand(net, d)
    y = net(d)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-8)
    got, exact = gradients(net, y.square().sum()), gradients(net, expected.square().sum())
    assert all(float((got[name] - g).norm() / g.norm()) <= 1e-6 for name, g in exact.items())


def test_evaluations_are_counted() -> None:
    net, d = small(), images()
    y = net(d)
    first = net.evaluations
    assert first.backward == 0
    assert first.forward >= 8
    assert (first.forward - 2) % 6 == 0  # dopri5: two to begin with, six for each attempted step
    y.sum().backward()
    assert net.evaluations.forward == first.forward
    assert net.evaluations.backward > 0
    direct = small(adjoint=False)
    direct(d).sum().backward()
    assert direct.evaluations.backward == 0
    with torch.no_grad():
        torch.testing.assert_close(net(d), direct(d))


def test_autocast() -> None:
    d = images().float()
    with torch.autocast("cpu", torch.bfloat16):
        y = small().float()(d)
    torch.testing.assert_close(y.float(), small().float()(d), atol=0.05, rtol=0.05)


def test_a_failed_solve_is_reported() -> None:
    net = small(max_steps=3, tolerance=1e-6)
    with torch.no_grad():
        for p in net.f.parameters():
            p.mul_(20)
    with pytest.raises(ODEFailure, match=r"not solved after \d+ evaluations of f: .*; lower the learning rate"):
        net(images())


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ImportError, match="pip install torchdiffeq"):
        small()(images())
