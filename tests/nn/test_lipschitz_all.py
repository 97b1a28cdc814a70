"""lipschitz_: every linear layer and convolution of a module, against dense singular values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from banach import ImplicitNetwork, Tolerance
from banach.nn import Lipschitz, lipschitz_
from nn.parts_nn import largest, matrix, normal, same, state


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


def block() -> Any:
    return Block().double()


@pytest.mark.parametrize("bound", [0.5, 1.3])
def test_every_layer_is_within_the_bound_and_so_is_their_product(bound: float) -> None:
    net = block()
    assert lipschitz_(net, bound, example=normal(1, 2, 4, 4)) is net
    grids = {"shared": (2, 4, 4), "inner.0": (2, 4, 4), "heads.a": (12,), "heads.b": (4,)}
    for name, grid in grids.items():
        layer = net.get_submodule(name)
        assert isinstance(layer, Lipschitz), name
        assert largest(matrix(layer.eval(), *grid)) == pytest.approx(bound, rel=1e-6)
    x = normal(20, 2, 4, 4)
    J = torch.stack([torch.autograd.functional.jacobian(lambda d: net(d[None])[0].flatten(), one) for one in x])
    sigma = torch.linalg.svdvals(J.flatten(2))[:, 0]
    assert float(sigma.max()) <= bound**5 * (1 + 1e-6)  # five layers, activations of slope one
    y, other = net(x), net(x.roll(1, 0))
    moved = (y - other).norm(dim=1) / (x - x.roll(1, 0)).flatten(1).norm(dim=1)
    assert float(moved.max().detach()) <= bound**5 * (1 + 1e-6)


def test_shared_layers_stay_shared_and_parameters_are_the_same_objects() -> None:
    net = block()
    before = list(net.parameters())
    lipschitz_(net, 0.9, example=normal(1, 2, 4, 4))
    assert net.shared is net.again
    assert {id(p) for p in net.parameters()} == {id(p) for p in before}
    made = [m for m in net.modules() if isinstance(m, Lipschitz)]
    assert len(made) == 4
    part = nn.Sequential(nn.Linear(4, 4))
    twice = lipschitz_(nn.Sequential(part, nn.ReLU(), part), 0.9)
    assert sum(isinstance(m, Lipschitz) for m in twice.modules()) == 1


def test_the_root_may_be_a_layer_and_modes_are_kept() -> None:
    found = lipschitz_(nn.Linear(4, 4).eval(), 0.5)
    assert isinstance(found, Lipschitz)
    assert not found.training
    assert isinstance(lipschitz_(nn.Conv1d(2, 2, 3), 0.5, size=7), Lipschitz)
    assert lipschitz_(found, 0.1) is found
    empty = nn.Sequential(nn.ReLU())
    assert lipschitz_(empty, 1.0) is empty


def test_an_example_leaves_no_trace() -> None:
    net: Any = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5)).double()
    net[2].eval()
    kept, generator = state(net), torch.get_rng_state()
    lipschitz_(net, 0.9, example=normal(2, 1, 5, 5))
    assert same({k: v for k, v in state(net).items() if "direction" not in k}, kept)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [part.training for part in net] == [True, True, False]
    assert not net[0].layer._forward_pre_hooks


def test_several_inputs_and_a_lazy_layer() -> None:
    class R(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u, self.v = nn.Linear(6, 6).double(), nn.LazyLinear(6, dtype=torch.float64)

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return torch.tanh(0.9 * self.u(u) + self.v(v))

    with pytest.raises(TypeError, match=r"v \(LazyLinear without a weight yet: give example=\)"):
        lipschitz_(R(), 1.0)
    net = ImplicitNetwork(nn.Linear(4, 6).double(), R(), nn.Identity(), tolerance=Tolerance(max_steps=200))
    lipschitz_(net.R, 1.0, example=(normal(1, 6), normal(1, 6)))
    assert isinstance(net.R.v, Lipschitz)
    found = net(normal(5, 4), solution=True)[1]
    assert bool(found.converged.all())
    assert int(found.steps.max()) < 100  # a contraction by 0.9 at the worst


def test_parametrized_layers_are_bounded_after_their_parametrization() -> None:
    class Twice(nn.Module):
        def forward(self, W: Tensor) -> Tensor:
            return 2 * W

    layer: Any = nn.Linear(5, 5).double()
    nn.init.orthogonal_(layer.weight)
    parametrize.register_parametrization(layer, "weight", Twice())
    net = lipschitz_(nn.Sequential(layer), 1.5)
    assert largest(matrix(net.eval(), 5)) == pytest.approx(1.5, rel=1e-9)
    x = normal(3, 5)
    (got,) = torch.autograd.grad(net(x).square().sum(), layer.parametrizations.weight.original)
    # 2 W / max(1, |2 W| / 1.5) + b, written out
    W = layer.parametrizations.weight.original.detach().clone().requires_grad_()
    direction = net[0].direction[0]  # type: ignore[index]
    dense = 2 * W * 1.5 / (2 * W @ direction).norm()  # all singular values are equal: the norm has no gradient
    (expected,) = torch.autograd.grad((x @ dense.T + layer.bias.detach()).square().sum(), W)
    assert torch.allclose(got, expected, rtol=0, atol=1e-10)
    smooth = parametrizations.spectral_norm(nn.Linear(5, 5).double())
    bounded = lipschitz_(nn.Sequential(smooth), 0.5).eval()
    assert largest(matrix(bounded, 5)) <= 0.5 * (1 + 1e-9)


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def hooked() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(nn.Linear(4, 4))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "transposed": (lambda: nn.ConvTranspose2d(1, 1, 3), "ConvTranspose2d"),
    "attention": (lambda: nn.MultiheadAttention(4, 2), "MultiheadAttention"),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8), r"part\.self_attn \(MultiheadAttention\)"),
    "recurrent": (lambda: nn.LSTM(4, 4), "LSTM"),
    "own forward": (lambda: Own(4, 4), "Own"),
    "hooks": (hooked, "Linear with forward hooks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_bounded_is_named_and_nothing_is_replaced(case: str) -> None:
    make, said = REFUSED[case]
    net = nn.ModuleDict({"fine": nn.Linear(4, 4), "part": make(), "other": nn.Bilinear(2, 2, 2)})
    with pytest.raises(
        TypeError, match=rf"expected nn.Linear .* got .*{said}.*, other \(Bilinear\); replace them"
    ):
        lipschitz_(net, 1.0)
    assert type(net["fine"]) is nn.Linear


def test_grids_that_are_missing_or_differ_are_refused() -> None:
    conv = nn.Conv2d(1, 1, 3)
    with pytest.raises(ValueError, match=r"expected one for 1, got no input; give example="):
        lipschitz_(nn.Sequential(nn.Linear(2, 2), conv), 1.0)
    twice = nn.Sequential(conv, nn.ReLU(), conv)
    with pytest.raises(ValueError, match=r"expected one for 0, got \(4, 4\) and \(6, 6\)"):
        lipschitz_(twice, 1.0, example=torch.zeros(1, 1, 6, 6))
    with pytest.raises(ValueError, match="expected one for the module, got no input"):
        lipschitz_(conv)
    with pytest.raises(ValueError, match="expected example or size, got both"):
        lipschitz_(conv, example=torch.zeros(1, 1, 6, 6), size=6)
    with pytest.raises(ValueError, match="bound must be above 0"):
        lipschitz_(nn.Linear(2, 2), -1.0)
    assert type(twice[0]) is nn.Conv2d
