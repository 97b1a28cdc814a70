"""A solve in one launch stands in for the network's own: here by its plain twin, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import banach
from banach import RMS, ConvergenceWarning, Euclidean, ImplicitNetwork, Picard, Tolerance, WorstPixel
from banach.fast import FastNetwork, plan
from banach.models.blocks import LatentResNet
from fast.simulated import digits, images, simulate_gpu


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU: the plain reference of the kernel runs."""
    simulate_gpu(monkeypatch, kernels=True)


def network(tolerance: Tolerance = Tolerance(atol=1e-6, max_steps=100, norm=WorstPixel()), **options: Any) -> Any:
    return digits(tolerance, **options).double()


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", [WorstPixel(), RMS(), Euclidean()])
@pytest.mark.parametrize("rtol", [0.0, 1e-4])
def test_output_gradient_and_statistics_are_the_networks(training: bool, norm: Any, rtol: float) -> None:
    tolerance = Tolerance(atol=0.0 if rtol else 1e-6, rtol=rtol, max_steps=100, norm=norm)
    own, fast = (network(tolerance=tolerance).train(training) for _ in range(2))
    scores, found = own(images(), solution=True)
    F.cross_entropy(scores, torch.arange(6)).backward()
    assert plan(fast).kernel
    made: Any = FastNetwork(fast)
    output, reached = made(images())
    F.cross_entropy(output, torch.arange(6)).backward()
    torch.testing.assert_close(output, scores)
    assert torch.equal(reached.steps, found.steps)
    assert bool(reached.converged.all())
    torch.testing.assert_close(reached.residual, found.residual, rtol=1e-6, atol=0.0)
    for a, b in zip(fast.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for (name, a), b in zip(fast.named_buffers(), own.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.usefixtures("everywhere")
def test_a_compiled_network_uses_the_kernel() -> None:
    net = network().eval()
    fast = banach.compile(net)
    assert fast.plan.kernel
    y, found = fast(images(), solution=True)
    own, wanted = net(images(), solution=True)
    torch.testing.assert_close(y, own)
    torch.testing.assert_close(fast(images()), own)
    assert torch.equal(found.steps, wanted.steps)
    assert bool(found.converged.all())
    again = fast(images(), z0=found.value, solution=True)[1]
    assert int(again.steps.max()) <= 2
    net.start = lambda v: found.value
    trained: Any = FastNetwork(net)
    assert int(trained(images())[1].steps.max()) <= 2


def alone() -> Any:
    """Samples that batch norm couples, called independent all the same."""
    net = network().train()
    net.coupled = False
    return net


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    "net",
    [
        network(solver=Picard(damping=0.1)),
        network(tolerance=Tolerance(max_steps=0)),
        alone(),
        ImplicitNetwork(torch.nn.Identity(), torch.nn.Bilinear(2, 2, 2), torch.nn.Identity()),
    ],
    ids=["damped", "explicit", "coupled otherwise", "another R"],
)
def test_what_the_kernel_does_not_compute_is_left_to_the_loop(net: Any) -> None:
    assert not plan(net).kernel


class Halved(LatentResNet):
    """Inherits what its parent says of itself, and computes something else."""

    def forward(self, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(u, v) + 1


class Doubled(torch.nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def changed(how: str) -> Any:
    net = network().eval()
    if how == "another forward":
        net.R = Halved(24, 1, 0.5).double().eval()
    elif how == "a hook":
        net.R.blocks[0].conv1.register_forward_hook(lambda module, given, out: 2 * out)
    elif how == "another convolution":
        net.R.blocks[0].conv1 = Doubled(24, 24, 3, padding=1).double()
    elif how == "a parametrisation":
        torch.nn.utils.parametrizations.weight_norm(net.R.blocks[0].conv1)
    return net.eval()


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("how", ["another forward", "a hook", "another convolution", "a parametrisation"])
def test_an_R_that_computes_something_else_than_its_class_says_is_left_to_the_loop(how: str) -> None:
    assert plan(changed("nothing")).kernel
    net = changed(how)
    assert not plan(net).kernel
    torch.testing.assert_close(banach.compile(net)(images()), net(images()), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("everywhere")
def test_samples_that_leave_the_finite_numbers_are_told() -> None:
    net = network().eval().float()
    with torch.no_grad():
        for p in net.R.parameters():
            p.mul_(1e3)
    with pytest.warns(ConvergenceWarning, match="NaN or infinity"):
        wanted = net(images().float(), solution=True)[1]
    assert bool(wanted.nonfinite.all())
    found = banach.compile(net)(images().float(), solution=True)[1]
    assert torch.equal(found.nonfinite, wanted.nonfinite)
    reached: Any = FastNetwork(net)(images().float())[1]
    assert torch.equal(reached.nonfinite, wanted.nonfinite)


def test_a_norm_of_the_users_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(RMS):
        pass

    assert plan(network()).kernel.why == "needs a CUDA GPU"
    simulate_gpu(monkeypatch, kernels=True)
    assert plan(network(tolerance=Tolerance(norm=Doubled()))).kernel.why == "the norm is Doubled"
