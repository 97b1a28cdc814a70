"""torch.compile(fullgraph=True) of attach, for the modes that are plain autograd: all is as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backward.contracts_backward import error, name
from banach import JFB, Implicit, Mode, Neumann, Unroll
from problems import contraction, normal

# torch 2.11 meets its own deprecated parts when the compiler is first loaded.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
PLAIN = [JFB(), Neumann(3), Unroll(3), Unroll(2, damping=0.3), Unroll(2, checkpoint=True)]


def passes(mode: Mode, W: Tensor, x: Tensor, z: Tensor) -> Tensor:
    return mode.attach(lambda z, x: torch.tanh(z @ W.T + x), z, (x,))


@pytest.mark.parametrize("mode", PLAIN, ids=name)
def test_fullgraph(mode: Mode) -> None:
    torch.compiler.reset()
    z, g = normal(3, 5, seed=100), normal(3, 5, seed=101)
    W, x = contraction(5, 0.7).requires_grad_(), normal(3, 5, seed=102).requires_grad_()
    compiled = torch.compile(passes, fullgraph=True, backend="aot_eager")
    value, eager = compiled(mode, W, x, z), passes(mode, W, x, z)
    assert torch.equal(value, eager)
    for a, b in zip(torch.autograd.grad(value, (W, x), g), torch.autograd.grad(eager, (W, x), g), strict=True):
        assert error(a, b) <= 1e-14


def test_a_nest_compiles() -> None:
    torch.compiler.reset()
    W = contraction(4, 0.7).requires_grad_()

    def run(z: dict[str, Tensor]) -> dict[str, Tensor]:
        return Neumann(2).attach(lambda z: {"b": z["a"] @ W.T, "a": torch.tanh(z["b"] @ W.T)}, z)

    z = {"a": normal(2, 4, seed=103), "b": normal(2, 4, seed=104)}
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    (a,) = torch.autograd.grad(compiled(z)["a"].square().sum(), W)
    (b,) = torch.autograd.grad(run(z)["a"].square().sum(), W)
    assert error(a, b) <= 1e-14


def test_implicit_around_a_compiled_T() -> None:
    """Implicit itself loops on the host; what is worth compiling is T, and that it can be."""
    torch.compiler.reset()
    z, g = normal(3, 5, seed=100), normal(3, 5, seed=101)
    W, x = contraction(5, 0.7).requires_grad_(), normal(3, 5, seed=102).requires_grad_()

    def T(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ W.T + x)

    compiled = torch.compile(T, backend="aot_eager")
    (a,) = torch.autograd.grad(Implicit().attach(compiled, z, (x,)), W, g)
    (b,) = torch.autograd.grad(Implicit().attach(T, z, (x,)), W, g)
    assert error(a, b) <= 1e-12


def test_the_value_of_implicit_compiles_without_grad_mode() -> None:
    torch.compiler.reset()
    mode, z, x, W = Implicit(), normal(3, 5, seed=100), normal(3, 5, seed=102), contraction(5, 0.7)
    compiled = torch.compile(passes, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(mode, W, x, z), passes(mode, W, x, z))
