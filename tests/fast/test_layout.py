"""Which weights lie with channels side by side, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from banach import Neumann, Tolerance, models
from banach.fast import channels_side_by_side, prefers_channels_last


def test_a_network_that_is_not_taken_apart_keeps_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banach.fast.layout.wants_windows", lambda part: True)
    assert prefers_channels_last(models.build("mnist"), "fp32")
    assert not prefers_channels_last(models.build("mnist", backward=Neumann(1)), "fp32")
    assert not prefers_channels_last(models.build("resnet56"), "fp32")


def test_channels_that_lie_side_by_side_stay_so() -> None:
    """The weights are the same numbers, and what the network makes of an image follows them."""
    torch.manual_seed(0)
    net: Any = models.build("digits", tolerance=Tolerance(atol=1e-9, max_steps=300)).double().eval()
    d = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    before, weights = net(d), [p.detach().clone() for p in net.parameters()]
    assert channels_side_by_side(net) is net
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), weights, strict=True))
    assert net.Q(d).is_contiguous(memory_format=torch.channels_last)
    after, found = net(d, solution=True)
    assert found.value.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)
