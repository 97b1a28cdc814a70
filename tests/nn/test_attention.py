"""Attention with one mask per pass: against PyTorch's own code with the same mask, in every option."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import banach
from banach import ImplicitNetwork, Tolerance
from banach.nn import MultiheadAttention, convert_dropout, scaled_dot_product_attention
from banach.nn.passes import Pass
from nn.parts_nn import normal

E, H, N, L, S = 8, 2, 3, 4, 5
P = 0.4


def causal() -> Tensor:
    return torch.ones(L, S, dtype=torch.bool).triu(1)


PADDED = torch.arange(S) > torch.tensor([[2], [3], [5]])
EXTRA = {"add_zero_attn": True, "add_bias_kv": True, "batch_first": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the layer and of the call
    "plain": ({}, {}),
    "one sample, padded": (EXTRA, {"key_padding_mask": torch.arange(S) > 2}),
    "each head": ({"bias": False}, {"average_attn_weights": False}),
    "float mask": ({"add_bias_kv": True}, {"attn_mask": normal(L, S, seed=7)}),
    "causal": ({"kdim": 6, "vdim": 7}, {"attn_mask": causal(), "is_causal": True}),
    "mask per head": ({"batch_first": True}, {"attn_mask": normal(N * H, L, S, seed=7)}),
    "both": (EXTRA, {"attn_mask": causal(), "key_padding_mask": PADDED}),
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


class Fixed(nn.Module):
    """R that calls a layer with given arguments."""

    def __init__(self, inner: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.inner, self.arguments, self.options = inner, arguments, options

    def forward(self, u: Any, v: Any) -> Any:
        return self.inner(*self.arguments, **self.options)


def in_a_pass(made: Callable[..., Any], *arguments: Tensor, **options: Any) -> tuple[Any, Tensor | None]:
    """What a layer gives at two evaluations of a pass, which must agree, and its mask."""
    with Pass(Fixed(made, *arguments, **options)) as one:
        first, second = one.evaluate(None, None), one.evaluate(None, None)
    pairs = zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
    assert all(a is b is None or torch.equal(a, b) for a, b in pairs)
    return first, next(iter(one.masks.values())) if one.masks else None


@pytest.mark.parametrize("case", CASES)
def test_it_is_pytorchs_attention_with_the_mask_of_the_pass(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, options, one = layer(**CASES[case][0]), CASES[case][1], "one sample" in case
    twin = copy.deepcopy(plain)
    assert convert_dropout(twin) is twin  # its weights may be shared, or in an optimizer
    assert type(twin) is MultiheadAttention
    assert list(twin.state_dict()) == list(plain.state_dict())
    x = inputs(plain, batched=not one)
    (y, weights), mask = in_a_pass(twin, *x, **options)
    assert mask is not None
    assert mask.shape[:3] == (1 if one else N, H, L)
    only, none = in_a_pass(twin, *x, **options, need_weights=False)[0]
    assert only.shape == y.shape
    assert none is None
    monkeypatch.setattr(F, "dropout", lambda w, p: w * mask.flatten(0, 1) / (1 - p))
    expected, expected_weights = plain(*x, **options)
    assert torch.allclose(y, expected, rtol=0, atol=1e-13)
    assert torch.allclose(weights, expected_weights, rtol=0, atol=1e-13)
    got = torch.autograd.grad(y.sin().sum(), list(twin.parameters()))
    exact = torch.autograd.grad(expected.sin().sum(), list(plain.parameters()))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(got, exact, strict=True))


@pytest.mark.parametrize("state", ["eval", "p = 0", "outside a pass"])
def test_elsewhere_it_is_pytorchs_own(state: str) -> None:
    plain = layer(**EXTRA)
    twin = convert_dropout(copy.deepcopy(plain))
    if state == "p = 0":
        plain.dropout = twin.dropout = 0.0  # type: ignore[assignment]
    for made in (plain, twin):
        made.train(state != "eval")
    x, options = inputs(plain), CASES["both"][1]
    torch.manual_seed(0)
    expected = plain(*x, **options)
    torch.manual_seed(0)
    found = twin(*x, **options) if state == "outside a pass" else in_a_pass(twin, *x, **options)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_masks_that_are_missing_or_given_twice_are_refused() -> None:
    with pytest.raises(RuntimeError, match="expected that mask, got None"):
        in_a_pass(convert_dropout(layer()), *inputs(layer()), is_causal=True)
    q = normal(N, H, L, 3)
    with pytest.raises(ValueError, match="expected attn_mask or is_causal, got both"):
        scaled_dot_product_attention(q, q, q, torch.ones(L, L), is_causal=True)


class Sequence(nn.Module):
    """R(u, v) = 0.1 block(u) + v, on latents of three tokens of six features."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.1 * self.block(u) + v


