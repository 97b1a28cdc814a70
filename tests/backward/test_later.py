"""What the backward pass evaluates is R as it was in the forward pass: its weights, its mode, its attention."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from backward.cells_backward import ADJOINT, IMAGES, LATENTS, TIGHT, Cell, check_exact, gradient, network
from backward.systems_backward import METHODS
from banach import (
    GMRES,
    JFB,
    AdjointWarning,
    Implicit,
    Neumann,
    Tolerance,
    Unroll,
    fixed_point,
)
from banach.backward import Mode
from networks import by_hand
from problems import normal

LATER: tuple[Mode, ...] = (Implicit(), Unroll(100, checkpoint=True))
later = pytest.mark.parametrize("mode", LATER, ids=str)


@pytest.mark.parametrize("mode", [*LATER, Unroll(100), Neumann(100)], ids=str)
@pytest.mark.parametrize("how", ["autograd", "torch.func.grad"])
def test_other_weights_than_the_modules_own(mode: Mode, how: str) -> None:
    """Against a network that holds these weights, by a plain loop."""
    net = network(Cell, mode)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.3 * torch.randn_like(p))
    weights = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}

    def loss(w: dict[str, Tensor]) -> Tensor:
        return functional_call(net, w, (IMAGES,)).square().sum()

    if how == "autograd":
        got = torch.autograd.grad(loss(weights), list(weights.values()))
    elif isinstance(mode, Unroll) and mode.checkpoint:
        pytest.skip("torch.func refuses saved tensor hooks, which checkpoints are")
    else:
        got = tuple(torch.func.grad(loss)({name: p.detach() for name, p in weights.items()}).values())
    wanted = gradient(other, output=by_hand(other, IMAGES))
    torch.testing.assert_close(torch.cat([g.flatten() for g in got]), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [JFB(), *LATER], ids=str)
def test_the_mode_of_the_forward_pass_counts(mode: Mode, training: bool) -> None:
    wanted = gradient(network(lambda: Cell(norm=True), mode).train(training))
    net = network(lambda: Cell(norm=True), mode).train(training)
    y = net(IMAGES)
    net.train(not training)
    torch.testing.assert_close(gradient(net, output=y), wanted)
    assert net.R.norm.training is not training


# What was changed in place between the passes is refused.


@later
def test_changed_weights_are_refused(mode: Mode) -> None:
    net = network(Cell, mode)
    loss = net(IMAGES).square().sum()
    with torch.no_grad():
        net.R.linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"linear\.weight was changed in place between the forward"):
        loss.backward()


@pytest.mark.parametrize("mode", [Implicit(), Unroll(3, checkpoint=True)], ids=str)
def test_a_changed_parameter_of_a_module_T_is_refused(mode: Mode) -> None:
    T = nn.Linear(6, 6).double()
    T.weight.data.mul_(0.3)
    z = fixed_point(T, torch.zeros_like(LATENTS), backward=mode)
    with torch.no_grad():
        T.weight.add_(0.1)
    with pytest.raises(RuntimeError, match="T's parameter weight was changed in place between"):
        z.sum().backward()


def closed(T: Any, x: Any, mode: Mode = Implicit()) -> Tensor:
    return fixed_point(T, torch.zeros_like(LATENTS), inputs=(x,), tolerance=TIGHT, backward=mode)


def test_changed_inputs_are_refused() -> None:
    net, buffer = network(Cell, Implicit(), Q=nn.Flatten()), LATENTS.clone()
    loss = net(buffer).square().sum()
    buffer.mul_(2)  # one buffer for two passes
    loss = loss + net(buffer).square().sum()
    with pytest.raises(RuntimeError, match=r"an input of T \(1\) was changed in place between the forward"):
        loss.backward()


@later
def test_changed_inputs_in_a_nest_are_refused(mode: Mode) -> None:
    """Found silent in Unroll: a checkpoint watches the tensors that are its arguments, not those inside a nest."""
    a, x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True), {"x": [LATENTS.clone()]}
    z = closed(lambda z, x: torch.tanh(a * z + x["x"][0]), x, mode)
    x["x"][0].zero_()
    with pytest.raises(RuntimeError, match=r"an input of T \(1\) was changed in place between"):
        z.sum().backward()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_changed_fixed_point_is_refused(method: Any) -> None:
    """Found as a silently wrong gradient: a warm start was reset in place before the backward pass."""
    b = LATENTS.clone().requires_grad_()
    z0 = {"a": torch.zeros_like(b), "b": torch.zeros_like(b)}

    def T(u: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": 0.7 * torch.tanh(u["b"]) + b, "b": 0.5 * torch.sin(u["a"])}

    u, found = fixed_point(T, z0, backward=Implicit(method), solution=True)
    found.value["b"][0] = 0
    with pytest.raises(RuntimeError, match=r"Solution\.value was changed in place between the forward"):
        u["a"].square().sum().backward()


def along(x: Tensor, A: Tensor, mode: Mode | None, *, closure: bool = False) -> Tensor:
    """Return a loss over three time steps, each with a layer that sees the state; None: by a plain loop."""
    total = x.new_zeros(())
    for _ in range(3):
        v = x @ A
        if mode is None:
            u = torch.zeros_like(x)
            for _ in range(100):
                u = torch.tanh(0.5 * u @ A + v)
        elif closure:
            T = lambda u: torch.tanh(0.5 * u @ A + v)  # noqa: B023, E731
            u = fixed_point(T, torch.zeros_like(x), tolerance=TIGHT, backward=mode)
        else:
            u = closed(lambda u, v: torch.tanh(0.5 * u @ A + v), v, mode)
        x = torch.tanh(x + u)
        total = total + (x**3).sum()
    return total


LOOP = """
for t in range(3):
    v = x * (t + 1)
    T = lambda u: (lambda w: torch.tanh(w @ A + v))(0.5 * u)
    total = total + fixed_point(T, x, tolerance=TIGHT, backward=mode).sum()
