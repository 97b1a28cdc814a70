"""Unroll(checkpoint=True): the same gradients for less memory, each step computed twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from backward.contracts_backward import attach, error, gradient
from backward.maps_backward import Case, all_cases, layer
from banach import Implicit, Unroll
from problems import normal


class Alive(TorchDispatchMode):
    """Bytes of everything computed under it that has not been freed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(found):
            if isinstance(tensor, Tensor):
                ref = StorageWeakRef(tensor.untyped_storage())
                self.seen[ref.cdata] = ref, tensor.untyped_storage().nbytes()
        return found

    def bytes(self) -> int:
        return sum(size for ref, size in self.seen.values() if not ref.expired())


def wide(hidden: int = 64, n: int = 4) -> Callable[[Tensor], Tensor]:
    """A map whose inside is far larger than its latent."""
    A, B = normal(hidden, n, seed=1).requires_grad_(), (0.01 * normal(n, hidden, seed=2)).requires_grad_()
    return lambda z: torch.tanh(z @ A.T) @ B.T


def held(mode: Unroll, T: Callable[[Tensor], Tensor], z: Tensor) -> int:
    with Alive() as alive:
        value = mode.attach(T, z)
    size = alive.bytes()
    assert value.requires_grad
    return size


def test_memory() -> None:
    T, z = wide(), normal(8, 4, seed=3)
    latent, inside = z.numel() * 8, 8 * 64 * 8
    plain = [held(Unroll(k), T, z) for k in (5, 10)]
    thrifty = [held(Unroll(k, checkpoint=True), T, z) for k in (5, 10)]
    assert plain[1] - plain[0] >= 5 * inside
    assert thrifty[1] - thrifty[0] <= 5 * latent
    assert thrifty[1] < plain[1] / 5


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_gradients_are_equal(case: Case, damping: float) -> None:
    thrifty = gradient(Unroll(4, damping, checkpoint=True), case)
    assert error(thrifty, gradient(Unroll(4, damping), case)) <= 1e-15


def test_every_step_is_computed_twice_and_no_more() -> None:
    case, calls = layer(), 0
    T, inputs = case.build(*case.fresh())

    def counted(*arguments: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return T(*arguments)

    Unroll(5, checkpoint=True).attach(counted, case.z_star, inputs).sum().backward()
    assert calls == 10


def test_a_checkpoint_around_implicit() -> None:
    """The other way round: attach inside a region that is recomputed."""
    case = layer()
    theta = case.fresh()
    value = torch.utils.checkpoint.checkpoint(attach, Implicit(), case, theta, use_reentrant=False)
    found = torch.autograd.grad(value.view(-1) @ case.cotangent(), theta)
    expected = gradient(Implicit(), case)
    assert error(torch.cat([part.reshape(-1) for part in found]), expected) <= 1e-12


def test_torch_func_is_refused_not_answered_wrongly() -> None:
    case = layer()
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda theta: attach(Unroll(2, checkpoint=True), case, theta).sum())(case.theta)
