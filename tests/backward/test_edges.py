"""Corners: empty batches, in-place activations after attach, maps that are awkward to differentiate."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backward.contracts_backward import EXACT, MODES, error, name
from backward.systems_backward import Told
from banach import (
    GMRES,
    JFB,
    AdjointWarning,
    Anderson,
    Implicit,
    Mode,
    Neumann,
    NormalCG,
    Picard,
    Status,
    Tolerance,
    Unroll,
)
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


@pytest.mark.parametrize("method", [NormalCG(), GMRES(), Picard(), Anderson()], ids=str)
@pytest.mark.parametrize("check_every", [0, 1])
def test_the_report_of_an_empty_batch(method: Any, check_every: int) -> None:
    told, a = Told(), torch.tensor(0.5, requires_grad=True)
    mode = Implicit(method, Tolerance(atol=0, rtol=1e-6, max_steps=5, check_every=check_every), report=told)
    mode.attach(lambda z: a * z, torch.zeros(0, 4)).sum().backward()
    assert told.products == [0]
    assert told.status == [()]
    assert told.residual[0].shape == (0,)


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


@exact
def test_buffers_handed_in_afresh(mode: Mode) -> None:
    """Batch norm with running statistics, as ImplicitNetwork calls it."""
    bn, W = nn.BatchNorm1d(4, dtype=torch.float64), contraction(4, 0.5).requires_grad_()
    x = normal(6, 4, seed=83)

    def T(z: Tensor, track: bool = True) -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in bn.named_buffers()}
        y = z @ W.T + x
        return 0.3 * (torch.func.functional_call(bn, buffers, (y,)) if track else _standard(y, bn.eps))

    u = torch.zeros(6, 4, dtype=torch.float64)
    for _ in range(200):
        u = T(u).detach()
    g = normal(6, 4, seed=91)
    (found,) = torch.autograd.grad(mode.attach(T, u, coupled=True), W, g)
    (full,) = torch.autograd.grad(Unroll(60).attach(lambda z: T(z, False), u), W, g)
    assert error(found, full) <= 1e-9


def _standard(y: Tensor, eps: float) -> Tensor:
    return (y - y.mean(0)) / (y.var(0, correction=0) + eps).sqrt()


@exact
def test_a_map_that_is_itself_a_gradient(mode: Mode) -> None:
    """A gradient step on an energy: T differentiates inside, by torch.func."""
    A = (torch.eye(4, dtype=torch.float64) + 0.1 * normal(4, 4, seed=84)).requires_grad_()
    b = normal(2, 4, seed=85).requires_grad_()

    def energy(z: Tensor) -> Tensor:
        return 0.5 * (z @ A.T - b).square().sum()

    def T(z: Tensor) -> Tensor:
        return z - 0.4 * torch.func.grad(energy)(z)

    u = torch.linalg.solve(A.detach(), b.detach().T).T
    found = torch.autograd.grad(mode.attach(T, u).sum(), (A, b))
    closed = torch.autograd.grad(torch.linalg.solve(A, b.T).sum(), (A, b))
    for a, c in zip(found, closed, strict=True):
        assert error(a, c) <= 1e-9


@exact
def test_parameters_of_a_module_called_many_times(mode: Mode) -> None:
    """One layer shared by three attaches, each on the value of the one before: a recurrence in one graph."""
    R = nn.Linear(4, 4).double()
    with torch.no_grad():
        R.weight.copy_(contraction(4, 0.5))

    def run(step: Any) -> tuple[Tensor, ...]:
        v = normal(2, 4, seed=86)
        for _ in range(3):
            v = step(torch.tanh(v))
        return torch.autograd.grad(v.square().sum(), tuple(R.parameters()))

    def implicit(v: Tensor) -> Tensor:
        u = torch.linalg.solve(torch.eye(4, dtype=torch.float64) - R.weight, (v + R.bias).T).T
        return mode.attach(lambda z, v: R(z) + v, u, (v,))

    def direct(v: Tensor) -> Tensor:
        return torch.linalg.solve(torch.eye(4, dtype=torch.float64) - R.weight, (v + R.bias).T).T

    for a, b in zip(run(implicit), run(direct), strict=True):
        assert error(a, b) <= 1e-9


@pytest.mark.parametrize("mode", [JFB(), Neumann(2), Unroll(2), Implicit()], ids=name)
def test_eval_mode_has_a_gradient(mode: Mode) -> None:
    """Whether one is attached follows grad mode, never `training`."""
    R = nn.Linear(4, 4).eval()
    value = mode.attach(R, torch.zeros(2, 4))
    value.sum().backward()
    assert R.weight.grad is not None


@every
def test_nothing_to_differentiate(mode: Mode) -> None:
    value = mode.attach(lambda z: 0.5 * z, torch.ones(2, 3, dtype=torch.float64))
    assert not value.requires_grad


@exact
def test_a_frozen_parameter_gets_none(mode: Mode) -> None:
    W, x = contraction(5, 0.6), normal(3, 5, seed=87).requires_grad_()
    mode.attach(lambda z, x: z @ W.T + x, torch.zeros_like(x), (x,)).sum().backward()
    assert W.grad is None
    assert x.grad is not None


def test_a_coupled_map_whose_rows_differ_by_much() -> None:
    """Coupled, the batch is one system: its residual and its status are those of the whole batch."""
    told, x = Told(), normal(3, 4, seed=88).requires_grad_()
    mix = contraction(3, 0.9)
    mode = Implicit(GMRES(), Tolerance(atol=0, rtol=1e-12, max_steps=100), report=told)
    value = mode.attach(lambda z, x: mix @ z + x, torch.zeros_like(x), (x,), coupled=True)
    g = torch.tensor([[1e-8], [1.0], [1e8]], dtype=torch.float64).expand(3, 4)
    (w,) = torch.autograd.grad(value, x, g)
    assert error(w, torch.linalg.solve(torch.eye(3, dtype=torch.float64) - mix.T, g)) <= 1e-10
    assert told.status == [(Status.CONVERGED,) * 3]


def test_samples_that_mix_but_are_not_said_to() -> None:
    """The residual is that of the whole map all the same: Picard finds the answer, NormalCG says it did not."""
    mix, g = contraction(3, 0.7), normal(3, 4, seed=90) * torch.tensor([[1e-3], [1.0], [1e3]], dtype=torch.float64)
    exact_w = torch.linalg.solve(torch.eye(3, dtype=torch.float64) - mix.T, g)

    def w(method: Any, told: Told) -> Tensor:
        x = normal(3, 4, seed=89).requires_grad_()
        mode = Implicit(method, Tolerance(atol=0, rtol=1e-13, max_steps=200), report=told)
        value = mode.attach(lambda z, x: mix @ z + x, torch.zeros_like(x), (x,))
        return torch.autograd.grad(value, x, g)[0]

    told = Told()
    assert error(w(Picard(), told), exact_w) <= 1e-10
    with pytest.warns(AdjointWarning, match="T mixes samples: pass coupled=True"):
        found = w(NormalCG(), told)
    residual = (g - found + mix.T @ found).square().mean(1).sqrt()
    assert torch.allclose(told.residual[1], residual, rtol=1e-9, atol=1e-15)
