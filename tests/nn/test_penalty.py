"""observe() shows a pass and changes nothing; |J|_F^2 against dense Jacobians; losses on iterates, by hand."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import JFB, Anderson, Broyden, Picard, Tolerance
from banach.nn import finite_difference_penalty, fixed_point_correction, jacobian_penalty, observe
from banach.solve.context import loops_by
from banach.solve.device import loop_eagerly
from networks import LinearR, OnceSine
from nn.parts_nn import MODES, Dropped, NormR, close, gradients, network, normal, same, state

PENALTIES: dict[str, Callable[..., Tensor]] = {
    "product": jacobian_penalty,
    "difference": finite_difference_penalty,
}


class Smooth(nn.Module):
    """T(z, v) = sin(A z) + v: curved, so that a difference has a bias."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.A = nn.Parameter(0.7 * normal(width, width, seed=1))

    def forward(self, z: Tensor, v: Tensor) -> Tensor:
        return torch.sin(z @ self.A.T) * v


def dense(T: Any, z: Tensor, v: Tensor) -> Tensor:
    """(batch,): |J_i|_F^2 / n by the whole Jacobian of every sample."""
    rows = zip(z, v, strict=True)
    J = [torch.func.jacrev(lambda x, c=c: T(x[None], c[None])[0])(one) for one, c in rows]
    return torch.stack([Ji.square().sum() / one.numel() for Ji, one in zip(J, z, strict=True)])


def mean_over_signs(width: int, monkeypatch: pytest.MonkeyPatch, estimate: Callable[[], Tensor]) -> Tensor:
    """The exact mean over all 2^width vectors of signs, the same for every sample."""
    grid = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * width)
    total = torch.zeros((), dtype=torch.float64)
    for e in grid:
        monkeypatch.setattr("banach.nn.penalty._signs", lambda like, e=e: e.to(like).expand_as(like).clone())
        total = total + estimate()
    return total / len(grid)


