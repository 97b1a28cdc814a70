"""operator_norm, Lipschitz and lipschitz_: against singular values of dense matrices, built from unit vectors."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from banach import Implicit, ImplicitNetwork
from banach.data import load
from banach.nn import Lipschitz, lipschitz_, operator_norm
from banach.nn.lipschitz import KEPT, gram_schmidt
from nn.parts_nn import MODES, close, gradients, largest, matrix, network, normal, same, state

CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(9, 14), (9,)),
    "no padding": (lambda: nn.Conv2d(3, 5, 3), (3, 6, 7)),
    "more zeros than kernel": (lambda: nn.Conv2d(2, 2, 2, padding=3), (2, 4, 4)),
    "same": (lambda: nn.Conv2d(3, 3, (3, 5), padding="same", dilation=(2, 1)), (3, 7, 6)),
    "stride": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 8, 7)),
    "groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, padding=1, stride=(1, 2)), (4, 6, 6)),
    "circular wide": (lambda: nn.Conv2d(2, 2, 3, padding=4, dilation=2, padding_mode="circular"), (2, 4, 5)),
    "reflect": (lambda: nn.Conv2d(3, 3, 3, padding=(2, 1), stride=2, padding_mode="reflect"), (3, 6, 5)),
    "replicate": (lambda: nn.Conv2d(3, 3, 5, padding=(2, 3), padding_mode="replicate"), (3, 5, 4)),
    "one axis": (lambda: nn.Conv1d(3, 4, 5, stride=2, padding=2), (3, 11)),
    "three axes": (lambda: nn.Conv3d(2, 3, 3, padding=1, padding_mode="circular"), (2, 3, 4, 4)),
}


def test_the_default_device_of_the_user_does_not_matter() -> None:
    layer = nn.Linear(4, 3)
    expected = operator_norm(layer)
    with torch.device("meta"):  # stands for torch.set_default_device("cuda")
        torch.testing.assert_close(operator_norm(layer), expected)
        assert Lipschitz(layer).directions.is_cpu
        assert Lipschitz(nn.Linear(4, 3)).directions.is_meta


@pytest.mark.parametrize("case", CASES)
def test_the_norm_the_bound_and_the_gradient_are_those_of_the_matrix(case: str) -> None:
    torch.manual_seed(3)
    make, shape = CASES[case]
    inner = make().double()
    size, weight = shape[1:] or None, inner.weight
    bias = inner.bias.detach().view(-1, *[1] * (len(shape) - 1))
    norm = torch.linalg.svdvals(matrix(inner, *shape))[0]  # through autograd, unlike `largest`
    assert float(operator_norm(inner, size)) == pytest.approx(float(norm.detach()), rel=1e-9)
    layer = Lipschitz(inner, 0.2, size=size)
    assert float(norm.detach()) > 0.2
    for training in (False, True):
        assert largest(matrix(layer.train(training), *shape)) == pytest.approx(0.2, rel=1e-9)
    x = normal(2, *shape)
    (expected,) = torch.autograd.grad(((inner(x) - inner.bias.view_as(bias)) * 0.2 / norm).sin().sum(), weight)
    (got,) = torch.autograd.grad((layer.eval()(x) - bias).sin().sum(), weight)
    assert torch.allclose(got, expected, rtol=0, atol=1e-8 * float(expected.abs().max()))


def test_values_that_crowd_at_the_top() -> None:
    """A box blur on 32 x 32 pixels: closed form, and a gap of one in a hundred below the top."""
    layer = nn.Conv2d(1, 1, 3, padding=1)
    nn.init.constant_(layer.weight, 1 / 9)
    exact = ((1 + 2 * math.cos(math.pi / 33)) / 3) ** 2
    assert float(operator_norm(layer, 32)) == pytest.approx(exact, rel=1e-6)


def test_measuring_and_making_draw_nothing() -> None:
    layer = nn.Conv2d(8, 8, 3, padding=1).double()
    before = torch.get_rng_state()
    norm, made = operator_norm(layer, 8), Lipschitz(layer, 0.5, size=8)
    assert torch.equal(torch.get_rng_state(), before)
    assert float(made.norm().detach()) == pytest.approx(float(norm), rel=1e-6)


def test_corners() -> None:
    zero = nn.Linear(4, 3)
    nn.init.zeros_(zero.weight)
    assert float(operator_norm(zero)) == 0.0
    for scale in (1e30, 1e20, 1e15, 1e-15, 1e-30):  # whose squares or fourth powers are no numbers of float32
        layer = nn.Linear(6, 6)
        exact = largest(layer.weight.double()) * scale
        with torch.no_grad():
            layer.weight.mul_(scale)
        assert float(operator_norm(layer)) == pytest.approx(exact, rel=1e-5)
        bounded = Lipschitz(layer)
        for _ in range(3):
            x = normal(2, 6).float()
            W = layer.weight.detach().double() / max(exact, 1.0)
            assert torch.allclose((bounded(x) - layer.bias).double(), x.double() @ W.T, atol=1e-5)
            assert float(bounded.norm().detach()) == pytest.approx(exact, rel=1e-5)


def linear(bound: float = 1.0, scale: float = 4.0, steps: int = 1) -> Lipschitz:
    torch.manual_seed(5)
    layer = nn.Linear(6, 6).double()
    with torch.no_grad():
        layer.weight.mul_(scale)
    return Lipschitz(layer, bound, steps=steps)


def test_a_layer_below_its_bound_is_left_alone() -> None:
    layer, x = linear(bound=50.0), normal(3, 6)
    assert torch.equal(layer(x), layer.layer(x))
    (got,) = torch.autograd.grad(layer(x).sin().sum(), layer.layer.weight)
    assert torch.equal(got, torch.autograd.grad(layer.layer(x).sin().sum(), layer.layer.weight)[0])


def test_train_mode_follows_moving_weights_and_refine_catches_up() -> None:
    torch.manual_seed(5)
    layer = Lipschitz(nn.Linear(60, 60).double(), steps=2)
    with torch.no_grad():
        layer.layer.weight.copy_(normal(60, 60, seed=9))
    exact = largest(layer.layer.weight)
    assert float(layer.norm().detach()) < 0.95 * exact  # it does not know yet
    lost = copy.deepcopy(layer)
    for _ in range(200):
        layer(normal(1, 60))
    assert float(layer.norm().detach()) == pytest.approx(exact, rel=1e-6)
    assert float(lost.refine().norm().detach()) == pytest.approx(exact, rel=1e-9)


def test_directions_are_orthonormal_also_where_they_were_nearly_the_same() -> None:
    """As a GPU computes them, in float32."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 40, generator=draw) + 1e-3 * torch.randn(8, 40, generator=draw)
    found = gram_schmidt(rows.view(8, 4, 10)).flatten(1)
    assert torch.allclose(found @ found.T, torch.eye(8), atol=1e-5)
    reduced = torch.linalg.qr(rows.double().T)[0].T
    assert torch.allclose((found.double() @ reduced.T).square().sum(1), torch.ones(8).double(), atol=1e-4)


