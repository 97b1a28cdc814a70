"""What draws at random in R is refused with advice; convert_dropout exchanges what it can."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import banach
from banach.nn import convert_dropout
from banach.nn.dropout import check_dropout
from nn.parts_nn import network, normal


class Around(nn.Module):
    """R(u, v) = 0.3 inner(u) + v."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.double()

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.3 * self.inner(u) + v


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=dropout, batch_first=True)

    def forward(self, u: Tensor) -> Tensor:
        x = u[:, None]
        return self.attention(x, x, x)[0][:, 0]


def deep(p: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.ModuleDict({"d": nn.Dropout(p)})["d"]))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (deep, r"R.inner.1.1 is Dropout, .* use banach.nn.Dropout, or banach.nn.convert_dropout\(R\)"),
    "alpha": (lambda: nn.AlphaDropout(0.1), "R.inner is AlphaDropout"),
    "channels": (lambda: nn.Dropout2d(0.1), "R.inner is Dropout2d"),
    "attention": (lambda: Attention(0.1), r"R.inner.attention is MultiheadAttention, .*convert_dropout\(R\)"),
    "recurrent": (
        lambda: nn.LSTM(6, 6, num_layers=2, dropout=0.1),
        "R.inner is LSTM, .* set its dropout to 0, and put",
    ),
    "slopes": (lambda: nn.RReLU(), "R.inner is RReLU, .* use nn.LeakyReLU"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_train_mode_only(case: str) -> None:
    make, message = REFUSED[case]
    R = Around(make())
    with pytest.raises(RuntimeError, match=message):
        network(R)(normal(5, 4))
    check_dropout(R.eval())
    R.train().training = False  # R itself in eval mode, the layer inside it not
    with pytest.raises(RuntimeError, match=message):
        check_dropout(R)


def test_allowed() -> None:
    for inner in (deep(0.0), deep().eval(), Attention(0.0), nn.RReLU(0.2, 0.2)):
        R = Around(inner)
        y, found = network(R)(normal(5, 4), solution=True)
        assert bool(found.converged.all())
        assert torch.isfinite(y).all()
    check_dropout(lambda u, v: u)
    check_dropout(Around(banach.nn.Dropout(0.5)))
    net = network(Around(nn.Identity()))
    net.S = nn.Sequential(net.S, nn.Dropout(0.5))
    net(normal(5, 4))  # outside R dropout is as ever


def test_eval_mode_of_a_plain_dropout_runs() -> None:
    net = network(Around(deep())).eval()
    assert torch.equal(net(normal(5, 4)), net(normal(5, 4)))


def test_a_plain_dropout_that_is_r_itself_is_named() -> None:
    with pytest.raises(RuntimeError, match="R is Dropout, which draws"):
        check_dropout(nn.Dropout(0.5))


def test_converting() -> None:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    module = nn.Sequential(*[nn.Sequential(kind(0.1 * (i + 1), inplace=i == 2)) for i, kind in enumerate(kinds)])
    module[1].eval()
    assert convert_dropout(module) is module
    for i, kind in enumerate(kinds):
        layer = module[i][0]  # type: ignore[index]
        assert type(layer) is getattr(banach.nn, kind.__name__)
        assert layer.p == pytest.approx(0.1 * (i + 1))
        assert layer.inplace is (i == 2)
        assert layer.training is (i != 1)
    check_dropout(module)


def test_converting_reaches_a_layer_that_is_named_twice() -> None:
    shared = nn.Dropout(0.2)
    module = convert_dropout(nn.Sequential(nn.Linear(6, 6), shared, nn.Linear(6, 6), shared))
    check_dropout(module)
    assert sum(isinstance(child, banach.nn.Dropout) for child in module) == 2  # type: ignore[attr-defined]


def test_a_subclass_of_attention_is_refused_with_other_advice() -> None:
    class Own(nn.MultiheadAttention):
        pass

    with pytest.raises(RuntimeError, match=r"R is Own, .* derive it from banach.nn.MultiheadAttention"):
        check_dropout(convert_dropout(Own(6, 2, dropout=0.1)))
    check_dropout(Own(6, 2))