def test_a_converted_transformer_has_a_fixed_point_in_train_mode() -> None:
    """Its masks are cut where converged samples leave the batch."""
    torch.manual_seed(4)
    d = normal(12, 4) * torch.logspace(-3, 1, 12, dtype=torch.float64)[:, None]
    block, answers = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True, dtype=torch.float64), []
    Q = nn.Sequential(nn.Linear(4, 18), nn.Unflatten(1, (3, 6))).double()
    R, tolerance = Sequence(convert_dropout(block)), Tolerance(atol=1e-9, max_steps=100)
    net = ImplicitNetwork(Q, R, nn.Flatten(), tolerance=tolerance)
    for net.compact, seed in ((False, 0), (True, 0), (True, 1)):
        torch.manual_seed(seed)
        answers.append(net(d, solution=True))
    (y, plain), (y_cut, cut), (other, _) = answers
    assert bool(plain.converged.all())
    assert int(plain.steps.min()) < int(plain.steps.max())
    assert torch.equal(plain.steps, cut.steps)
    assert torch.allclose(y, y_cut, rtol=0, atol=1e-12)
    assert not torch.equal(other, y_cut)


# The function.

MASKS = [{"attn_mask": ~causal()}, {"attn_mask": normal(L, S, seed=3)}, {"is_causal": True}, {"scale": 0.7}]


@pytest.mark.parametrize("options", MASKS)
def test_the_function_drops_by_its_layer_and_is_pytorchs_in_eval_mode(options: Any) -> None:
    q, k, v = normal(N, H, L, 3), normal(N, H, S, 3, seed=1), normal(N, H, S, 3, seed=2)
    drop = banach.nn.Dropout(0.5)

    attend = partial(scaled_dot_product_attention, q, k, v, dropout=drop, **options)
    R = Fixed(attend)
    R.drop = drop
    with Pass(R) as one:
        y = one.evaluate(None, None)
    assert one.masks is not None
    (mask,) = one.masks.values()
    # Dense: with v the identity, PyTorch's function returns the weights themselves.
    eye = torch.eye(S, dtype=torch.float64).expand(N, H, S, S)
    weights = F.scaled_dot_product_attention(q, k, eye, **options)
    assert torch.allclose(y, (weights * mask * 2) @ v, rtol=0, atol=1e-13)
    for layer in (None, banach.nn.Dropout(0.0), drop.eval()):
        found = scaled_dot_product_attention(q, k, v, dropout=layer, **options)
        assert torch.equal(found, F.scaled_dot_product_attention(q, k, v, **options))


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_a_query_that_may_attend_to_nothing_gets_zeros(kind: torch.dtype) -> None:
    """As from PyTorch's function, such as for padding on the left of a causal mask. It got NaN."""
    real = torch.arange(S) >= torch.tensor([[2], [0], [5]])  # the last sequence is padding alone
    allowed = real[:, None, None, :] & torch.ones(S, S, dtype=torch.bool).tril()
    mask = allowed if kind == torch.bool else torch.zeros(N, 1, S, S).double().masked_fill(~allowed, -torch.inf)
    q, k, v = (normal(N, H, S, 3, seed=seed).requires_grad_() for seed in range(3))
    drop = banach.nn.Dropout(0.5)
    R = Fixed(partial(scaled_dot_product_attention, q, k, v, mask, dropout=drop))
    R.drop = drop
    with Pass(R) as one:
        y = one.evaluate(None, None)
    assert one.masks is not None
    (kept,) = one.masks.values()
    eye = torch.eye(S, dtype=torch.float64).expand(N, H, S, S)
    expected = (F.scaled_dot_product_attention(q, k, eye, mask) * kept * 2) @ v
    assert torch.allclose(y, expected, rtol=0, atol=1e-13)
    assert not y[0, :, :2].any()
    assert not y[2].any()
    got, exact = (torch.autograd.grad(one.sin().sum(), (q, k, v)) for one in (y, expected))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(got, exact, strict=True))


def test_a_causal_layer_takes_padding_on_the_left() -> None:
    padding, causal = torch.arange(S) < torch.tensor([[2], [0], [3]]), torch.ones(S, S, dtype=torch.bool).triu(1)
    plain, x = layer(batch_first=True), normal(N, S, E)
    how: Any = {"key_padding_mask": padding, "attn_mask": causal, "need_weights": False}
    y = in_a_pass(convert_dropout(copy.deepcopy(plain)), x, x, x, **how)[0][0]
    plain.dropout = 0.0
    assert y.isfinite().all()
    nothing = plain.out_proj.bias.expand(2, E)  # PyTorch's layer gives its bias there
    assert torch.allclose(y[0, :2], nothing, rtol=0, atol=1e-13)
    assert torch.allclose(plain(x, x, x, **how)[0][0, :2], nothing, rtol=0, atol=1e-13)
