"""Convolutions that are exchanged for others compute the same, with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from banach import models
from banach.fast import FixedDepth, prefers_channels_last
from banach.fast.half import HalfWeights
from banach.fast.windows import WindowConv2d, products_in_tf32, wants_windows, with_windows


def windows(part: nn.Module) -> list[nn.Module]:
    return [layer for layer in part.modules() if isinstance(layer, WindowConv2d)]


@pytest.mark.parametrize(("name", "image"), [("mnist", (1, 28, 28)), ("svhn", (3, 32, 32))])
def test_the_same_value_and_gradients(name: str, image: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    Q: Any = models.build(name).double().eval().Q
    other = with_windows(Q)
    assert windows(other)
    assert not windows(Q)
    assert all(a is b for a, b in zip(Q.parameters(), other.parameters(), strict=True))
    d = torch.randn(2, *image, dtype=torch.float64)
    wanted = Q(d)
    value = other(d)
    torch.testing.assert_close(value, wanted)
    gradients = torch.autograd.grad(wanted.square().sum(), list(Q.parameters()))
    for a, b in zip(torch.autograd.grad(value.square().sum(), list(Q.parameters())), gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_their_halves_are_cast_and_their_gradients_collected() -> None:
    layer = with_windows(nn.Sequential(nn.Conv2d(2, 3, 3)))
    half = HalfWeights({"Q": layer})
    x = torch.randn(1, 2, 4, 4)
    half.refresh()
    out = half.modules["Q"](x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    half.collect()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_autocast_has_the_last_word_on_the_type() -> None:
    layer = with_windows(nn.Sequential(nn.Conv2d(2, 3, 3)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(1, 2, 4, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(65, 3, 3),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, (3, 1)),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
        nn.Conv1d(4, 4, 3),
    ],
    ids=str,
)
def test_other_convolutions_stay(layer: nn.Module) -> None:
    assert not windows(with_windows(nn.Sequential(layer)))


def test_without_a_gpu_nothing_is_exchanged() -> None:
    net = models.build("mnist")
    assert not wants_windows(net)
    assert not prefers_channels_last(net, "fp32")
    assert prefers_channels_last(net, "bf16")
    assert with_windows(torch.tanh) is torch.tanh


def test_tf32_is_asked_in_todays_words() -> None:
    """The old flag raises where the new one was set."""
    backends: Any = torch.backends.cudnn
    conv = backends.conv
    before = conv.fp32_precision
    try:
        conv.fp32_precision = "ieee"
        assert not products_in_tf32()
        FixedDepth(models.build("digits"))  # type: ignore[arg-type]
        conv.fp32_precision = "tf32"
        assert products_in_tf32()
    finally:
        conv.fp32_precision = before
