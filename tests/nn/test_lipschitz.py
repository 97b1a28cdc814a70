"""Lipschitz: the bound against dense singular values, the gradient, the direction and its updates, copies."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import ImplicitNetwork
from banach.nn import Lipschitz, operator_norm
from banach.nn.passes import Pass
from nn.parts_nn import MODES, close, gradients, largest, matrix, network, normal, same, state


def linear(bound: float = 1.0, scale: float = 4.0, steps: int = 1) -> Lipschitz:
    torch.manual_seed(5)
    layer = nn.Linear(6, 6).double()
    with torch.no_grad():
        layer.weight.mul_(scale)
    return Lipschitz(layer, bound, steps=steps)


def conv(bound: float = 1.0, **options: Any) -> Lipschitz:
    torch.manual_seed(6)
    layer = nn.Conv2d(3, 4, 3, **options).double()
    with torch.no_grad():
        layer.weight.mul_(4)
    return Lipschitz(layer, bound, size=(6, 5))


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "zeros": {"padding": 1},
    "stride": {"stride": 2, "padding": 1},
    "dilation": {"dilation": 2, "padding": "same"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "reflect": {"padding": 2, "padding_mode": "reflect"},
}


@pytest.mark.parametrize("bound", [0.3, 1.0, 2.5])
def test_a_linear_layer_above_its_bound_is_scaled_to_it(bound: float) -> None:
    layer = linear(bound)
    before = largest(layer.layer.weight)
    assert before > bound
    assert largest(matrix(layer.eval(), 6)) == pytest.approx(bound, rel=1e-9)
    assert float(layer.norm().detach()) == pytest.approx(before, rel=1e-9)
    x = normal(3, 6)
    expected = x @ layer.layer.weight.T * bound / before + _bias(layer)
    assert torch.allclose(layer(x), expected, rtol=1e-9)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_a_convolution_is_scaled_to_its_bound_on_its_grid(case: str) -> None:
    layer = conv(0.7, **CONVOLUTIONS[case])
    assert largest(matrix(layer.layer, 3, 6, 5)) > 0.7
    assert largest(matrix(layer.eval(), 3, 6, 5)) == pytest.approx(0.7, rel=1e-9)
    assert largest(matrix(layer.train(), 3, 6, 5)) == pytest.approx(0.7, rel=1e-9)


def test_a_layer_below_its_bound_is_left_alone() -> None:
    layer = linear(bound=50.0)
    x = normal(3, 6)
    assert torch.equal(layer(x), layer.layer(x))
    weight = layer.layer.weight
    (got,) = torch.autograd.grad(layer(x).sin().sum(), weight)
    (plain,) = torch.autograd.grad(layer.layer(x).sin().sum(), weight)
    assert torch.equal(got, plain)


@pytest.mark.parametrize("case", ["linear", *CONVOLUTIONS])
def test_the_gradient_is_that_of_the_dense_formula(case: str) -> None:
    layer = (linear() if case == "linear" else conv(**CONVOLUTIONS[case])).eval()
    shape = layer.operator.shape[1:]
    inner, x = layer.layer, normal(2, *shape)
    weight, zeros = inner.weight, torch.zeros_like(_bias(layer).flatten())

    def bare(y: Tensor) -> Tensor:
        return torch.func.functional_call(inner, {"weight": weight, "bias": zeros}, (y,))

    norm = torch.linalg.svdvals(matrix(bare, *shape))[0]  # through autograd, unlike `largest`
    (expected,) = torch.autograd.grad((bare(x) / norm).sin().sum(), weight)
    (got,) = torch.autograd.grad((layer(x) - _bias(layer)).sin().sum(), weight)
    assert torch.allclose(got, expected, rtol=0, atol=1e-8 * float(expected.abs().max()))


def _bias(layer: Lipschitz) -> Tensor:
    assert layer.layer.bias is not None
    bias = layer.layer.bias.detach()
    return bias if isinstance(layer.layer, nn.Linear) else bias[:, None, None]


def test_a_new_layer_knows_its_norm_and_making_it_draws_nothing() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        inner = nn.Conv2d(8, 8, 3, padding=1).double()
        before = torch.get_rng_state()
        layer = Lipschitz(inner, 0.5, size=8)
        assert torch.equal(torch.get_rng_state(), before)
        assert float(layer.norm().detach()) == pytest.approx(largest(matrix(inner, 8, 8, 8)), rel=1e-3)
        assert torch.equal(Lipschitz(inner, 0.5, size=8).direction, layer.direction)


def test_train_mode_follows_moving_weights_and_refine_catches_up() -> None:
    layer = linear(steps=2)
    with torch.no_grad():
        layer.layer.weight.copy_(normal(6, 6, seed=9))
    exact = largest(layer.layer.weight)
    assert float(layer.norm().detach()) < 0.95 * exact  # it does not know yet
    lost = copy.deepcopy(layer)
    for _ in range(100):
        layer(normal(1, 6))
    assert float(layer.norm().detach()) == pytest.approx(exact, rel=1e-6)
    assert float(lost.refine().norm().detach()) == pytest.approx(exact, rel=1e-9)


def test_each_call_takes_the_power_steps_asked_for_and_eval_takes_none() -> None:
    layer = linear(steps=3)
    start = normal(1, 6, seed=4)
    layer.direction.copy_(start / start.norm())
    layer(normal(2, 6))
    W = layer.layer.weight.detach()
    x = torch.linalg.matrix_power(W.T @ W, 3) @ start[0]
    assert torch.allclose(layer.direction[0], x / x.norm(), atol=1e-12)
    kept = state(layer)
    at_rest = W / max(1.0, float((W @ layer.direction[0]).norm()))
    assert torch.allclose(layer.eval()(normal(2, 6)), normal(2, 6) @ at_rest.T + _bias(layer), atol=1e-12)
    layer.train().steps = 0
    layer(normal(2, 6))
    assert same(state(layer), kept)


class Bounded(nn.Module):
    """R(u, v) = 0.8 tanh(A u) + v with |A| <= 1."""

    def __init__(self, steps: int = 1) -> None:
        super().__init__()
        self.affine = linear(steps=steps)
        start = normal(1, 6, seed=4)  # far from the leading direction, so that a step shows
        self.affine.direction.copy_(start / start.norm())

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.8 * torch.tanh(self.affine(u)) + v


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_one_update_per_pass_and_one_map_in_it(mode: str, grad: bool) -> None:
    net = network(Bounded(), backward=MODES[mode])
    W = net.R.affine.layer.weight.detach()
    with torch.set_grad_enabled(grad):
        u, found = net.latent(normal(5, 4))
    assert bool(found.converged.all())  # a map whose weight moved at every step would not settle at 1e-13
    x = W.T @ W @ normal(1, 6, seed=4)[0]
    x = x / x.norm()
    assert torch.allclose(net.R.affine.direction[0], x, atol=1e-12)
    scaled = W / max(1.0, float((W @ x).norm()))
    v = net.Q(normal(5, 4)).detach()
    expected = 0.8 * torch.tanh(u.detach() @ scaled.T + net.R.affine.layer.bias.detach()) + v
    assert torch.allclose(u.detach(), expected, atol=1e-11)
    if grad:
        kept = state(net)
        u.square().sum().backward()
        assert same(state(net), kept)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_in_a_pass_are_those_of_the_scaled_weight(mode: str) -> None:
    net = network(Bounded(steps=0).eval(), backward=MODES[mode])
    x = net.R.affine.direction[0]
    got = gradients(net, net(normal(5, 4)).square().sum())

    def R(u: Tensor, v: Tensor) -> Tensor:
        W, b = net.R.affine.layer.weight, net.R.affine.layer.bias
        return 0.8 * torch.tanh(u @ (W / (W @ x).norm().clamp(min=1)).T + b) + v

    plain = ImplicitNetwork(net.Q, R, net.S, tolerance=net.tolerance, backward=MODES[mode])
    loss = plain(normal(5, 4)).square().sum()
    named = dict(net.named_parameters())
    expected = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    assert close(got, expected, atol=1e-9)


def test_what_was_scaled_is_used_for_that_weight_only() -> None:
    other = {"layer.weight": normal(6, 6, seed=2)}

    class Two(Bounded):
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return self.affine(u) + 2 * torch.func.functional_call(self.affine, other, (v,))

    R, u, v = Two(steps=0), normal(3, 6), normal(3, 6, seed=1)
    expected = R(u, v)
    with torch.no_grad(), Pass(R) as one:
        assert torch.allclose(one.evaluate(u, v), expected, atol=1e-13)


def test_copies_and_state() -> None:
    net = network(Bounded())
    x = normal(5, 4)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert torch.equal(net(x), twin(x))
    assert same(state(net), state(twin))
    assert twin.R.affine.layer.weight is not net.R.affine.layer.weight
    other = linear(scale=1.0)
    with torch.no_grad():
        other.layer.weight.copy_(normal(6, 6, seed=8))
    other.load_state_dict(net.R.affine.state_dict())
    assert torch.equal(other.eval()(normal(2, 6)), net.R.affine.eval()(normal(2, 6)))
    assert list(other.state_dict()) == ["direction", "layer.weight", "layer.bias"]


def test_a_dead_weight_does_not_lose_the_direction() -> None:
    layer = linear()
    good = layer.layer.weight.detach().clone()
    for bad in (torch.zeros_like(good), torch.full_like(good, torch.nan), torch.full_like(good, torch.inf)):
        with torch.no_grad():
            layer.layer.weight.copy_(bad)
        layer(normal(2, 6))
        assert torch.isfinite(layer.direction).all()
        assert float(layer.direction.norm()) == pytest.approx(1.0)
    with torch.no_grad():
        layer.layer.weight.copy_(good)
    assert largest(matrix(layer.eval(), 6)) == pytest.approx(1.0, rel=1e-6)


def test_half_precision_and_autocast_measure_in_float32() -> None:
    torch.manual_seed(5)
    inner = nn.Linear(40, 40)
    nn.init.normal_(inner.weight)
    layer = Lipschitz(inner, 1.0).eval()
    exact = largest(inner.weight.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert float(layer.norm().detach()) == pytest.approx(exact, rel=1e-5)
        assert layer(torch.randn(3, 40)).dtype is torch.bfloat16
        made = Lipschitz(inner, 1.0)
        assert float(operator_norm(inner)) == pytest.approx(exact, rel=1e-5)
    assert float(made.norm().detach()) == pytest.approx(exact, rel=1e-5)
    half = copy.deepcopy(layer).bfloat16()
    assert half.norm().dtype is torch.float32
    assert float(half.norm().detach()) == pytest.approx(largest(half.layer.weight.double()), rel=2e-5)
    assert half.train()(torch.randn(3, 40).bfloat16()).dtype is torch.bfloat16
    assert half.direction.dtype is torch.bfloat16


def test_bad_input_gets_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"bounded on a grid of size=\(6, 5\), got one of \(6, 6\)"):
        conv(padding=1)(normal(2, 3, 6, 6))
    for bound in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="bound must be above 0 and finite"):
            Lipschitz(nn.Linear(2, 2), bound)
    with pytest.raises(ValueError, match=r"steps must be a whole number of at least 0, got 0\.5"):
        Lipschitz(nn.Linear(2, 2), steps=0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got BatchNorm1d"):
        Lipschitz(nn.BatchNorm1d(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give size with 2 numbers"):
        Lipschitz(nn.Conv2d(1, 1, 3))
