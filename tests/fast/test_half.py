"""bf16 weights that are cast once give what autocast gives."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from banach import Tolerance, models
from banach.fast import FixedDepth
from banach.fast.half import HalfWeights


def network() -> Any:
    torch.manual_seed(0)
    net: Any = models.build("digits", tolerance=Tolerance(atol=1e-2, max_steps=20)).train()
    net.S.drop.p = 0.0
    return net


def gradients(half: bool) -> tuple[Any, torch.Tensor]:
    net = network()
    made = FixedDepth(net, half=half)
    d = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    made.refresh()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = made(d, 6)[0]
    F.cross_entropy(output.float(), torch.arange(6)).backward()
    made.collect()
    return net, output


def test_outputs_gradients_and_statistics_are_those_of_autocast() -> None:
    (own, expected), (net, output) = gradients(False), gradients(True)
    torch.testing.assert_close(output, expected)
    for (name, a), b in zip(net.named_parameters(), own.parameters(), strict=True):
        assert a.grad is not None, name
        assert a.grad.dtype == torch.float32
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    for (name, a), b in zip(net.named_buffers(), own.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_refresh_follows_the_masters_and_collect_fills_them() -> None:
    layer: Any = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    made = HalfWeights({"layer": layer})
    copy = made.modules["layer"]
    assert copy[0].weight.dtype == torch.bfloat16
    assert copy[1].weight is layer[1].weight
    with torch.no_grad():
        layer[0].weight.fill_(1.5)
    made.refresh()
    assert bool((copy[0].weight == 1.5).all())
    (copy[0](torch.ones(4, 3, dtype=torch.bfloat16)).float().sum()).backward()
    made.collect()
    torch.testing.assert_close(layer[0].weight.grad, torch.full((2, 3), 4.0))
    made.refresh()
    assert copy[0].weight.grad is None


def test_a_weight_that_two_layers_share_stays_one() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    made = HalfWeights({"Q": first, "S": second})
    assert made.modules["Q"].weight is made.modules["S"].weight
    assert len(made.masters) == 3


def test_what_is_no_module_stays_as_it_is() -> None:
    assert HalfWeights({"S": torch.tanh}).modules["S"] is torch.tanh


def test_modules_without_a_matrix_of_their_own_are_stepped_too() -> None:
    """Parametrised weights are no parameters of their layers, and norms keep theirs in fp32: nothing is left."""
    made = HalfWeights(
        {"norm": nn.LayerNorm(2), "Q": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, bias=False))}
    )
    assert made.masters == []
    made.refresh()
    made.collect()
