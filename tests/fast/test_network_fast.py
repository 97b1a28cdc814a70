"""A network that can be captured gives what the network itself gives, with the same number of steps."""

import copy
from typing import Any

import pytest
import torch

import banach
from banach import (
    JFB,
    RMS,
    Anderson,
    Broyden,
    Euclidean,
    ImplicitNetwork,
    Neumann,
    Picard,
    Tolerance,
    Unroll,
    WorstPixel,
)
from banach.fast import FastNetwork, plan
from banach.fast.iteration import Iteration
from banach.nn import Dropout
from banach.solve.context import loops_by
from banach.solve.device import loop_eagerly
from fast.simulated import digits, images, simulate_gpu
from train.parts_train import plain_network


def paper_network(**options: Any) -> Any:
    return digits(Tolerance(atol=1e-3, max_steps=60, norm=WorstPixel()), **options).double()


def fast(net: Any, d: Any, *, bf16: bool = False) -> Any:
    """The output and the Solution, with the loop of a capture."""
    with loops_by(loop_eagerly):
        return FastNetwork(net, plan(net, precision="bf16" if bf16 else "fp32"))(d)


def assert_same_step(own: Any, other: Any, d: Any) -> None:
    """The outputs, steps, gradients and buffers of a training step, by the network itself and captured."""
    results = []
    for net, call in ((own, lambda net, d: net(d, solution=True)), (other, fast)):
        torch.manual_seed(3)
        output, found = call(net, d)
        output.square().mean().backward()
        results.append((output, found.residual, found.steps, found.converged, found.nonfinite))
    torch.testing.assert_close(*results)
    torch.testing.assert_close([p.grad for p in other.parameters()], [p.grad for p in own.parameters()])
    torch.testing.assert_close(dict(other.named_buffers()), dict(own.named_buffers()))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("solver", "mode", "max_steps"),
    [
        *((Picard(), JFB(), most) for most in (60, 7, 1, 0)),
        (Picard(damping=0.3), Neumann(2), 60),
        (Anderson(3), Unroll(2), 7),
        (Anderson(3), JFB(), 0),
        (Broyden(2), JFB(), 60),
    ],
)
@pytest.mark.filterwarnings("ignore::banach.ConvergenceWarning")
def test_output_steps_gradient_and_statistics_are_the_networks(
    solver: Any, mode: Any, max_steps: int, training: bool
) -> None:
    """In training mode batch norm couples the samples."""
    own, other = (paper_network(solver=solver, backward=mode).train(training) for _ in range(2))
    own.tolerance = other.tolerance = Tolerance(atol=1e-3, max_steps=max_steps, norm=WorstPixel())
    assert_same_step(own, other, images())