"""
HELPED = "def shifted(w): return w @ A + v\n" + LOOP.replace(
    "lambda w: torch.tanh(w @ A + v)", "lambda w: torch.tanh(shifted(w))"
)


@pytest.mark.parametrize("mode", [*(Implicit(m, ADJOINT) for m in METHODS), Unroll(60, checkpoint=True)], ids=str)
def test_a_function_in_a_loop_reads_its_own_values_in_the_backward_pass(mode: Mode) -> None:
    """Found as a silently wrong gradient: when the backward pass calls T, its v is that of the last step."""
    A = (0.5 * normal(6, 6, seed=3) / 2.5).requires_grad_()
    wanted = torch.autograd.grad(along(LATENTS, A, None), A)[0]
    for closure in (False, True):
        got = torch.autograd.grad(along(LATENTS, A, mode, closure=closure), A)[0]
        torch.testing.assert_close(got, wanted)
    # In a script or a notebook the variable is a global one.
    script: dict[str, Any] = {"torch": torch, "fixed_point": fixed_point, "A": A, "x": LATENTS, "total": 0}
    exec(LOOP, script := {**script, "mode": mode, "TIGHT": TIGHT})
    total = torch.zeros((), dtype=torch.float64)
    for t in range(3):
        u = torch.zeros_like(LATENTS)
        for _ in range(100):
            u = torch.tanh(0.5 * u @ A + LATENTS * (t + 1))
        total = total + u.sum()
    wanted = torch.autograd.grad(total, A)[0]
    torch.testing.assert_close(torch.autograd.grad(script["total"], A)[0], wanted)
    exec(HELPED, script := {**script, "total": 0})
    with pytest.warns(AdjointWarning, match="T gave another value in the backward pass"):  # of v, in `shifted`
        torch.autograd.grad(script["total"], A)


@later
@pytest.mark.parametrize("shift", [LATENTS, None])
def test_T_compares_functions(shift: Tensor | None, mode: Mode) -> None:
    """Found as a KeyError: in the backward pass functions called by T were others, whether they changed or not."""
    A = (0.15 * normal(6, 6, seed=3)).requires_grad_()
    script: dict[str, Any] = {"A": A, "torch": torch, "shift": LATENTS}
    exec(
        "def act(w): return torch.tanh(w @ A)\nshare = {act: 0.5}\nT = lambda u: share[act] * act(u) + shift",
        script,
    )
    u = fixed_point(script["T"], LATENTS, tolerance=TIGHT, backward=mode)
    z = torch.zeros_like(LATENTS)
    for _ in range(100):
        z = 0.5 * torch.tanh(z @ A) + LATENTS
    script["shift"] = shift
    got, wanted = (torch.autograd.grad((one**2).sum(), A)[0] for one in (u, z))
    torch.testing.assert_close(got, wanted)


def test_a_function_that_counts_its_calls_goes_on_counting() -> None:
    calls, shift = 0, LATENTS

    def T(u: Tensor, *, share: float = 0.5) -> Tensor:
        def count() -> None:
            nonlocal calls
            calls += 1

        count()
        return torch.tanh(share * u) * a + shift

    a = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    z = Implicit(tolerance=ADJOINT).attach(T, LATENTS)
    assert calls == 1
    shift = torch.zeros_like(shift)
    (g,) = torch.autograd.grad(z.sum(), a)
    assert calls == 2
    slope = 0.5 * a.detach() * (1 - torch.tanh(0.5 * LATENTS) ** 2)
    torch.testing.assert_close(g, (torch.tanh(0.5 * LATENTS) / (1 - slope)).sum())


@pytest.mark.parametrize("mode", [*map(Implicit, METHODS), Unroll(3, 0.5, checkpoint=True)], ids=str)
def test_an_object_that_changes_between_the_passes_warns(mode: Mode) -> None:
    class Step:
        v = LATENTS

        def __call__(self, u: Tensor) -> Tensor:
            return torch.tanh(a * u + self.v)

    a, T = torch.tensor(0.5, dtype=torch.float64, requires_grad=True), Step()
    z = mode.attach(T, LATENTS)
    T.v = 2 * LATENTS
    with pytest.warns(AdjointWarning, match="T gave another value in the backward pass"):
        z.sum().backward()


def test_a_value_written_to_after_a_checkpoint_is_no_change() -> None:
    """An S that begins with an in-place activation writes to T(z*), which is then not compared."""
    a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    z = Unroll(2, checkpoint=True).attach(lambda u: a * u - 0.1, LATENTS)
    z.relu_().sum().backward()
    u = LATENTS.detach()
    kept = (a * (a * u - 0.1) - 0.1 > 0).double()
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(a.grad, (kept * (2 * a * u - 0.1)).sum())


def test_a_checkpoint_whose_value_cannot_be_compared() -> None:
    """Found as errors: inference tensors count no writes, and fake tensors have no values."""
    with torch.inference_mode():
        constant = torch.ones(3, 6)
    v, mode = torch.ones(3, 6, requires_grad=True), Unroll(2, checkpoint=True)
    z, _ = mode.attach(lambda z: (0.5 * z[0] + v, constant), (torch.zeros(3, 6), torch.ones(3, 6)))
    torch.testing.assert_close(torch.autograd.grad(z.sum(), v)[0], torch.full((3, 6), 1.5))
    with FakeTensorMode():
        x = torch.ones(3, 6, requires_grad=True)
        mode.attach(lambda z: 0.5 * z + x, torch.zeros(3, 6)).sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_small_step_of_weights_that_a_function_closes_over_warns(dtype: torch.dtype) -> None:
    """Found silent: only a value that differed by one percent was noticed."""
    net = network(Cell, Implicit(GMRES())).to(dtype)
    v = net.Q(IMAGES.to(dtype)).detach()
    z = fixed_point(lambda u: net.R(u, v), torch.zeros_like(v), backward=net.backward)
    torch.optim.SGD([net.R.linear.weight], 1e-3).step(lambda: net.R(z.detach(), v).sum().backward())
    with pytest.warns(AdjointWarning, match="T gave another value in the backward pass"):
        torch.autograd.grad(z.sum(), net.R.linear.weight)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_an_energy_model_that_detaches_its_latent_warns(method: Any) -> None:
    """Found as a silent JFB: with T = dE/du at a copy of u, J is zero."""
    A = (0.15 * normal(6, 6, seed=3)).requires_grad_()

    def energy(u: Tensor) -> Tensor:
        return (torch.tanh(u @ A) * LATENTS).sum()

    def cut(u: Tensor) -> Tensor:
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            return torch.autograd.grad(energy(u), u, create_graph=True)[0]

    def gradient_of(T: Any, mode: Mode) -> Tensor:
        u = fixed_point(T, torch.zeros_like(LATENTS), tolerance=TIGHT, backward=mode)
        return torch.autograd.grad((u**2).sum(), A)[0]

    u = torch.zeros_like(LATENTS)
    for _ in range(200):
        u = (LATENTS * (1 - torch.tanh(u @ A) ** 2)) @ A.T
    wanted = torch.autograd.grad((u**2).sum(), A)[0]
    mode = Implicit(method, ADJOINT)
    torch.testing.assert_close(gradient_of(torch.func.grad(energy), mode), wanted)
    with pytest.warns(AdjointWarning, match=r"write torch.func.grad\(E\)\(z\)"):
        got = gradient_of(cut, mode)
    torch.testing.assert_close(got, gradient_of(cut, JFB()))
    assert (got - wanted).norm() > 1e-2 * wanted.norm()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_map_that_does_not_depend_on_its_latent_does_not_warn(method: Any) -> None:
    a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    for T in (lambda u: a + 0 * u, lambda u: a + torch.relu(u - 9), lambda u: (a + u).clamp(-1, 1) + a):
        z = fixed_point(T, torch.full_like(LATENTS, 7.0), backward=Implicit(method))
        assert torch.autograd.grad(z.sum(), a)[0] == z.numel()
    for flat in (torch.relu, torch.square):  # at 0, but not near it
        z = fixed_point(lambda u: flat(a * u), torch.zeros_like(LATENTS), backward=Implicit(method))  # noqa: B023
        assert not torch.autograd.grad(z.sum(), a)[0]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_gradient_of_an_entry_at_which_relu_is_zero_does_not_warn(method: Any) -> None:
    """Found as the advice not to detach z, since a product with J' was zero: every row of a Jacobian may be so."""
    A, v = (0.15 * normal(6, 6, seed=3)).requires_grad_(), LATENTS[:1]
    u = fixed_point(lambda u: torch.relu(u @ A + v), 0 * v, tolerance=TIGHT, backward=Implicit(method))
    (dead,) = (u[0] == 0).nonzero()[0]
    assert not torch.autograd.grad(u[0, dead], A)[0].any()


