"""Corners: empty batches, in-place activations after attach, maps that are awkward to differentiate."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backward.contracts_backward import EXACT, MODES, error, name
from backward.systems_backward import Reports
from banach import GMRES, Implicit, Mode, Status, Tolerance
from problems import contraction, normal

every = pytest.mark.parametrize("mode", MODES, ids=name)
exact = pytest.mark.parametrize("mode", EXACT, ids=name)


@every
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("shape", [(0, 4), (0,), (3, 0), (0, 2, 3, 3)], ids=str)
def test_an_empty_batch(mode: Mode, shape: tuple[int, ...], coupled: bool) -> None:
    a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    z = torch.zeros(shape, dtype=torch.float64)
    value = mode.attach(lambda z: a * z, z, coupled=coupled)
    value.sum().backward()
    assert value.shape == shape
    assert a.grad is not None
    assert float(a.grad) == 0


def linear(mode: Mode, last: Any) -> tuple[Tensor, Tensor, Tensor]:
    """An affine map whose value is handed to `last`: the output, and the gradients in W and x."""
    W, x = contraction(5, 0.6).requires_grad_(), normal(3, 5, seed=80).requires_grad_()
    u = torch.linalg.solve(torch.eye(5, dtype=torch.float64) - W.detach(), x.detach().T).T
    y = last(mode.attach(lambda z, x: z @ W.T + x, u, (x,)))
    return y.detach(), *torch.autograd.grad(y.square().sum(), (W, x))


@every
def test_an_in_place_activation_right_after_attach(mode: Mode) -> None:
    """As an S that begins with ReLU(inplace=True) does."""
    for found, expected in zip(linear(mode, nn.ReLU(inplace=True)), linear(mode, nn.ReLU()), strict=True):
        assert torch.equal(found, expected)


@exact
def test_in_place_on_a_value_that_T_saved(mode: Mode) -> None:
    """tanh keeps its own output for the backward pass; Implicit hands out a copy. One of two tensors, likewise."""
    W, x = contraction(5, 0.6).requires_grad_(), normal(3, 5, seed=81)

    def T(z: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(z[1] @ W.T + x), torch.tanh(z[0] @ W.T)

    a, b = mode.attach(T, (x, x))
    (a.relu_().sum() + b.sum()).backward()
    assert W.grad is not None


@every
def test_without_grad_mode_an_in_place_activation_leaves_z_star_alone(mode: Mode) -> None:
    z = normal(3, 5, seed=82)
    before = z.clone()
    with torch.no_grad():
        mode.attach(lambda z: 0.5 * z - 1, z).relu_()
    assert torch.equal(z, before)


Pair = namedtuple("Pair", "first second")


@every
def test_the_type_of_a_nest_survives(mode: Mode) -> None:
    a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    z = Pair(torch.ones(2, 3, dtype=torch.float64), [torch.ones(2, dtype=torch.float64)])

    def T(z: Pair) -> Pair:
        return Pair(a * z.first + z.second[0][:, None] / 4, [a * z.first.mean(1)])

    value = mode.attach(T, z)
    assert isinstance(value, Pair)
    assert isinstance(value.second, list)
    (value.first.sum() + value.second[0].sum()).backward()
    assert a.grad is not None


def test_a_map_that_writes_its_buffers_is_refused_in_one_sentence() -> None:
    """torch.func cannot evaluate it. `ImplicitNetwork` hands the buffers in, so there it works."""
    bn, W = nn.BatchNorm1d(4, dtype=torch.float64), contraction(4, 0.5).requires_grad_()
    value = Implicit().attach(lambda z: 0.3 * bn(z @ W.T), normal(6, 4, seed=83), coupled=True)
    with pytest.raises(RuntimeError, match=r"running statistics of a batch norm .* use ImplicitNetwork"):
        value.sum().backward()


def test_a_coupled_map_whose_rows_differ_by_much() -> None:
    """Coupled, the batch is one system: its residual and its status are those of the whole batch."""
    log, x = Reports(), normal(3, 4, seed=88).requires_grad_()
    mix = contraction(3, 0.9)
    mode = Implicit(GMRES(), Tolerance(atol=0, rtol=1e-12, max_steps=100), report=log)
    value = mode.attach(lambda z, x: mix @ z + x, torch.zeros_like(x), (x,), coupled=True)
    g = torch.tensor([[1e-8], [1.0], [1e8]], dtype=torch.float64).expand(3, 4)
    (w,) = torch.autograd.grad(value, x, g)
    assert error(w, torch.linalg.solve(torch.eye(3, dtype=torch.float64) - mix.T, g)) <= 1e-10
    assert log.status == [(Status.CONVERGED,) * 3]


# torch 2.11 meets its own deprecated parts when the compiler is first loaded.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_value_of_implicit_compiles_without_grad_mode() -> None:
    torch.compiler.reset()
    mode, z, x, W = Implicit(), normal(3, 5, seed=100), normal(3, 5, seed=102), contraction(5, 0.7)

    def value(mode: Mode, x: Tensor) -> Tensor:
        return mode.attach(lambda z, x: torch.tanh(z @ W.T + x), z, (x,))

    with torch.no_grad():
        assert torch.equal(torch.compile(value, fullgraph=True, backend="aot_eager")(mode, x), value(mode, x))
