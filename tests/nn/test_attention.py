"""Attention with one mask per pass: against PyTorch's own code with the same mask, in every option."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import banach
from banach import ImplicitNetwork, Tolerance, Unroll
from banach.nn import MultiheadAttention, convert_dropout, scaled_dot_product_attention
from banach.nn.dropout import check_dropout
from banach.nn.passes import Pass
from nn.parts_nn import TIGHT, normal

E, H, N, L, S = 8, 2, 3, 4, 5
P = 0.4


def causal() -> Tensor:
    return torch.ones(L, S, dtype=torch.bool).triu(1)


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other sizes": {"kdim": 6, "vdim": 7},
    "bias_k": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True, "add_bias_kv": True, "batch_first": True},
}
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "each head": lambda: {"average_attn_weights": False},
    "bool mask": lambda: {"attn_mask": causal()},
    "float mask": lambda: {"attn_mask": normal(L, S, seed=7)},
    "causal": lambda: {"attn_mask": causal(), "is_causal": True},
    "mask per head": lambda: {"attn_mask": normal(N * H, L, S, seed=7)},
    "padding": lambda: {"key_padding_mask": torch.arange(S) > torch.tensor([[2], [3], [5]])},
    "both": lambda: {"attn_mask": causal(), "key_padding_mask": torch.arange(S) > torch.tensor([[2], [3], [5]])},
}


def layer(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(1)
    made = nn.MultiheadAttention(E, H, dropout=P, **options).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def inputs(made: nn.MultiheadAttention, *, batched: bool = True) -> list[Tensor]:
    found = [normal(N, n, w, seed=n + w) for n, w in ((L, E), (S, made.kdim), (S, made.vdim))]
    if not batched:
        return [x[0] for x in found]
    return found if made.batch_first else [x.transpose(0, 1) for x in found]


def in_a_pass(made: nn.Module, *arguments: Tensor, **options: Any) -> tuple[Any, Tensor]:
    """What a layer gives at two evaluations of a pass, which must agree, and its mask."""

    class R(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made

        def forward(self, u: Any, v: Any) -> Any:
            return self.inner(*arguments, **options)

    with Pass(R()) as one:
        first, second = one.evaluate(None, None), one.evaluate(None, None)
        assert one.masks is not None
        (mask,) = one.masks.values()
    pairs = zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
    assert all(a is b is None or torch.equal(a, b) for a, b in pairs)
    return first, mask


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", LAYERS)
def test_it_is_pytorchs_attention_with_the_mask_of_the_pass(
    kind: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = layer(**LAYERS[kind])
    options = CALLS[call]()
    twin = convert_dropout(copy.deepcopy(plain))
    assert type(twin) is MultiheadAttention
    x = inputs(plain)
    (y, weights), mask = in_a_pass(twin, *x, **options)
    assert mask.shape[:3] == (N, H, L)
    assert 0.3 < float(mask.double().mean()) < 0.9
    only, _ = in_a_pass(twin, *x, **options, need_weights=False)[0]
    assert only.shape == y.shape
    monkeypatch.setattr(F, "dropout", lambda w, p: w * mask.flatten(0, 1) / (1 - p))
    expected, expected_weights = plain(*x, **options)
    assert torch.allclose(y, expected, rtol=0, atol=1e-13)
    assert torch.allclose(weights, expected_weights, rtol=0, atol=1e-13)
    got = torch.autograd.grad(y.sin().sum(), list(twin.parameters()))
    exact = torch.autograd.grad(expected.sin().sum(), list(plain.parameters()))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(got, exact, strict=True))


@pytest.mark.parametrize("padded", [False, True])
def test_a_sample_without_a_batch_axis(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = layer(batch_first=True)
    options = {"key_padding_mask": torch.arange(S) > 2} if padded else {}
    x = inputs(plain, batched=False)
    (y, weights), mask = in_a_pass(convert_dropout(copy.deepcopy(plain)), *x, **options)
    monkeypatch.setattr(F, "dropout", lambda w, p: w * mask.flatten(0, 1) / (1 - p))
    expected, expected_weights = plain(*x, **options)
    assert y.shape == expected.shape
    assert torch.allclose(y, expected, rtol=0, atol=1e-13)
    assert torch.allclose(weights, expected_weights, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("state", ["eval", "p = 0", "outside a pass"])
def test_elsewhere_it_is_pytorchs_own(kind: str, state: str) -> None:
    plain = layer(**LAYERS[kind])
    twin = convert_dropout(copy.deepcopy(plain))
    if state == "p = 0":
        plain.dropout = twin.dropout = 0.0  # type: ignore[assignment]
    for made in (plain, twin):
        made.train(state != "eval")
    x, options = inputs(plain), CALLS["both"]()
    torch.manual_seed(0)
    expected = plain(*x, **options)
    torch.manual_seed(0)
    if state == "outside a pass":
        found = twin(*x, **options)
    else:
        with Pass(Wrapped(twin, x, options)) as one:
            found = one.evaluate(None, None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, x: list[Tensor], options: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.x, self.options = inner, x, options

    def forward(self, u: Any, v: Any) -> Any:
        return self.inner(*self.x, **self.options)


def test_a_causal_hint_without_a_mask_is_refused() -> None:
    twin = convert_dropout(layer())
    with pytest.raises(RuntimeError, match="expected that mask, got None"):
        in_a_pass(twin, *inputs(layer()), is_causal=True)


def test_conversion_keeps_weights_identity_and_names() -> None:
    plain = layer()
    names, held = list(plain.state_dict()), dict(plain.named_parameters())
    module = nn.ModuleList([plain, plain])
    convert_dropout(module)
    assert module[0] is module[1] is plain
    assert list(plain.state_dict()) == names
    assert all(p is held[name] for name, p in plain.named_parameters())
    again: Any = pickle.loads(pickle.dumps(copy.deepcopy(plain)))
    assert type(again) is MultiheadAttention
    assert again.p == P


def blocks() -> dict[str, nn.Module]:
    torch.manual_seed(4)
    options: dict[str, Any] = {"dropout": 0.3, "batch_first": True, "dtype": torch.float64}
    encoder = nn.TransformerEncoderLayer(6, 2, 8, **options)
    return {
        "encoder layer": encoder,
        "encoder": nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False),
        "decoder layer": nn.TransformerDecoderLayer(6, 2, 8, **options),
    }


class Sequence(nn.Module):
    """R(u, v) = 0.1 block(u) + v, on latents of three tokens of six features."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        further = (v,) if isinstance(self.block, nn.TransformerDecoderLayer) else ()
        return 0.1 * self.block(u, *further) + v