def test_what_is_not_read_again_may_change() -> None:
    with torch.inference_mode():
        x = LATENTS.clone()  # inference tensors do not count their versions
    a = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    closed(lambda z, v: torch.tanh(a * z) + v.clone(), x).sum().backward()
    x = LATENTS.clone()
    z = closed(lambda z, x: a * z + x, x, Implicit(tolerance=Tolerance(max_steps=0, check_every=0)))
    x.zero_()  # with no steps T is not evaluated again
    z.sum().backward()


@pytest.mark.parametrize("norm", [False, True])
def test_running_statistics_and_accumulated_gradients_are_no_change(norm: bool) -> None:
    net = network(lambda: Cell(norm), Implicit())
    weight = net.R.linear.weight
    losses = [net(x).square().sum() for x in (IMAGES, 2 * IMAGES)]
    for loss in (*losses, losses[0]):
        loss.backward(retain_graph=True)
    one, two = (torch.autograd.grad(loss, weight)[0] for loss in losses)
    torch.testing.assert_close(weight.grad, 2 * one + two)


# Parts of R that need care.


def lazy() -> nn.Module:
    cell = Cell()
    cell.linear = nn.LazyLinear(6, dtype=torch.float64)
    return cell


def test_weights_that_are_made_in_the_pass_are_no_change() -> None:
    check_exact(network(lazy, Implicit()))


