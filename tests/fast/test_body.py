"""A network at a fixed depth gives what the network itself gives at that depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import banach
from banach import JFB, Anderson, ImplicitNetwork, Neumann, Picard, Tolerance, Unroll, WorstPixel
from banach.fast import FixedDepth, plan
from banach.fast.weights import frozen_copy
from banach.nn import Dropout
from fast.simulated import digits, images
from train.parts_train import plain_network


def paper_network(**options: Any) -> Any:
    return digits(Tolerance(atol=1e-3, max_steps=60, norm=WorstPixel()), **options).double()


def at(net: Any, *, bf16: bool = False) -> Any:
    return FixedDepth(net, plan(net, precision="bf16" if bf16 else "fp32"))


@pytest.mark.parametrize("solver", [Picard(), Picard(damping=0.3), Anderson(3)])
@pytest.mark.parametrize("mode", [JFB(), Neumann(2), Unroll(2)])
@pytest.mark.parametrize("training", [True, False])
def test_output_gradient_and_statistics_are_the_networks(solver: Any, mode: Any, training: bool) -> None:
    depth, d, y = 7, images(), torch.arange(6)
    own, fast = (paper_network(solver=solver, backward=mode).train(training) for _ in range(2))
    atol = 0.0 if isinstance(solver, Picard) and isinstance(mode, JFB) else 1e-3  # there no sample freezes
    own.tolerance = Tolerance(atol=atol, max_steps=depth, norm=WorstPixel(), check_every=0)
    scores, found = own(d, solution=True)
    F.cross_entropy(scores, y).backward()
    output, reached, _ = at(fast)(d, depth)
    F.cross_entropy(output, y).backward()
    torch.testing.assert_close(output, scores)
    torch.testing.assert_close(reached.residual.double(), found.residual, rtol=1e-5, atol=1e-9)
    for a, b in zip(fast.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for (name, a), b in zip(fast.named_buffers(), own.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_under_autocast_a_network_in_float64_stays_in_float64() -> None:
    """Autocast leaves its weights alone, so iterates in fp32 would meet them in another type."""
    net, d = plain_network(Tolerance(atol=1e-12, max_steps=60)), images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, reached, _ = at(net, bf16=True)(d, 60)
        torch.testing.assert_close(output, net(d), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(banach.compile(net.eval())(d), net(d), rtol=1e-10, atol=1e-10)
    assert output.dtype == torch.float64
    assert bool(reached.converged.all())


class Mixing(torch.nn.Module):
    """A nest of two tensors; under autocast its values are bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, u: Any, v: Any) -> Any:
        return 0.5 * torch.tanh(self.linear(u[1])) + v[0], 0.5 * torch.tanh(self.linear(u[0])) + v[1]


def test_damped_steps_of_nests_and_of_short_values() -> None:
    torch.manual_seed(0)
    parts: Any = (lambda d: (d, 2 * d), Mixing(), lambda u: u[0] + u[1])
    net = ImplicitNetwork(*parts, solver=Picard(0.3), tolerance=Tolerance(max_steps=9, atol=0, check_every=0))
    d = torch.randn(3, 4)
    torch.testing.assert_close(at(net)(d, 9)[0], net(d))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        short = at(net, bf16=True)(d.bfloat16(), 9)[0]
    torch.testing.assert_close(short.float(), net(d), rtol=5e-2, atol=5e-2)


def test_the_next_excess_is_that_of_the_next_step() -> None:
    net, d = paper_network().train(), images()
    (found, excess), (_, later) = (at(net)(d, depth)[1:] for depth in (4, 5))
    torch.testing.assert_close(excess[1], later[0], rtol=1e-5, atol=0.0)
    assert float(excess[0]) == pytest.approx(float(found.residual.max()) / 1e-3, rel=1e-6)


