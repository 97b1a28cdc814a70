"""compile(net) answers as the network does, at least as converged, independent of the rest of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import banach
from banach import JFB, Anderson, Broyden, ImplicitNetwork, Neumann, Picard, Tolerance, Unroll, models
from banach.fast import CompiledNetwork
from banach.fast.capture import bucket, filled
from fast.simulated import simulate_gpu


class Slope(nn.Module):
    """T(u) = s u + 1 with a slope of the sample's own: u* = 1 / (1 - s)."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return v * u + 1


def sloped(**options: Any) -> ImplicitNetwork:
    return ImplicitNetwork(nn.Identity(), Slope(), nn.Identity(), **options).eval()


SLOPES = (
    torch.tensor([0.1, 0.5, 0.9, 0.95, 0.3, -0.6, 0.0], dtype=torch.float64)[:, None].expand(-1, 3).contiguous()
)


@pytest.fixture(params=["CPU", "simulated GPU"])
def device(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice; the second time graphs are captured, as programs that run eagerly."""
    if request.param != "CPU":
        simulate_gpu(monkeypatch, kernels=False)
        monkeypatch.setattr("banach.fast.iteration.LARGE", 1)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("solver", [Picard(), Picard(damping=0.25), Anderson(3), Broyden(4)])
def test_every_sample_takes_its_own_steps_to_its_fixed_point(solver: Any) -> None:
    net = sloped(solver=solver, tolerance=Tolerance(atol=1e-8, max_steps=1000))
    y, found = banach.compile(net)(SLOPES, solution=True)
    own, wanted = net(SLOPES, solution=True)
    torch.testing.assert_close(y, 1 / (1 - SLOPES), rtol=1e-6, atol=0)
    torch.testing.assert_close(y, own)
    for name in ("residual", "converged", "steps", "nonfinite"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))


class Turning(nn.Module):
    """R(u, v) = A u + v, A symmetric with eigenvalues all over [-.98, .98]: no few steps tell the fixed point."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        Q = torch.linalg.qr(torch.randn(20, 20, generator=draw, dtype=torch.float64))[0]
        self.A = Q @ torch.diag(torch.linspace(-0.98, 0.98, 20, dtype=torch.float64)) @ Q.T

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return u @ self.A + v


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("solver", [Anderson(10), Anderson(3), Broyden(10)])
def test_other_solvers_are_run(solver: Any) -> None:
    tolerance = Tolerance(atol=1e-6, max_steps=300)
    net = ImplicitNetwork(nn.Identity(), Turning(), nn.Identity(), solver=solver, tolerance=tolerance).eval()
    d = torch.randn(5, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, found = banach.compile(net)(d, solution=True)
    own, wanted = net(d, solution=True)
    assert torch.equal(found.steps, wanted.steps)
    assert torch.equal(found.converged, wanted.converged)
    torch.testing.assert_close(found.residual, wanted.residual)
    torch.testing.assert_close(y, own)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("mode", [JFB(), Neumann(3), Unroll(3), Unroll(2, damping=0.5)])
def test_the_value_is_that_of_the_backward_mode(mode: Any) -> None:
    """Unrolled steps lie further on from the fixed point that was found."""
    net = sloped(backward=mode, tolerance=Tolerance(atol=0.07, max_steps=100))
    torch.testing.assert_close(banach.compile(net)(SLOPES), net(SLOPES))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("solver", [Picard(), Anderson(3)])
def test_the_explicit_twin_has_no_residual(solver: Any) -> None:
    net = sloped(solver=solver, tolerance=Tolerance(max_steps=0))
    y, found = banach.compile(net)(SLOPES, solution=True)
    torch.testing.assert_close(y, net(SLOPES))
    wanted = net(SLOPES, solution=True)[1]
    for name in ("residual", "converged", "nonfinite", "steps"):
        assert torch.equal(getattr(found, name).double(), getattr(wanted, name).double()), name


@pytest.mark.usefixtures("device")
def test_alone_and_in_a_batch_it_is_the_same_answer() -> None:
    fast = CompiledNetwork(sloped(tolerance=Tolerance(atol=1e-6, max_steps=200)))
    together, found = fast(SLOPES, solution=True)
    for i in range(len(SLOPES)):
        alone, own = fast(SLOPES[i : i + 1], solution=True)
        assert torch.equal(alone[0], together[i])
        assert int(own.steps) == int(found.steps[i])


@pytest.mark.usefixtures("device")
def test_max_steps_is_kept_to_the_step() -> None:
    net = sloped(tolerance=Tolerance(atol=1e-12, max_steps=10))
    y, found = CompiledNetwork(net)(SLOPES, solution=True)
    assert int(found.steps.max()) == 10
    assert not bool(found.converged.all())
    net.tolerance = Tolerance(atol=0.0, max_steps=10, check_every=0)
    late = found.steps == 10
    torch.testing.assert_close(y[late], net(SLOPES)[late])


@pytest.mark.usefixtures("device")
def test_a_start_near_the_answer_is_used() -> None:
    fast = CompiledNetwork(sloped(tolerance=Tolerance(atol=1e-8, max_steps=1000)))
    y, found = fast(SLOPES, solution=True)
    again, warm = fast(SLOPES, z0=found.value, solution=True)
    assert int(warm.steps.max()) <= 2 < int(found.steps.max())
    torch.testing.assert_close(again, y, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("device")
def test_a_later_tolerance_and_solver_are_used() -> None:
    net = sloped(tolerance=Tolerance(atol=1e-2, max_steps=500))
    fast = banach.compile(net)
    fast(SLOPES)
    for name, value in {"tolerance": Tolerance(atol=1e-8, max_steps=500), "solver": Anderson(3)}.items():
        setattr(net, name, value)
        found = fast(SLOPES, solution=True)[1]
        assert torch.equal(found.steps, net(SLOPES, solution=True)[1].steps)


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_real_networks_answer_as_they_do(name: str) -> None:
    torch.manual_seed(0)
    net: Any = models.build(name, tolerance=Tolerance(atol=1e-10, max_steps=500)).double().eval()
    d = torch.randn(5, *models.get(name).image, dtype=torch.float64)
    y = banach.compile(net)(d)
    torch.testing.assert_close(y, net(d), rtol=1e-7, atol=1e-8)
    assert not y.requires_grad


def test_changed_weights_are_seen() -> None:
    torch.manual_seed(0)
    net: Any = models.build("digits").eval()
    fast, d = banach.compile(net), torch.randn(3, 1, 8, 8)
    before = fast(d)
    with torch.no_grad():
        net.S.linear.weight.mul_(2)
        net.S.linear.bias.mul_(2)
    torch.testing.assert_close(fast(d), 2 * before)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_buckets_are_powers_of_two(count: int, size: int) -> None:
    assert bucket(count) == size
    x = torch.randn(count, 2, 3, 4).to(memory_format=torch.channels_last)
    padded = filled(x, size)
    assert padded.shape == (size, 2, 3, 4)
    assert torch.equal(padded[:count], x)
    assert torch.equal(padded[count:], x[:1].expand(size - count, 2, 3, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_captured_it_is_the_same(batch: int) -> None:
    torch.manual_seed(0)
    net: Any = models.build("digits", tolerance=Tolerance(atol=1e-9, max_steps=300)).double().eval().cuda()
    fast = banach.compile(net)
    for _ in range(3):
        d = torch.randn(batch, 1, 8, 8, dtype=torch.float64, device="cuda")
        y, found = fast(d, solution=True)
        torch.testing.assert_close(y, net(d), rtol=1e-6, atol=1e-7)
        again = fast(d, z0=found.value)
        torch.testing.assert_close(again, y, rtol=1e-6, atol=1e-7)