def test_a_batch_norm_that_Q_and_R_share() -> None:
    net = network(lambda: Cell(norm=True), Neumann(60))
    net.Q = nn.Sequential(net.Q, net.R.norm)
    check_exact(net)


@pytest.mark.parametrize("mode", [JFB(), Neumann(2), Implicit()], ids=str)
def test_parametrised_weights_that_are_cached_get_their_gradient(mode: Mode) -> None:
    def make() -> nn.Module:
        cell = Cell()
        spectral_norm(cell.linear)  # in place
        return cell

    net = network(make, mode).eval()
    wanted = gradient(net)
    with parametrize.cached():
        torch.testing.assert_close(gradient(net), wanted)


class Recording(Cell):
    """Stores a tensor on itself, for a plot or another loss."""

    scale: Tensor | float = 1.0

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        value = self.scale * super().forward(u, v)
        self.last = value.detach()
        return value


@pytest.mark.parametrize("mode", [Implicit(m, ADJOINT) for m in METHODS], ids=str)
def test_a_network_that_stores_a_tensor_is_copied_after_the_backward_pass(mode: Mode) -> None:
    """It was left with a wrapper of torch.func, which copies and pickles refuse."""
    net = network(Recording, mode)
    check_exact(net)
    kept = copy.deepcopy(net).R.last
    torch.testing.assert_close(kept, net.latent(IMAGES)[0].detach())
    assert pickle.loads(pickle.dumps(net)).R.last.equal(net.R.last)


def test_an_attribute_of_a_transform_that_is_running_keeps_its_derivative() -> None:
    """A backward pass in between evaluates the module that holds it."""
    net = network(Recording, Implicit(GMRES(), ADJOINT))

    def loss(scale: Tensor) -> Tensor:
        net.R.scale = scale
        torch.func.vjp(net, IMAGES)[1](torch.ones(8, 2, dtype=torch.float64))
        return net(IMAGES).sum()

    point, h = torch.tensor(0.8, dtype=torch.float64), 1e-5
    wanted = (loss(point + h) - loss(point - h)) / (2 * h)
    torch.testing.assert_close(torch.func.grad(loss)(point), wanted.detach(), rtol=1e-6, atol=0)