class Tanh(nn.Module):
    """R(u, v) = tanh(A u + v) with |A| <= 0.8."""

    def __init__(self, inner: Any, size: int | None) -> None:
        super().__init__()
        self.affine = Lipschitz(inner, 0.8, size=size)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(self.affine(u) + v)


@pytest.mark.parametrize("size", [None, 8])
def test_a_network_contracts_while_adam_moves_its_weights(size: int | None) -> None:
    """A bound of 0.8 became more than 1 here when one direction alone was followed: others overtook it."""
    digits = load("digits")
    torch.manual_seed(0)
    if size is None:
        parts: tuple[Any, ...] = nn.Linear(64, 100), Tanh(nn.Linear(100, 100), None), nn.Linear(100, 10)
    else:
        Q, S = nn.Conv2d(1, 8, 3, padding=1), nn.Sequential(nn.Flatten(), nn.Linear(512, 10))
        parts = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), Q), Tanh(nn.Conv2d(8, 8, 3, padding=1), size), S
    net = ImplicitNetwork(*parts)
    layer, optimizer = parts[1].affine, torch.optim.Adam(net.parameters(), lr=1e-2)
    for batch in torch.arange(1200).split(100):
        x = digits.pixels[batch].flatten(1) / 255
        loss = nn.functional.cross_entropy(net(x), digits.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        scale = max(float(layer.norm().detach()) / 0.8, 1.0)  # that of this pass
        assert float(operator_norm(layer.layer, size)) / scale < 0.95
        optimizer.step()


class Bounded(nn.Module):
    """R(u, v) = 0.8 tanh(A u) + v with |A| <= 1."""

    def __init__(self, steps: int = 1) -> None:
        super().__init__()
        self.affine = linear(steps=steps)
        start = normal(1, 6, seed=4)  # far from the leading direction, so that a step shows
        self.affine.directions = start / start.norm()  # one alone: six would span the space

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.8 * torch.tanh(self.affine(u)) + v


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_one_update_per_pass_and_one_map_in_it(mode: str, grad: bool) -> None:
    """Values and gradients are those of the weight scaled at the direction after one step, which is a constant."""
    net, d = network(Bounded(), backward=MODES[mode]), normal(5, 4)
    W, b = net.R.affine.layer.weight, net.R.affine.layer.bias
    start = normal(1, 6, seed=4)[0]
    x = W.detach().T @ W.detach() @ start
    x = x / x.norm() + KEPT * start / start.norm()
    x = x / x.norm()

    def R(u: Tensor, v: Tensor) -> Tensor:
        return 0.8 * torch.tanh(u @ (W / (W @ x).norm().clamp(min=1)).T + b) + v

    plain = ImplicitNetwork(net.Q, R, net.S, tolerance=net.tolerance, backward=MODES[mode])
    with torch.set_grad_enabled(grad):
        y, found = net(d, solution=True)
        expected = plain(d)
    assert bool(found.converged.all())  # a map whose weight moved at every step would not settle at 1e-13
    assert torch.allclose(net.R.affine.directions[0].abs(), x.abs(), atol=1e-12)
    assert torch.allclose(y, expected, atol=1e-11)
    if grad:
        kept = state(net)
        assert close(gradients(net, y.square().sum()), gradients(net, expected.square().sum()), atol=1e-9)
        assert same(state(net), kept)


def test_what_was_scaled_in_a_pass_is_used_for_that_weight_only() -> None:
    other = {"layer.weight": normal(6, 6, seed=2)}

    class Two(Bounded):
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return 0.1 * self.affine(u) + 2 * torch.func.functional_call(self.affine, other, (v,))

    net = network(Two(steps=0))
    with torch.no_grad():
        u, v = net.latent(normal(3, 4))[0], net.Q(normal(3, 4))
        assert torch.allclose(net.R(u, v), u, atol=1e-11)


def test_a_dead_weight_does_not_lose_the_direction() -> None:
    layer = linear()
    good = layer.layer.weight.detach().clone()
    for bad in (torch.zeros_like(good), torch.full_like(good, torch.nan), torch.full_like(good, torch.inf)):
        with torch.no_grad():
            layer.layer.weight.copy_(bad)
        layer(normal(2, 6))
        assert torch.allclose(layer.directions @ layer.directions.T, torch.eye(6).double())
    with torch.no_grad():
        layer.layer.weight.copy_(good)
    assert largest(matrix(layer.eval(), 6)) == pytest.approx(1.0, rel=1e-6)


def test_half_precision_and_autocast_measure_in_float32() -> None:
    torch.manual_seed(5)
    inner = nn.Linear(40, 40)
    nn.init.normal_(inner.weight)
    exact = largest(inner.weight.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer = Lipschitz(inner, 1.0).eval()
        assert float(layer.norm().detach()) == pytest.approx(exact, rel=1e-5)
        assert float(operator_norm(inner)) == pytest.approx(exact, rel=1e-5)
        assert layer(torch.randn(3, 40)).dtype is torch.bfloat16
    half = copy.deepcopy(layer).bfloat16()
    assert half.norm().dtype is torch.float32
    assert float(half.norm().detach()) == pytest.approx(largest(half.layer.weight.double()), rel=2e-5)
    assert half.train()(torch.randn(3, 40).bfloat16()).dtype is half.directions.dtype is torch.bfloat16


# lipschitz_: every linear layer and convolution of a module.


class Block(nn.Module):
    """A small convolutional net with a nested, strided and shared layer, whose weights are large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.shared = nn.Conv2d(2, 2, 3, padding=1)
        self.inner = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU())
        self.heads = nn.ModuleDict({"a": nn.Linear(12, 4), "b": nn.Linear(4, 4, bias=False)})
        self.again = self.shared
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.again(torch.relu(self.shared(x))))
        return self.heads["b"](torch.sin(self.heads["a"](self.inner(x).flatten(1))))


def test_every_layer_is_within_the_bound_and_so_is_their_product() -> None:
    net, bound = Block().double(), 1.3
    before = {id(p) for p in net.parameters()}
    assert lipschitz_(net, bound, example=normal(1, 2, 4, 4)) is net
    assert {id(p) for p in net.parameters()} == before
    assert net.shared is net.again
    assert sum(isinstance(m, Lipschitz) for m in net.modules()) == 4
    grids = {"shared": (2, 4, 4), "inner.0": (2, 4, 4), "heads.a": (12,), "heads.b": (4,)}
    for name, grid in grids.items():
        assert largest(matrix(net.get_submodule(name).eval(), *grid)) == pytest.approx(bound, rel=1e-6)
    x = normal(20, 2, 4, 4)
    J = torch.stack([torch.autograd.functional.jacobian(lambda d: net(d[None])[0].flatten(), one) for one in x])
    sigma = torch.linalg.svdvals(J.flatten(2))[:, 0]
    assert float(sigma.max()) <= bound**5 * (1 + 1e-6)  # five layers, activations of slope one


def test_shared_parts_a_root_that_is_a_layer_and_layers_that_are_bounded() -> None:
    part = nn.Sequential(nn.Linear(4, 4))
    twice = lipschitz_(nn.Sequential(part, nn.ReLU(), part), 0.9)
    assert sum(isinstance(m, Lipschitz) for m in twice.modules()) == 1
    found = lipschitz_(nn.Conv1d(2, 2, 3).eval(), 0.5, example=torch.zeros(1, 2, 7))
    assert isinstance(found, Lipschitz)
    assert not found.training
    assert lipschitz_(found, 0.1) is found
    layer = nn.Linear(4, 4)  # bounded already, and also used by itself
    net = lipschitz_(nn.Sequential(Lipschitz(layer, 0.3), layer), 0.5)
    assert [part.bound for part in net.children() if isinstance(part, Lipschitz)] == [0.3, 0.5]


def test_an_example_leaves_no_trace() -> None:
    net: Any = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5)).double()
    net[2].eval()
    kept, generator = state(net), torch.get_rng_state()
    lipschitz_(net, 0.9, example=normal(2, 1, 5, 5))
    assert same({k: v for k, v in state(net).items() if "directions" not in k}, kept)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [part.training for part in net] == [True, True, False]
    assert not net[0].layer._forward_pre_hooks


def test_parametrized_layers_are_bounded_after_their_parametrization() -> None:
    class Twice(nn.Module):
        def forward(self, W: Tensor) -> Tensor:
            return 2 * W

    layer: Any = nn.Linear(5, 5).double()
    nn.init.orthogonal_(layer.weight)
    parametrize.register_parametrization(layer, "weight", Twice())
    net: Any = lipschitz_(nn.Sequential(layer), 1.5)
    assert largest(matrix(net.eval(), 5)) == pytest.approx(1.5, rel=1e-9)
    net(normal(3, 5)).square().sum().backward()
    assert float(layer.parametrizations.weight.original.grad.abs().max()) > 0


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda *_: None)
    return layer


def test_what_cannot_be_bounded_is_named_and_nothing_is_replaced() -> None:
    others = {"a": nn.ConvTranspose2d(1, 1, 3), "b": nn.TransformerEncoderLayer(4, 2, 8), "c": nn.LSTM(4, 4)}
    net = nn.ModuleDict({"fine": nn.Linear(4, 4), **others, "d": Own(4, 4), "e": hooked()})
    named = r"a \(ConvTranspose2d\), b\.self_attn \(MultiheadAttention\), .*c \(LSTM\), d \(Own\), "
    with pytest.raises(TypeError, match=rf"expected nn.Linear .*{named}e \(Linear with forward hooks\); replace"):
        lipschitz_(net, 1.0)
    assert type(net["fine"]) is nn.Linear


CONV = nn.Conv2d(1, 1, 3)
IMAGE = torch.zeros(1, 1, 6, 6)
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: lipschitz_(nn.Sequential(nn.Linear(2, 2), CONV)), ValueError, "expected one for 1, got no input"),
    (
        lambda: lipschitz_(nn.Sequential(CONV, nn.ReLU(), CONV), example=IMAGE),
        ValueError,
        r"expected one for 0, got \(4, 4\) and \(6, 6\)",
    ),
    (lambda: Lipschitz(CONV, size=(6, 5))(IMAGE), ValueError, r"a grid of size=\(6, 5\), .*, got \(6, 6\)"),
    (lambda: Lipschitz(nn.Linear(2, 2), 0.0), ValueError, "bound must be above 0 and finite, got 0.0"),
    (lambda: Lipschitz(nn.Linear(2, 2), steps=0.5), ValueError, "steps must be .* at least 0, got 0.5"),  # type: ignore[arg-type]
    (lambda: Lipschitz(nn.BatchNorm1d(2)), TypeError, "2d or 3d, got BatchNorm1d"),  # type: ignore[arg-type]
    (lambda: operator_norm(nn.LSTM(2, 2)), TypeError, "2d or 3d, got LSTM"),  # type: ignore[arg-type]
    (lambda: operator_norm(CONV), ValueError, "give size with 2 numbers, got None"),
    (lambda: operator_norm(nn.Linear(2, 2), 4), ValueError, "a linear layer has no spatial size, got size=4"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD)
def test_bad_input_gets_one_sentence(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_a_layer_of_two_names_keeps_its_own_directions_after_an_implicit_pass() -> None:
    """functional_call left its copies in the layer, a tensor of torch.func, when it tied them to both names."""
    R = Bounded()
    R.again = R.affine
    own = R.affine.directions
    net = ImplicitNetwork(nn.Linear(4, 6).double(), R, nn.Identity(), backward=Implicit())
    net(normal(5, 4)).sum().backward()
    assert R.affine.directions is own
