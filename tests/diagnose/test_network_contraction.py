"""measure_contraction on networks, against dense Jacobians; measuring changes no weight, buffer, number or run."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import Anderson, ImplicitNetwork, Picard, Status, Tolerance, WorstPixel
from banach.diagnose import ContractionMonitor, descent_check, measure_contraction, network_map
from diagnose.parts_diagnose import DATA, conv, digits, jacobian, tiny, unchanged

EXACT: dict[str, Any] = {"rtol": 1e-12, "max_steps": 500}


def iterate(net: ImplicitNetwork, d: Tensor, steps: int = 400) -> tuple[ImplicitNetwork, Tensor, Tensor]:
    """A copy of the network, Q(d) and the fixed point, by a plain loop of the reference's own."""
    twin = copy.deepcopy(net)
    with torch.no_grad():
        v = twin.Q(d)
        u = torch.zeros_like(v)
        for _ in range(steps):
            u = twin.R(u, v)
    return twin, v, u


@pytest.mark.parametrize(("norm", "training"), [(True, True), (False, True), (True, False)])
def test_sigma_and_rate_against_dense(norm: bool, training: bool) -> None:
    """Batch norm couples the samples in train mode only: then there is one sigma."""
    net = tiny(norm=norm)
    if norm:
        with torch.no_grad():
            net.R.norm.weight.fill_(0.3 if training else 0.2)
            for _ in range(0 if training else 3):
                net(DATA)
    net.train(training)
    measured = measure_contraction(net, DATA, **EXACT)
    twin, v, u = iterate(net, DATA)
    J = jacobian(lambda u: twin.R(u, v), u)
    blocks = [J] * 6 if norm and training else [J[5 * i : 5 * i + 5, 5 * i : 5 * i + 5] for i in range(6)]
    assert measured.coupled is (norm and training)
    torch.testing.assert_close(measured.sigma, torch.linalg.matrix_norm(torch.stack(blocks), 2), rtol=1e-7, atol=0)
    radius = torch.linalg.eigvals(J).abs().max()
    assert abs(float(measured.rate.max() / radius) - 1) < 0.1


def test_error_bounds_the_true_error() -> None:
    net = tiny(gain=0.8, tolerance=Tolerance(atol=1e-2))
    measured = measure_contraction(net, DATA, **EXACT)
    _, _, u = iterate(net, DATA)
    with torch.no_grad():
        used = net.latent(DATA)[1].value
    true = (used - u).norm(dim=1) / 5**0.5
    assert (measured.residual > 1e-6).all()
    assert (true <= measured.error * 1.05).all()  # sigma is the local constant; the iterate is near
    assert torch.allclose(measured.error, measured.residual / (1 - measured.sigma)), "in RMS, as the residual"


def test_error_bounds_the_error_also_by_worst_pixel() -> None:
    """The largest pixel of u - u* can be far larger than that of T(u) - u divided by 1 - sigma."""
    H = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)]) / 2**0.5  # orthogonal: sigma is 0.8
    net = ImplicitNetwork(
        nn.Identity(),
        lambda u, v: 0.8 * (u.flatten(1) @ H).view_as(u) + v,
        nn.Identity(),
        tolerance=Tolerance(norm=WorstPixel(), max_steps=0),  # u is 0, T(u) - u is v
    )
    v = torch.ones(1, 1, 8, 8, dtype=torch.float64)
    measured = measure_contraction(net, v, **EXACT)
    star = torch.linalg.solve(torch.eye(64, dtype=torch.float64) - 0.8 * H, v.flatten(1).T).T.view_as(v)
    true = star.abs().amax()
    assert measured.residual / (1 - measured.sigma) < true <= measured.error


def test_rate_is_of_picard_whatever_the_solver() -> None:
    """Anderson solves what undamped Picard does not; the rate says so."""
    net = tiny(n=1, solver=Anderson())
    with torch.no_grad():
        net.R.linear.weight.fill_(-3.0)
        net.Q.weight.mul_(0.01)
        net.Q.bias.zero_()
    measured = measure_contraction(net, DATA, steps=12)
    assert measured.solution.converged.all()
    assert (measured.sigma > 1).all()
    assert (measured.rate > 1).any()


def test_bf16_autocast_and_bf16_weights() -> None:
    net = conv().eval()
    images = digits(4)[0].float()
    exact = measure_contraction(net, images.double()).sigma
    net = net.float()
    net.tolerance = Tolerance(atol=1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        auto = measure_contraction(net, images)
    torch.testing.assert_close(auto.sigma.double(), exact, rtol=3e-2, atol=0)
    half = measure_contraction(net.bfloat16(), images.bfloat16())
    torch.testing.assert_close(half.sigma.double(), exact, rtol=5e-2, atol=0)


def test_explicit_twin_and_picard_depth_zero() -> None:
    net = tiny(tolerance=Tolerance(max_steps=0))
    m = network_map(net, DATA)
    assert torch.equal(m.u, torch.zeros(6, 5, dtype=torch.float64))
    assert measure_contraction(net, DATA).sigma.shape == (6,)


def test_divergence_is_measured_not_raised() -> None:
    class Explode(nn.Module):
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return 3 * u + u**3 + v

    net = ImplicitNetwork(nn.Identity(), Explode(), nn.Identity(), solver=Picard())
    measured = measure_contraction(net, DATA)
    assert all(status is Status.NONFINITE for status in measured.solution.status)
    assert (measured.rate > 1).all()
    assert (measured.sigma > 2.99).all()


# Measuring changes nothing.


@pytest.mark.parametrize("training", [True, False])
def test_nothing_changes(training: bool) -> None:
    """Batch norm in Q and R, dropout in R and S, on real images: every measurement leaves them as they were."""
    net = conv(drop=0.3).train(training)
    images, labels = digits(3)
    with unchanged(net):
        network_map(net, images)
        measure_contraction(net, images)
        descent_check(net, images, lambda y: nn.functional.cross_entropy(y, labels))
        ContractionMonitor()(net, images)


def test_inside_inference_mode() -> None:
    net = conv().eval()
    images, labels = digits(3)
    outside = measure_contraction(net, images)
    with torch.inference_mode():
        fresh = images + 0
        inside = measure_contraction(net, fresh)
        descent = descent_check(net, fresh, lambda y: nn.functional.cross_entropy(y, labels))
    torch.testing.assert_close(inside.sigma, outside.sigma)
    assert descent.cosine > 0


def test_refusals() -> None:
    net = tiny()
    net.R = nn.Sequential(nn.Dropout(0.5))
    with pytest.raises(RuntimeError, match="no fixed point to find"):
        measure_contraction(net, DATA)
    with pytest.raises(TypeError, match=r"net must be an ImplicitNetwork, got Linear; .*net\.module"):
        measure_contraction(nn.Linear(2, 2), DATA)
    with pytest.raises(TypeError, match=r"net must be an ImplicitNetwork, got DataParallel; .*net\.module"):
        descent_check(nn.DataParallel(tiny()), DATA, torch.sum)


@pytest.mark.gpu
def test_on_cuda() -> None:
    net = conv(drop=0.2).cuda()
    images = digits(4)[0].cuda()
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = measure_contraction(net, images)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])
    assert first.sigma.is_cuda
    net.eval()
    host = measure_contraction(copy.deepcopy(net).cpu(), images.cpu())
    torch.testing.assert_close(measure_contraction(net, images).sigma.cpu(), host.sigma)
