"""JFB evaluates R once: batch norm writes to its own buffers, which the iteration does not see, without a copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from banach import JFB, Mode, Neumann
from banach.nn.passes import Pass
from nn.parts_nn import NormR, close, gradients, network, normal


class Copies(TorchDispatchMode):
    """Counts copies of, and into, some tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.places, self.count = {tensor.data_ptr() for tensor in tensors}, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "clone" in str(op) or "copy" in str(op):
            given = [part for part in tree_leaves(args) if isinstance(part, Tensor)]
            self.count += any(tensor.data_ptr() in self.places for tensor in given)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "copied"), [(JFB(), False), (Neumann(1), True)])
def test_what_evaluates_once_copies_no_statistics(mode: Mode, copied: bool) -> None:
    net = network(NormR(), backward=mode)
    with Copies(net.R.buffers()) as copies:
        net(normal(5, 4)).sum().backward()
    assert bool(copies.count) == copied
    assert int(net.R.norm.num_batches_tracked) == 1


class Functional(NormR):
    """Its norm is not called: F.batch_norm writes to what that has."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        norm, x = self.norm, self.linear(u)
        x = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)
        return 0.4 * torch.tanh(x) + v


def test_nobody_else_writes_to_statistics_during_the_iteration() -> None:
    called, written = network(NormR()), network(Functional())
    written.load_state_dict(called.state_dict())
    for net in (called, written):
        net(normal(5, 4)).sum().backward()
    for name in ("running_mean", "running_var"):
        assert torch.allclose(getattr(called.R.norm, name), getattr(written.R.norm, name), rtol=0, atol=1e-13)


def test_statistics_may_be_reset_before_the_backward_pass() -> None:
    net, d = network(NormR()), normal(5, 4)
    wanted = gradients(net, net(d).square().sum())
    loss = net(d).square().sum()
    net.R.norm.reset_running_stats()
    assert close(gradients(net, loss), wanted, atol=1e-13)


def test_a_network_made_in_inference_mode_is_called_without_gradients() -> None:
    with torch.inference_mode():
        net = network(NormR())
    with torch.no_grad():
        assert torch.equal(net(normal(5, 4)), network(NormR())(normal(5, 4)))


def test_compiled_parts_are_called_with_buffers_of_their_own() -> None:
    R: Any = NormR()
    assert Pass(R, once=True).buffers.direct
    assert not Pass(torch.compile(R, backend="eager"), once=True).buffers.direct
    R.norm.compile(backend="eager")
    assert not Pass(R, once=True).buffers.direct