@pytest.mark.parametrize(("norm", "batch"), [(RMS(), 16), (RMS(), 64), (Euclidean(), 19)])
def test_late_samples_go_on_as_a_smaller_batch(norm: Any, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is that of the whole batch, and R sees the halves of a large one."""
    seen: list[int] = []
    simulate_gpu(monkeypatch, kernels=True)
    monkeypatch.setattr("banach.fast.iteration.LARGE", 1)
    own, other = (plain_network(Tolerance(atol=1e-7, rtol=1e-7, max_steps=90, norm=norm)) for _ in range(2))
    other.R.register_forward_hook(lambda R, given, value: seen.append(len(value)))
    d = torch.linspace(0.1, 6, batch).view(-1, 1, 1, 1) * images(1)
    assert_same_step(own, other, d)
    assert {batch, batch // 2} <= set(seen) <= {batch, batch // 2, batch // 4}


def test_a_batch_that_cannot_be_halved_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here v is one for all samples."""
    simulate_gpu(monkeypatch, kernels=True)
    monkeypatch.setattr("banach.fast.iteration.LARGE", 1)

    class Shared(torch.nn.Module):
        def forward(self, u: Any, v: Any) -> Any:
            return 0.5 * torch.tanh(u + v[1]) + v[0]

    parts: Any = (lambda d: (d, d.mean(0, keepdim=True)), Shared(), torch.nn.Identity())
    net = ImplicitNetwork(*parts, start=lambda v: torch.zeros_like(v[0]))
    assert plan(net).fused_step
    d = torch.randn(32, 4, dtype=torch.float64)
    torch.testing.assert_close(fast(net, d)[0], net(d))


def test_under_autocast_a_network_in_float64_stays_in_float64() -> None:
    """Autocast leaves its weights alone, so iterates in fp32 would meet them in another type."""
    net, d = plain_network(Tolerance(atol=1e-12, max_steps=60)), images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, reached = fast(net, d, bf16=True)
        torch.testing.assert_close(output, net(d), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(banach.compile(net.eval())(d), net(d), rtol=1e-10, atol=1e-10)
    assert output.dtype == torch.float64
    assert bool(reached.converged.all())


class Halved(JFB):
    """A mode of one's own, whose value is another one."""

    def attach(self, T: Any, z_star: Any, inputs: Any = (), *, coupled: bool = False) -> Any:
        return super().attach(T, z_star, inputs, coupled=coupled) / 2


class Slow(Picard):
    def step(self, memory: Any, at: Any) -> Any:
        return torch.lerp(at.Tz, at.z, 0.5), memory


def changed(what: str) -> Any:
    """A network that computes something else than its class says, by what its user wrote."""
    net = paper_network()
    if what in ("forward", "__call__"):
        own = getattr(ImplicitNetwork, what)
        kind = type("Own", (ImplicitNetwork,), {what: lambda self, d, **how: own(self, 2 * d, **how)})
        return kind(net.Q, net.R, net.S, tolerance=net.tolerance)
    if what == "hook":
        net.register_forward_pre_hook(lambda module, given: (2 * given[0], *given[1:]))
    elif what == "mode":
        net.backward = Halved()
    else:
        net.solver = Slow()
    return net


@pytest.mark.parametrize("what", ["mode", "solver", "forward", "__call__", "hook"])
def test_what_users_wrote_is_called(what: str) -> None:
    """A class that only derives from one of ours is not taken for it."""
    net, d = changed(what).eval(), images()
    net.tolerance = Tolerance(atol=0.0, max_steps=7, norm=WorstPixel(), check_every=0)
    assert bool(plan(net).own_loop) == (what == "solver")
    torch.testing.assert_close(fast(net, d)[0], net(d))
    assert plan(paper_network()).own_loop
    if what in ("forward", "__call__", "hook"):
        with pytest.raises(TypeError, match="hooks or an overridden forward"):
            banach.compile(net)
    else:
        torch.testing.assert_close(banach.compile(net)(d), net(d))


class Dropping(torch.nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = torch.nn.Linear(4, 4), norm, Dropout(0.5)

    def forward(self, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 0.3 * torch.tanh(self.norm(self.drop(self.inner(u)))) + v


def of(R: Any, **options: Any) -> Any:
    return ImplicitNetwork(torch.nn.Identity(), R, torch.nn.Identity(), **options)


def test_what_cannot_be_frozen_goes_through_the_network() -> None:
    spectral = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 3))
    assert plan(of(lambda u, v: u)).own_loop.why == "R is a function, not a module"
    assert plan(of(spectral).train()).own_loop.why == "R may change buffers in training mode"
    torch.manual_seed(0)
    net = of(Dropping(torch.nn.BatchNorm1d(4))).train()
    assert plan(net).own_loop.why == "R draws dropout masks and updates statistics"
    assert_same_step(net, copy.deepcopy(net), torch.randn(5, 4))


@pytest.mark.parametrize(
    ("kernels", "solver", "max_steps"), [(True, Picard(), 60), (True, Picard(), 0), (False, Anderson(3), 60)]
)
def test_dropout_in_r_has_one_mask_per_step(
    kernels: bool, solver: Any, max_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large batch is not halved: masks are those of the whole batch."""
    simulate_gpu(monkeypatch, kernels=kernels)
    monkeypatch.setattr("banach.fast.iteration.LARGE", 1)
    torch.manual_seed(0)
    net = of(Dropping(torch.nn.LayerNorm(4)), solver=solver, tolerance=Tolerance(atol=1e-9, max_steps=max_steps))
    net = net.double().train()
    assert plan(net).own_loop
    d = torch.linspace(0.1, 6, 16).double()[:, None] * torch.randn(16, 4).double()
    assert_same_step(net, copy.deepcopy(net), d)
    other = fast(net, d)[0]
    assert not torch.equal(other, fast(net, d)[0])  # other masks in the next step


@pytest.mark.parametrize("solver", [Picard(), Anderson(3)])
def test_a_fixed_depth_takes_the_steps_of_the_solver(solver: Any) -> None:
    """Anderson at check_every=0 once ran as Picard, since there was no while node and so no fused step."""
    net = plain_network(Tolerance(atol=1e-6, max_steps=9, check_every=0), solver=solver)
    found = fast(net, images())[1]
    assert torch.equal(found.steps, net(images(), solution=True)[1].steps)
    how = plan(net, "cuda")
    assert how.loop.why == "check_every is 0, so the depth is max_steps"


def test_a_nest_with_a_number_stops_as_one() -> None:
    """A leaf without axes couples the samples; kernels for independent ones would read beyond their numbers."""

    class R(torch.nn.Module):
        def forward(self, u: Any, v: Any) -> Any:
            return 0.5 * torch.tanh(u[0]) + v, 0.5 * u[1] + v.mean()

    def start(v: Any) -> Any:
        return torch.zeros_like(v), v.new_zeros(())

    net = ImplicitNetwork(torch.nn.Identity(), R(), lambda u: u[0] + u[1], start=start)
    d = torch.randn(5, 4, dtype=torch.float64)
    (output, found), (own, wanted) = fast(net, d), net(d, solution=True)
    torch.testing.assert_close(output, own)
    assert torch.equal(found.steps, wanted.steps)
    how = Iteration(net.R, Picard(), net.tolerance)(start(d), d)
    assert torch.equal(how.steps, wanted.steps)


@pytest.mark.parametrize(
    ("value", "error"), [(lambda u, v: u.double(), TypeError), (lambda u, v: u.repeat(1, 2), ValueError)]
)
def test_an_r_that_changes_shape_or_type_is_refused(value: Any, error: Any) -> None:
    with pytest.raises(error, match="must keep the"):
        Iteration(value, Picard(), Tolerance())(torch.zeros(3, 2), torch.zeros(3, 2))


@pytest.mark.parametrize("training", [True, False])
def test_a_kernel_computes_the_networks_step(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solve in one launch stands in for the loop; here `solve` does."""
    simulate_gpu(monkeypatch, kernels=True)
    own, other = (paper_network().train(training) for _ in range(2))
    assert plan(other).kernel
    assert_same_step(own, other, images())


def test_a_compiled_network_uses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpu(monkeypatch, kernels=True)
    net = paper_network().eval()
    fast = banach.compile(net)
    assert fast.plan.kernel
    y, found = fast(images(), solution=True)
    own, wanted = net(images(), solution=True)
    torch.testing.assert_close(y, own)
    torch.testing.assert_close(fast(images()), own)
    assert torch.equal(found.steps, wanted.steps)
    again = fast(images(), z0=found.value, solution=True)[1]
    assert int(again.steps.max()) <= 2
    net.start = lambda v: found.value
    trained: Any = FastNetwork(net)
    assert int(trained(images())[1].steps.max()) <= 2
