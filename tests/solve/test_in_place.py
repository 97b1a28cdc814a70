"""A T that writes to what it is given is refused: it would make a residual that is not its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import Anderson, ImplicitNetwork, Picard, Solver, Tolerance, solve

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
everies = pytest.mark.parametrize("every", [0, 1, 3])
OF_Z = "T must not change its input in place: begin with an operation that is not in place"
OF_INPUTS = r"T must not change `inputs` \(in a network: R must not change v\) in place"


def settings(every: int) -> Tolerance:
    return Tolerance(atol=1e-6, max_steps=50, check_every=every)


@modes
@everies
@pytest.mark.parametrize("solver", [Picard(), Anderson()], ids=repr)
def test_a_write_to_z(mode: Any, every: int, solver: Solver) -> None:
    with mode():
        z0, x = torch.zeros(3, 4), torch.ones(3, 4)
        with pytest.raises(ValueError, match=OF_Z):
            solve(lambda z, x: z.mul_(0.5).add_(x), z0, solver, inputs=(x,), tolerance=settings(every))


@modes
def test_a_write_to_one_part_of_a_nest(mode: Any) -> None:
    def T(z: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": z["a"] / 2, "b": z["b"].mul_(0.5)}

    with mode(), pytest.raises(ValueError, match=OF_Z):
        solve(T, {"a": torch.ones(2, 3), "b": torch.ones(2)})


def test_a_z0_from_outside_is_seen_in_inference_mode_whatever_T_returns() -> None:
    z0 = torch.ones(2, 3)
    T = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
    with torch.inference_mode(), pytest.raises(ValueError, match=OF_Z):
        solve(T, z0)


@modes
@pytest.mark.parametrize("T", [lambda z: z, lambda z: z.view(2, 3), lambda z: z.flip(1)[:, :]], ids=range(3))
def test_memory_given_back_unwritten_is_no_write(mode: Any, T: Any) -> None:
    with mode():
        z0 = torch.ones(2, 3)
        found = solve(T, z0)
        assert found.converged.all()
        assert torch.equal(found.value, torch.ones(2, 3))


def spoil(z: Tensor, x: Tensor) -> Tensor:
    x += z / 2
    return torch.tanh(x)


@modes
@everies
def test_a_write_to_inputs(mode: Any, every: int) -> None:
    x = torch.ones(3, 4)
    nested = ({"a": torch.ones(3, 4), "b": [x]},)
    with mode(), pytest.raises(ValueError, match=OF_INPUTS):
        solve(spoil, torch.zeros(3, 4), inputs=(x,), tolerance=settings(every))
    with mode(), pytest.raises(ValueError, match=OF_INPUTS):
        solve(
            lambda z, given: spoil(z, given["b"][0]), torch.zeros(3, 4), inputs=nested, tolerance=settings(every)
        )


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("training", [True, False])
def test_an_R_that_writes_to_v(mode: Any, training: bool) -> None:
    class R(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            nn.init.orthogonal_(self.linear.weight, 0.3)

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            x = v
            x += self.linear(u)
            return torch.tanh(x)

    net = ImplicitNetwork(nn.Linear(3, 4), R(), nn.Identity()).train(training)
    with mode(), pytest.raises(ValueError, match=OF_INPUTS):
        net(torch.ones(2, 3))


def test_inside_torch_func() -> None:
    def loss(x: Tensor) -> Tensor:
        found = solve(lambda z, x: z / 2 + x, torch.zeros(3, 4), inputs=(x,), tolerance=settings(1))
        return (found.value / 2 + x).sum()

    for mode in MODES.values():
        with mode():
            assert torch.equal(torch.func.grad(loss)(torch.ones(3, 4)), torch.ones(3, 4))
