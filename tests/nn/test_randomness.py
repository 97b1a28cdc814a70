"""What changes R between two evaluations is refused with advice; convert_dropout exchanges what it can."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import banach
from banach import Tolerance
from banach.nn import convert_dropout
from nn.parts_nn import network, normal


class Around(nn.Module):
    """R(u, v) = 0.3 inner(u) + v."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner.double() if isinstance(inner, nn.Module) else inner

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.3 * self.inner(u) + v


class Attention(nn.Module):
    def __init__(self, dropout: float, kind: Any = nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = kind(6, 2, dropout=dropout, batch_first=True)

    def forward(self, u: Tensor) -> Tensor:
        x = u[:, None]
        return self.attention(x, x, x)[0][:, 0]


class Own(nn.MultiheadAttention):
    pass


class OwnDropout(nn.Dropout):
    pass


def deep(p: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.ModuleDict({"d": nn.Dropout(p)})["d"]))


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (deep, r"R.inner.1.1 is Dropout, .* call banach.nn.convert_dropout\(R\)"),
    (lambda: nn.AlphaDropout(0.1), "R.inner is AlphaDropout"),
    (lambda: Attention(0.1), r"R.inner.attention is MultiheadAttention, .*convert_dropout\(R\)"),
    (lambda: convert_dropout(Attention(0.1, Own)), "R.inner.attention is Own, .* derive from, a layer of"),
    (lambda: convert_dropout(OwnDropout(0.1)), "R.inner is OwnDropout, .* derive from, a layer of banach.nn"),
    (lambda: nn.LSTM(6, 6, num_layers=2, dropout=0.1), "R.inner is LSTM, .* set its dropout to 0, and put"),
    (lambda: nn.RReLU(), "R.inner is RReLU, .* use nn.LeakyReLU"),
    (lambda: nn.RReLU(-0.3, -0.1), "R.inner is RReLU"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_layers_are_refused_in_train_mode(make: Callable[[], nn.Module], message: str) -> None:
    R = Around(make())
    with pytest.raises(RuntimeError, match=message):
        network(R)(normal(5, 4))
    R.training = False  # R itself in eval mode, the layer inside it not
    with pytest.raises(RuntimeError, match=message):
        network(R)(normal(5, 4))


@pytest.mark.parametrize(
    "make", [lambda: deep(0.0), lambda: deep().eval(), lambda: Attention(0.0), lambda: nn.RReLU(0.2, 0.2)]
)
def test_layers_that_do_not_draw_run(make: Callable[[], nn.Module]) -> None:
    net = network(Around(make()))
    net.S = nn.Sequential(net.S, nn.Dropout(0.5))  # outside R dropout is as ever
    y, found = net(normal(5, 4), solution=True)
    assert bool(found.converged.all())
    assert torch.isfinite(y).all()


def test_converting() -> None:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    shared = nn.Dropout(0.2)
    first = [nn.Sequential(kind(0.1 * (i + 1), inplace=i == 2)) for i, kind in enumerate(kinds)]
    module: Any = nn.Sequential(*first, shared, nn.Sequential(shared))
    module[1].eval()
    made: Any = convert_dropout(module)
    for i, kind in enumerate(kinds):
        layer = made[i][0]
        assert type(layer) is getattr(banach.nn, kind.__name__)
        assert (layer.p, layer.inplace, layer.training) == (pytest.approx(0.1 * (i + 1)), i == 2, i != 1)
    assert all(isinstance(layer, banach.nn.Dropout) for layer in (made[4], made[5][0]))  # named twice
    assert made is module


# Functions that R calls, and layers that a plain function R reaches, are seen when they are evaluated.

DIRECT: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (
        lambda u: F.scaled_dot_product_attention(u, u, u, dropout_p=0.2),
        r"R calls scaled_dot_product_attention with .* 0.2, .*\(q, k, v, dropout=layer\) with .*Dropout\(0.2\)",
    ),
    (lambda u: F.scaled_dot_product_attention(u, u, u, None, 0.2), "scaled_dot_product_attention"),
    (lambda u: F.dropout(u, 0.2), r"R calls dropout .* use banach.nn.Dropout\(0.2\)"),
    (lambda u: F.dropout1d(u), "R calls dropout1d with a dropout probability of 0.5"),
    (lambda u: torch.dropout(u, 0.2, train=True), "R calls dropout"),
    (
        lambda u: F.multi_head_attention_forward(
            *(u[:, None],) * 3, 6, 2, normal(18, 6), *(None,) * 3, False, 0.2, normal(6, 6), None
        )[0][:, 0],
        "R calls multi_head_attention_forward .* banach.nn.scaled_dot_product_attention",
    ),
]


@pytest.mark.parametrize(("function", "message"), DIRECT)
def test_a_function_that_drops_is_refused_and_says_what_to_write(
    function: Callable[[Tensor], Tensor], message: str
) -> None:
    R = Around(function)
    for one in (R, R, lambda u, v: R(u, v)):  # the second pass too: nothing was learned from the first
        with pytest.raises(RuntimeError, match=message):
            network(one)(normal(5, 4))
    assert F.dropout(torch.ones(100), 0.5).eq(0).any()  # elsewhere it is as ever


def test_eval_mode_first_does_not_hide_train_mode_later() -> None:
    class Drops(nn.Module):
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return 0.1 * F.dropout(u, 0.2, self.training) + v

    net = network(Drops()).eval()
    net(normal(5, 4))
    with pytest.raises(RuntimeError, match=r"use banach.nn.Dropout\(0.2\)"):
        net.train()(normal(5, 4))


def around(layer: nn.Module) -> Callable[..., Tensor]:
    """R as a plain function that reaches a layer."""
    linear = nn.Linear(6, 6).double()
    return lambda u, v: 0.3 * torch.tanh(layer(linear(u) + v))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(6).double(), "R is a function that calls batch_norm .* give ImplicitNetwork the module"),
        (nn.Dropout(0.5), r"R calls dropout .* use banach.nn.Dropout\(0.5\)"),
    ],
)
def test_a_function_that_reaches_layers_is_refused_in_train_mode_only(layer: nn.Module, message: str) -> None:
    R = around(layer.eval())
    net, v = network(R), normal(5, 4)
    y, found = net(v, solution=True)
    assert bool(found.converged.all())
    u = torch.zeros(5, 6, dtype=torch.float64)
    for _ in range(100):
        u = R(u, net.Q(v))
    torch.testing.assert_close(y, net.S(u))
    layer.train()
    with pytest.raises(RuntimeError, match=message):
        net(v)


def test_batch_norm_without_statistics_and_batch_norm_in_start_are_allowed() -> None:
    def R(u: Tensor, v: Tensor) -> Tensor:
        return 0.1 * F.batch_norm(u, None, None, training=True) + v

    network(R, coupled=True)(normal(5, 4))
    norm = nn.BatchNorm1d(6).double()
    network(lambda u, v: 0.3 * u + v, start=lambda v: norm(v))(normal(5, 4))


def test_a_function_compiles_whole() -> None:
    net = network(around(nn.BatchNorm1d(6).double().eval()), tolerance=Tolerance(max_steps=5, check_every=0))
    wanted = net(normal(5, 4))
    torch._dynamo.reset()
    got = torch.compile(net, backend="eager", fullgraph=True)(normal(5, 4))
    torch.testing.assert_close(got, wanted)