def test_the_gradient_goes_through_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fast kernels have no second derivative."""
    monkeypatch.setattr("banach.nn.penalty._signs", torch.ones_like)
    z, w = normal(2, 1, 5, 4), normal(4, 12).requires_grad_()
    attend = torch.nn.functional.scaled_dot_product_attention
    found = jacobian_penalty(lambda z: attend(*(z @ w).chunk(3, -1)), z)

    def by_hand(z: Tensor) -> Tensor:
        q, k, v = (z @ w).chunk(3, -1)
        return torch.softmax(q @ k.mT / 2, -1) @ v

    J = [torch.func.jacrev(by_hand)(one).reshape(20, 20) for one in z]
    wanted = torch.stack([Ji.sum(0).square().mean() for Ji in J])
    assert torch.allclose(found, wanted, rtol=1e-9)
    slope, expected = (torch.autograd.grad((penalty**2).sum(), w)[0] for penalty in (found, wanted))
    assert torch.allclose(slope, expected, rtol=1e-9)


def test_the_mean_over_all_draws_is_the_dense_value_and_so_is_its_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    T, z, v = Smooth(), normal(3, 4, seed=2), normal(3, 4, seed=3).requires_grad_()
    mean = mean_over_signs(4, monkeypatch, lambda: jacobian_penalty(T, z, (v,)))
    exact = dense(T, z, v)
    assert torch.allclose(mean, exact, rtol=1e-12)
    weights = normal(3, seed=4)
    got = torch.autograd.grad(mean @ weights, [T.A, v])
    expected = torch.autograd.grad(exact @ weights, [T.A, v])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(got, expected, strict=True))


def test_the_difference_has_a_bias_of_second_order(monkeypatch: pytest.MonkeyPatch) -> None:
    T, z, v = Smooth(), normal(3, 4, seed=2), normal(3, 4, seed=3)
    exact = dense(T, z, v)
    off = []
    for h in (2e-2, 1e-2):
        mean = mean_over_signs(4, monkeypatch, lambda h=h: finite_difference_penalty(T, z, (v,), h=h))  # type: ignore[misc]
        off.append(float((mean - exact).abs().max().detach()))
    assert off[0] / off[1] == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 3e-3), (torch.float64, 1e-7), (torch.bfloat16, 0.3)]
)
def test_the_step_follows_the_type(dtype: torch.dtype, allowed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    T = Smooth()
    z, v = 5 * normal(3, 4, seed=2), normal(3, 4, seed=3)
    z[0] = 0.0  # where a step relative to z would vanish
    exact = dense(T, z, v)
    T.to(dtype)
    low, inputs = z.to(dtype), (v.to(dtype),)
    mean = mean_over_signs(4, monkeypatch, lambda: finite_difference_penalty(T, low, inputs).double())
    off = (mean - exact).abs() / exact
    assert float(off.max().detach()) < allowed


@pytest.mark.parametrize("kind", PENALTIES)
def test_coupled_samples_have_the_jacobian_of_the_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    A = normal(6, 6, seed=8)

    def T(z: Tensor) -> Tensor:  # mixes the samples
        return (A @ z.flatten()).view_as(z)

    z = normal(3, 2)
    options: dict[str, Any] = {} if kind == "product" else {"h": 1e-3}
    mean = mean_over_signs(6, monkeypatch, lambda: PENALTIES[kind](T, z, coupled=True, **options))
    assert torch.allclose(mean, (A.square().sum() / 6).expand(3), rtol=1e-9)


@pytest.mark.parametrize("kind", PENALTIES)
def test_nests_and_channels_last(kind: str) -> None:
    a, b = normal(3, 2), normal(3, 4, 2, 2, seed=1)
    nest = {"a": a, "b": (b.contiguous(memory_format=torch.channels_last),)}

    def T(z: Any) -> Any:
        return {"b": (0.5 * z["b"][0],), "a": 2.0 * z["a"]}

    found = PENALTIES[kind](T, nest)
    assert torch.allclose(found, torch.full((3,), (2 * 4 + 16 * 0.25) / 18).double(), rtol=1e-6)


@pytest.mark.parametrize("kind", PENALTIES)
def test_no_gradient_reaches_z_and_none_is_recorded_without_grad_mode(kind: str) -> None:
    T, z, v = Smooth(), normal(3, 4).requires_grad_(), normal(3, 4)
    found = PENALTIES[kind](T, z, (v,)).sum()
    assert torch.autograd.grad(found, [z, T.A], allow_unused=True)[0] is None
    with torch.no_grad():
        quiet = PENALTIES[kind](T, z, (v,))
    assert not quiet.requires_grad
    assert not PENALTIES[kind](lambda u: torch.ones_like(u), z).any()


def test_bad_steps_and_shapes_are_refused() -> None:
    for h in (0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="h must be above 0"):
            finite_difference_penalty(torch.sin, normal(2, 3), h=h)
    with pytest.raises(ValueError, match="T must keep the shape of its input"):
        jacobian_penalty(lambda u: u[:, :2], normal(2, 3))


def test_the_difference_needs_no_double_backward_and_the_product_does() -> None:
    layer = nn.Linear(4, 4).double()

    def T(z: Tensor) -> Tensor:
        return OnceSine.apply(layer(z))

    with pytest.raises(RuntimeError, match="once_differentiable"):
        jacobian_penalty(T, normal(3, 4)).mean().backward()
    finite_difference_penalty(T, normal(3, 4)).mean().backward()
    assert layer.weight.grad is not None
    assert torch.isfinite(layer.weight.grad).all()


# In a network.


@pytest.mark.parametrize("steps", [(), (1, 3)])
@pytest.mark.parametrize("mode", MODES)
def test_output_gradient_and_buffers_are_those_of_a_plain_pass(mode: str, steps: tuple[int, ...]) -> None:
    for make in (LinearR, NormR):
        plain = network(make(), backward=MODES[mode])
        net = copy.deepcopy(plain)
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
    net = network(LinearR(), tolerance=tolerance, solver=Picard(damping=0.2))
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


@pytest.mark.parametrize("make", [LinearR, NormR])
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
    net = network(LinearR())
    net.S = nn.Sequential(nn.BatchNorm1d(6), net.S).double()
    with observe(net, (1, 2)) as seen:
        net(normal(5, 4))
    after = state(net)
    assert int(after["S.0.num_batches_tracked"]) == 1
    fixed_point_correction(seen, lambda y: y.square().mean()).backward()
    assert same(state(net), after)


def test_what_cannot_be_observed_is_refused() -> None:
    net = network(LinearR(), compact=True)
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
    net, d = network(LinearR(), solver=solver, tolerance=Tolerance(atol=1e-9, max_steps=50)), normal(5, 4)
    seen = []
    for context in (nullcontext(), loops_by(loop_eagerly)):
        with context, observe(net, steps) as observed:
            net(d)
        seen.append(observed.iterates[0])
    assert torch.equal(*seen)


@pytest.mark.parametrize("kind", PENALTIES)
def test_a_penalty_of_a_pass_has_its_dropout_masks(kind: str) -> None:
    torch.manual_seed(1)
    net = network(Dropped())
    with observe(net) as seen:
        net(normal(5, 4))
    assert torch.allclose(seen.T(seen.z, *seen.inputs), seen.z, atol=1e-12)  # other masks: another fixed point
    found = PENALTIES[kind](seen.T, seen.z, seen.inputs)
    with torch.no_grad():
        kept = (seen.T(torch.ones_like(seen.z), torch.zeros_like(seen.z)) > 0).double().mean(1)
    assert torch.allclose(found, 0.36 * kept, rtol=1e-6)  # a diagonal J has no variance