def test_a_relative_tolerance_is_relative() -> None:
    net = plain_network(Tolerance(atol=0.0, rtol=1e-3, max_steps=50))
    d = torch.randn(4, 1, 8, 8)
    _, reached, excess = at(net)(d, 3)
    net.tolerance = Tolerance(atol=0.0, rtol=0.0, max_steps=3, check_every=0)
    size = net.latent(d)[1].value.norm(dim=1) / 12**0.5
    torch.testing.assert_close(excess[0], (reached.residual.double() / (1e-3 * size)).max(), rtol=1e-5, atol=0)


def test_a_frozen_copy_shares_weights_and_keeps_no_statistics() -> None:
    R = paper_network().train().R
    copy = frozen_copy(R)
    assert all(a is b for a, b in zip(copy.parameters(), R.parameters(), strict=True))
    before = {name: buffer.clone() for name, buffer in R.named_buffers()}
    u = torch.randn(3, 24, 4, 4, dtype=torch.float64)
    value = copy(u, u)
    assert all(torch.equal(buffer, before[name]) for name, buffer in R.named_buffers())
    torch.testing.assert_close(value, R(u, u))
    assert any(not torch.equal(buffer, before[name]) for name, buffer in R.named_buffers())
    torch.testing.assert_close(frozen_copy(R.eval())(u, u), R(u, u))


class Halved(JFB):
    """A mode of one's own, whose value is another one."""

    def attach(self, T: Any, z_star: Any, inputs: Any = (), *, coupled: bool = False) -> Any:
        return super().attach(T, z_star, inputs, coupled=coupled) / 2


class Slow(Picard):
    def step(self, memory: Any, at: Any) -> Any:
        return torch.lerp(at.Tz, at.z, 0.5), memory


class Doubled(ImplicitNetwork):
    def forward(self, *d: Any, **how: Any) -> Any:
        return super().forward(2 * d[0], **how)


class Called(ImplicitNetwork):
    def __call__(self, d: Any, *rest: Any, **options: Any) -> Any:
        return super().__call__(2 * d, *rest, **options)


def changed(what: str) -> Any:
    net = paper_network()
    if what in ("forward", "call"):
        return (Doubled if what == "forward" else Called)(net.Q, net.R, net.S, tolerance=net.tolerance)
    if what == "hook":
        net.register_forward_pre_hook(lambda module, given: (2 * given[0], *given[1:]))
    elif what == "mode":
        net.backward = Halved()
    else:
        net.solver = Slow()
    return net


@pytest.mark.parametrize("what", ["mode", "solver", "forward", "call", "hook"])
def test_what_users_wrote_is_called(what: str) -> None:
    """A class that only derives from one of ours is not taken for it."""
    net, d = changed(what).eval(), images()
    net.tolerance = Tolerance(atol=0.0, max_steps=7, norm=WorstPixel(), check_every=0)
    assert not plan(net).bare
    torch.testing.assert_close(at(net)(d, 7)[0], net(d))
    assert plan(paper_network()).bare
    if what in ("forward", "call", "hook"):
        with pytest.raises(TypeError, match="hooks or an overridden forward"):
            banach.compile(net)
    else:
        torch.testing.assert_close(banach.compile(net, first=3)(d), net(d))


def test_what_cannot_be_frozen_goes_through_the_network() -> None:
    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drop = torch.nn.Linear(4, 4), Dropout(0.5)

        def forward(self, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return 0.3 * torch.tanh(self.drop(self.inner(u))) + v

    def of(R: Any) -> Any:
        return ImplicitNetwork(torch.nn.Identity(), R, torch.nn.Identity())

    spectral = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 3))
    assert plan(of(Dropping()).eval()).bare
    assert plan(of(lambda u, v: u)).bare.why == "R is a function, not a module"
    assert plan(of(spectral).train()).bare.why == "R may change buffers in training mode"
    net = of(Dropping()).train()
    assert plan(net).bare.why == "R draws dropout masks"
    made = at(net)
    d = torch.randn(5, 4)
    torch.manual_seed(3)
    output = made(d, 9)[0]
    torch.manual_seed(3)
    net.tolerance = Tolerance(max_steps=9, check_every=0)
    torch.testing.assert_close(output, net(d))
