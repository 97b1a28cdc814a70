"""observe() changes nothing and shows the map and its iterates; losses on iterates, against a written-out loop."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import JFB, Anderson, Broyden, Picard, Tolerance
from banach.nn import fixed_point_correction, observe
from banach.solve.context import loops_by
from banach.solve.device import loop_eagerly
from nn.parts_nn import MODES, NormR, close, gradients, network, normal, same, state


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(0.3 * normal(6, 6, seed=1))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(u @ self.A.T + v)


@pytest.mark.parametrize("steps", [(), (1, 3)])
@pytest.mark.parametrize("mode", MODES)
def test_output_gradient_and_buffers_are_those_of_a_plain_pass(mode: str, steps: tuple[int, ...]) -> None:
    for make in (Tanh, NormR):
        plain, net = (network(make(), backward=MODES[mode]) for _ in range(2))
        d = normal(5, 4)
        y, found = plain(d, solution=True)
        expected = gradients(plain, y.square().sum())
        with observe(net, steps) as seen:
            y_seen, found_seen = net(d, solution=True)
        assert torch.allclose(y_seen, y, rtol=0, atol=1e-13)
        assert torch.equal(found_seen.steps, found.steps)
        assert close(gradients(net, y_seen.square().sum()), expected, atol=1e-12)
        assert same(state(net), state(plain))
        assert net.backward == MODES[mode]
        assert net.solver == Picard()
        assert torch.equal(seen.z, found_seen.value)


@pytest.mark.filterwarnings("ignore::banach.ConvergenceWarning")  # it stops before it converges, checked or not
@pytest.mark.parametrize("check_every", [1, 3, 0])
def test_the_iterates_are_those_of_the_solver(check_every: int) -> None:
    tolerance = Tolerance(atol=1e-9, max_steps=12, check_every=check_every)
    net = network(Tanh(), tolerance=tolerance, solver=Picard(damping=0.2))
    d = normal(5, 4)
    with observe(net, (2, 5, 11, 12, 50)) as seen, torch.no_grad():
        net(d)
    v, z = net.Q(d).detach(), torch.zeros(5, 6, dtype=torch.float64)
    path = [z]
    for _ in range(12):
        path.append(0.2 * path[-1] + 0.8 * net.R(path[-1], v).detach())
    assert len(seen.iterates) == 3  # the value itself, z_12, is no intermediate iterate
    for k, found in zip((2, 5, 11), seen.iterates, strict=True):
        assert torch.allclose(found, path[k], rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [Tanh, NormR])
def test_the_correction_is_the_written_out_sum(make: Any) -> None:
    net = network(make(), tolerance=Tolerance(atol=1e-9, max_steps=100))
    d, gamma = normal(5, 4), 0.7

    def loss(y: Tensor) -> Tensor:
        return y.sin().square().sum()

    with observe(net, (1, 4)) as seen:
        net(d)
    after = state(net)
    got = fixed_point_correction(seen, loss, gamma=gamma)
    assert same(state(net), after)
    # One pass again by hand: batch norm in train mode reads no buffers, so R may be called as it is.
    v, z, iterates = net.Q(d), torch.zeros(5, 6, dtype=torch.float64), []
    for k in range(5):
        if k in (1, 4):
            iterates.append(z)
        z = net.R(z, v).detach()
    expected = gamma**2 * loss(net.S(net.R(iterates[0], v))) + gamma * loss(net.S(net.R(iterates[1], v)))
    assert float(got.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
    assert close(gradients(net, got), gradients(net, expected), atol=1e-10)


def test_buffers_of_s_are_updated_by_the_pass_alone() -> None:
    net = network(Tanh())
    net.S = nn.Sequential(nn.BatchNorm1d(6), net.S).double()
    with observe(net, (1, 2)) as seen:
        net(normal(5, 4))
    after = state(net)
    assert int(after["S.0.num_batches_tracked"]) == 1
    fixed_point_correction(seen, lambda y: y.square().mean()).backward()
    assert same(state(net), after)


def test_what_cannot_be_observed_is_refused() -> None:
    net = network(Tanh(), compact=True)
    with pytest.raises(ValueError, match="got compact=True"), observe(net, (1,)):
        pass
    with pytest.raises(TypeError, match="net must be an ImplicitNetwork, got Linear"), observe(nn.Linear(2, 2)):
        pass
    with pytest.raises(ZeroDivisionError), observe(net):
        _ = 1 / 0
    assert (net.backward, net.solver) == (JFB(), Picard())  # put back after an error
    with pytest.raises(ValueError, match="every step must be a whole number"), observe(net, (0,)):
        pass
    with observe(net) as seen:
        pass
    with pytest.raises(AttributeError, match="no pass was observed"):
        _ = seen.T
    with observe(net) as passed:
        net(normal(2, 4))
    with pytest.raises(AttributeError, match=r"^iterate$"):
        _ = passed.iterate
    with pytest.raises(ValueError, match="gamma must be above 0"):
        fixed_point_correction(seen, lambda y: y, gamma=1.1)


@pytest.mark.parametrize("solver", [Picard(), Anderson(5), Anderson(1), Broyden(4)], ids=repr)
@pytest.mark.parametrize("steps", [(1,), (2,), (4,)])
def test_iterates_survive_a_captured_loop(solver: Any, steps: tuple[int, ...]) -> None:
    """The loop writes to the solver's memory in place, which was the iterate itself."""
    net, d = network(Tanh(), solver=solver, tolerance=Tolerance(atol=1e-9, max_steps=50)), normal(5, 4)
    seen = []
    for context in (nullcontext(), loops_by(loop_eagerly)):
        with context, observe(net, steps) as observed:
            net(d)
        seen.append(observed.iterates[0])
    assert torch.equal(*seen)
