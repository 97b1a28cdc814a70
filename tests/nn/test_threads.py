"""A network without buffers, called from several threads at once: each gets its own answer and gradient."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import JFB, Implicit, ImplicitNetwork, Mode, Neumann, Tolerance, Unroll


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.linear(u) + v)


@pytest.mark.parametrize("mode", [JFB(), Neumann(2), Unroll(2, checkpoint=True), Implicit()])
def test_threads_do_not_mix(mode: Mode) -> None:
    torch.manual_seed(0)
    Q, S = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 2, dtype=torch.float64)
    net = ImplicitNetwork(Q, Cell(), S, tolerance=Tolerance(atol=1e-10, max_steps=300), backward=mode)
    batches = [torch.randn(1 + k % 5, 4, dtype=torch.float64) for k in range(24)]

    def gradients(d: Tensor) -> tuple[Any, ...]:
        return torch.autograd.grad(net(d).square().sum(), list(net.parameters()))

    wanted = [gradients(d) for d in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(gradients, batches))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    # Where products with a Jacobian are made, compiled functions run as they were written: there alone.
    assert torch._dynamo.eval_frame._stance.stance == "default"
