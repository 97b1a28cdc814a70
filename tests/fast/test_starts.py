"""Starts near the answer: fewer steps, the same fixed point."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import banach
from banach import ImplicitNetwork, Tolerance, models
from banach.fast import LinearStart, Neighbours


class Affine(nn.Module):
    """R(u, v) = A u + v + c: u* = (1 - A)^-1 (v + c) is linear in v."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.A = torch.randn(width, width, dtype=torch.float64) * 0.4 / width**0.5
        self.c = torch.randn(width, dtype=torch.float64)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return u @ self.A.T + v + self.c


def affine(**options: Any) -> ImplicitNetwork:
    tolerance = Tolerance(atol=1e-9, max_steps=200)
    return ImplicitNetwork(nn.Identity(), Affine(6), nn.Identity(), tolerance=tolerance, **options).eval()


def inputs(count: int = 40, seed: int = 1) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_linear_start_finds_a_linear_answer() -> None:
    net = affine()
    cold = net(inputs(seed=2), solution=True)[1].steps
    net.start = LinearStart.fit(net, [inputs(), inputs(seed=3)], ridge=0.0)
    y, found = net(inputs(seed=2), solution=True)
    R: Any = net.R
    exact = torch.linalg.solve(torch.eye(6, dtype=torch.float64) - R.A, (inputs(seed=2) + R.c).mT).mT
    torch.testing.assert_close(y, exact, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(net.start(inputs(seed=2)), exact, rtol=1e-6, atol=1e-6)
    assert int(found.steps.max()) <= 3 < int(cold.min())
    assert "start.weight" in net.state_dict()
    assert net.float().start.weight.dtype == torch.float32


def test_the_fit_to_images_is_that_of_a_convolution() -> None:
    """Fixed points that are a convolution of v are fitted by that convolution."""
    conv = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64)
    for p in conv.parameters():
        p.requires_grad_(False)
    net = ImplicitNetwork(nn.Identity(), lambda u, v: conv(v), nn.Identity()).eval()
    start = LinearStart.fit(net, [torch.randn(8, 2, 5, 4, dtype=torch.float64)], ridge=0.0)
    torch.testing.assert_close(start.weight, conv.weight)
    torch.testing.assert_close(start.bias, conv.bias)
    d = torch.randn(3, 2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(start(d), conv(d))


def some(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bool)


def test_neighbours_start_at_the_nearest_and_far_ones_elsewhere() -> None:
    memory, v, other = Neighbours(4), torch.eye(3), torch.full((3, 3), -1.0)
    assert torch.equal(memory(v, other), other)  # nothing is remembered yet
    memory.remember(v, torch.arange(9.0).reshape(3, 3), some(3))
    torch.testing.assert_close(memory(v + 0.1, other), torch.arange(9.0).reshape(3, 3))
    assert torch.equal(memory(-v, other), other)
    memory.remember(v + 0.01, torch.ones(3, 3), some(3))  # the oldest two are forgotten
    assert memory(v, other).tolist() == [[1.0] * 3, [1.0] * 3, [6.0, 7.0, 8.0]]
    assert memory(v + 0.01, other).tolist() == [[1.0] * 3] * 3
    memory.remember(torch.ones(1, 5), torch.full((1, 5), 3.0), some(1))  # another size
    assert memory(torch.ones(1, 5), torch.zeros(1, 5)).tolist() == [[3.0] * 5]
    assert memory(v + 0.01, other).tolist() == [[1.0] * 3] * 3
    few, v = Neighbours(2), torch.eye(5)
    few.remember(v, torch.full((5, 5), 7.0), some(5))
    assert few(v, torch.zeros(5, 5)).any(1).tolist() == [False, False, False, True, True]


def test_what_did_not_converge_or_is_not_finite_is_near_to_nothing() -> None:
    memory = Neighbours(3)
    v = torch.tensor([[1.0, 0.0], [0.0, torch.nan], [0.0, 1.0]])
    memory.remember(v, torch.ones(3, 2), torch.tensor([False, True, True]))
    assert memory(torch.eye(2), torch.zeros(2, 2)).tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_a_compiled_network_remembers() -> None:
    net = affine()
    fast = banach.compile(net, neighbours=64)
    with torch.inference_mode():  # what is kept can be used outside of it all the same
        cold = fast(inputs(), solution=True)[1].steps
    frames = inputs() + 1e-4
    y, found = fast(frames, solution=True)
    assert int(found.steps.max()) < int(cold.min())
    torch.testing.assert_close(y, net(frames), rtol=1e-6, atol=1e-6)
    fast(frames[:3])
    assert fast.neighbours is not None
    assert fast.neighbours.seen == 83


def test_where_no_neighbour_is_near_the_networks_own_start_is_used() -> None:
    net = affine()
    net.start = LinearStart.fit(net, [inputs(), inputs(seed=3)], ridge=0.0)
    found = banach.compile(net, neighbours=64)(inputs(seed=2), solution=True)[1]
    assert int(found.steps.max()) <= 4


def test_a_network_in_bf16_can_have_neighbours() -> None:
    net: Any = models.build("digits", tolerance=Tolerance(atol=1e-1, max_steps=20)).bfloat16().eval()
    fast = banach.compile(net, neighbours=8)
    d = torch.randn(4, 1, 8, 8, dtype=torch.bfloat16)
    first = fast(d, solution=True)[1].steps
    assert int(fast(d, solution=True)[1].steps.max()) <= int(first.max())


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 1 sample"):
        Neighbours(0)
    with pytest.raises(ValueError, match="at least one batch"):
        LinearStart.fit(affine(), [])
    pair: Any = ImplicitNetwork(lambda d: (d, d), lambda u, v: u, nn.Identity())
    with pytest.raises(TypeError, match="one tensor"):
        LinearStart.fit(pair.eval(), [inputs()])
    with pytest.raises(RuntimeError, match=r"net\.eval\(\)"):
        LinearStart.fit(affine().train(), [inputs()])