def transformer(block: nn.Module, **options: Any) -> Any:
    torch.manual_seed(5)
    Q = nn.Sequential(nn.Linear(4, 18), nn.Unflatten(1, (3, 6))).double()
    S = nn.Sequential(nn.Flatten(), nn.Linear(18, 2)).double()
    return ImplicitNetwork(Q, Sequence(convert_dropout(block)), S, **{"tolerance": TIGHT, **options})


@pytest.mark.parametrize("kind", list(blocks()))
def test_a_converted_transformer_has_a_fixed_point_in_train_mode(kind: str) -> None:
    block = blocks()[kind]
    with pytest.raises(RuntimeError, match=r"banach.nn.convert_dropout\(R\)"):
        check_dropout(Sequence(block))
    net = transformer(block)
    y, found = net(normal(5, 4), solution=True)
    assert bool(found.converged.all())
    assert not torch.equal(net(normal(5, 4)), y)
    fresh = blocks()[kind].eval()
    x = normal(2, 3, 6)
    further = (x,) if kind == "decoder layer" else ()
    assert torch.equal(block.eval()(x, *further), fresh(x, *further))


def test_masks_are_cut_with_the_batch() -> None:
    d = normal(12, 4) * torch.logspace(-3, 1, 12, dtype=torch.float64)[:, None]
    loose = Tolerance(atol=1e-9, max_steps=100)
    found = []
    for compact in (False, True):
        net = transformer(blocks()["encoder layer"], compact=compact, tolerance=loose)
        torch.manual_seed(0)
        found.append(net(d, solution=True))
    (y, plain), (y_cut, cut) = found
    assert int(plain.steps.min()) < int(plain.steps.max())
    assert torch.equal(plain.steps, cut.steps)
    assert torch.allclose(y, y_cut, rtol=0, atol=1e-12)


# The function.

MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "bool": lambda: {"attn_mask": ~causal()},
    "float": lambda: {"attn_mask": normal(L, S, seed=3)},
    "causal": lambda: {"is_causal": True},
    "scale": lambda: {"scale": 0.7},
}


@pytest.mark.parametrize("case", MASKS)
def test_the_function_drops_by_its_layer_and_is_pytorchs_in_eval_mode(case: str) -> None:
    options = MASKS[case]()
    q, k, v = normal(N, H, L, 3), normal(N, H, S, 3, seed=1), normal(N, H, S, 3, seed=2)
    drop = banach.nn.Dropout(0.5)

    class R(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = drop

        def forward(self) -> Tensor:
            return scaled_dot_product_attention(q, k, v, dropout=self.drop, **options)

    y, mask = in_a_pass(R())
    # Dense: with v the identity, PyTorch's function returns the weights themselves.
    eye = torch.eye(S, dtype=torch.float64).expand(N, H, S, S)
    weights = F.scaled_dot_product_attention(q, k, eye, **options)
    assert torch.allclose(y, (weights * mask * 2) @ v, rtol=0, atol=1e-13)
    for layer in (None, banach.nn.Dropout(0.0), drop.eval()):
        found = scaled_dot_product_attention(q, k, v, dropout=layer, **options)
        assert torch.equal(found, F.scaled_dot_product_attention(q, k, v, **options))


# Functions in R that drop by themselves.

DIRECT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sdpa": (
        lambda u: F.scaled_dot_product_attention(u, u, u, dropout_p=0.2),
        r"R calls scaled_dot_product_attention with .* 0.2, .*\(q, k, v, dropout=layer\) with .*Dropout\(0.2\)",
    ),
    "sdpa by place": (
        lambda u: F.scaled_dot_product_attention(u, u, u, None, 0.2),
        "scaled_dot_product_attention",
    ),
    "F.dropout": (lambda u: F.dropout(u, 0.2), r"R calls dropout .* use banach.nn.Dropout\(0.2\)"),
    "F.dropout1d": (lambda u: F.dropout1d(u, 0.2, True), r"R calls dropout1d"),
    "torch.dropout": (lambda u: torch.dropout(u, 0.2, train=True), r"R calls dropout"),
    "attention": (
        lambda u: F.multi_head_attention_forward(
            u, u, u, 6, 2, torch.ones(18, 6).double(), None, None, None, False, 0.2, torch.eye(6).double(), None
        )[0],
        r"R calls multi_head_attention_forward .* banach.nn.scaled_dot_product_attention",
    ),
}


class Direct(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.calls = function, 0

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.1 * self.function(u) + v


@pytest.mark.parametrize("case", DIRECT)
def test_a_function_that_drops_is_refused_in_the_first_pass_and_says_what_to_write(case: str) -> None:
    function, message = DIRECT[case]
    R = Direct(function)
    for _ in range(2):  # the second pass too: nothing was learned from the first
        with pytest.raises(RuntimeError, match=message), Pass(R) as one:
            one.evaluate(normal(5, 3, 6), normal(5, 3, 6))
    with pytest.raises(RuntimeError, match=message), Pass(lambda u, v: R(u, v)) as one:
        one.evaluate(normal(5, 3, 6), normal(5, 3, 6))


def test_functions_that_do_not_drop_pass_and_later_passes_are_not_watched() -> None:
    def quiet(u: Tensor) -> Tensor:
        u = F.dropout(u, 0.3, training=False)
        return F.scaled_dot_product_attention(u, u, u, dropout_p=0.0)

    R = Direct(quiet)
    with Pass(R) as one:
        one.evaluate(normal(5, 3, 6), normal(5, 3, 6))
        assert one.watch is not None
    assert Pass(R).watch is None
    assert Pass(Direct(quiet).eval()).watch is None
    assert Pass(copy.deepcopy(R)).watch is not None


def test_eval_mode_first_does_not_hide_train_mode_later() -> None:
    class Own(Direct):
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return 0.1 * F.dropout(u, 0.2, self.training) + v

    R = Own(nn.Identity()).eval()
    with Pass(R) as one:
        one.evaluate(normal(5, 3, 6), normal(5, 3, 6))
    with pytest.raises(RuntimeError, match=r"use banach.nn.Dropout\(0.2\)"), Pass(R.train()) as one:
        one.evaluate(normal(5, 3, 6), normal(5, 3, 6))


def test_the_watch_is_over_after_an_error_and_leaves_dropout_elsewhere_alone() -> None:
    with pytest.raises(RuntimeError, match="R calls dropout"), Pass(Direct(F.dropout)) as one:
        one.evaluate(normal(5, 3, 6), normal(5, 3, 6))
    assert F.dropout(torch.ones(100), 0.5).eq(0).any()
    net = transformer(blocks()["encoder layer"], backward=Unroll(2, checkpoint=True))
    net.S = nn.Sequential(net.S, nn.Dropout(0.5))
    net(normal(5, 4)).sum().backward()
