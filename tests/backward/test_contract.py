"""Every mode on every map: the contract; corners, maps that are awkward to differentiate, and bad options."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backward.contracts_backward import CHECKS, MODES, name
from backward.maps_backward import Case, all_cases
from banach import (
    GMRES,
    RMS,
    Anderson,
    Broyden,
    Euclidean,
    Implicit,
    Mode,
    Neumann,
    NormalCG,
    Picard,
    Tolerance,
    Unroll,
)
from problems import contraction, normal

every = pytest.mark.parametrize("mode", MODES, ids=name)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("mode", MODES, ids=name)
def test_contract(mode: Mode, case: Case, check: Callable[[Mode, Case], None]) -> None:
    check(mode, case)


# Corners.


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


@every
def test_an_in_place_activation_right_after_attach(mode: Mode) -> None:
    """As an S that begins with ReLU(inplace=True) does. tanh keeps its own output: Implicit hands out a copy."""
    last = torch.tanh if isinstance(mode, Implicit) else nn.Identity()

    def run(activation: Any) -> tuple[Tensor, ...]:
        W, x = contraction(5, 0.6).requires_grad_(), normal(3, 5, seed=80).requires_grad_()
        z = normal(3, 5, seed=82)
        y = activation(mode.attach(lambda z, x: last(z @ W.T + x), z, (x,)))
        with torch.no_grad():
            activation(mode.attach(lambda z: 0.5 * z - 1, z))
        assert torch.equal(z, normal(3, 5, seed=82))
        return y.detach(), *torch.autograd.grad(y.square().sum(), (W, x))

    for found, expected in zip(run(nn.ReLU(inplace=True)), run(nn.ReLU()), strict=True):
        assert torch.equal(found, expected)


def test_a_map_that_writes_its_buffers_is_refused_in_one_sentence() -> None:
    """torch.func cannot evaluate it. `ImplicitNetwork` hands the buffers in, so there it works."""
    bn, W = nn.BatchNorm1d(4, dtype=torch.float64), contraction(4, 0.5).requires_grad_()
    value = Implicit().attach(lambda z: 0.3 * bn(z @ W.T), normal(6, 4, seed=83), coupled=True)
    with pytest.raises(RuntimeError, match=r"running statistics of a batch norm .* use ImplicitNetwork"):
        value.sum().backward()


# torch 2.11 meets its own deprecated parts when the compiler is first loaded.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_value_of_implicit_compiles_without_grad_mode() -> None:
    torch.compiler.reset()
    mode, z, x, W = Implicit(), normal(3, 5, seed=100), normal(3, 5, seed=102), contraction(5, 0.7)

    def value(mode: Mode, x: Tensor) -> Tensor:
        return mode.attach(lambda z, x: torch.tanh(z @ W.T + x), z, (x,))

    with torch.no_grad():
        assert torch.equal(torch.compile(value, fullgraph=True, backend="aot_eager")(mode, x), value(mode, x))


# Options: a misspelt one is a TypeError; a bad value gives one sentence that says what was got and what to do.

BAD: list[tuple[type[Exception], Any, str]] = [
    (ValueError, lambda: Neumann(-1), "order must be a whole number, at least 0, got -1"),
    (ValueError, lambda: Neumann(True), "order must be a whole number, at least 0, got True"),
    (ValueError, lambda: Unroll(0), "steps must be a whole number, at least 1, got 0"),
    (ValueError, lambda: Unroll(2, damping=1.0), "damping must be a number, at least 0 and below 1, got 1.0"),
    (ValueError, lambda: GMRES(0), "restart must be a whole number, at least 1, got 0"),
    (TypeError, lambda: Implicit("cg"), "method must be NormalCG.., .* or another solver, got 'cg'"),  # type: ignore[arg-type]
    (TypeError, lambda: Implicit(NormalCG), "method must be NormalCG.., .* got <class"),  # type: ignore[arg-type]
    (TypeError, lambda: Implicit(tolerance=1e-6), "tolerance must be a Tolerance.atol=0, .*, got 1e-06"),  # type: ignore[arg-type]
    (TypeError, lambda: Implicit(report=3), "report must be a function of .* got 3"),  # type: ignore[arg-type]
    (ValueError, lambda: Implicit(order=0), "order must be a whole number, at least 1, got 0"),
]


@pytest.mark.parametrize(("kind", "make", "sentence"), BAD, ids=[sentence for *_, sentence in BAD])
def test_bad_values(kind: type[Exception], make: Any, sentence: str) -> None:
    with pytest.raises(kind, match=f"^{sentence}") as caught:
        make()
    assert "\n" not in str(caught.value)


SETTINGS = [*MODES, Tolerance(), Picard(0.1), Anderson(memory=3), Broyden(memory=4), RMS()]


@pytest.mark.parametrize("thing", SETTINGS, ids=str)
def test_settings_are_frozen_equal_by_value_and_travel(thing: Any) -> None:
    assert copy.deepcopy(thing) == pickle.loads(pickle.dumps(thing)) == thing
    assert hash(copy.copy(thing)) == hash(thing)
    assert thing != Euclidean()
    with pytest.raises(AttributeError):
        thing.order = 3


def test_implicit_refuses_a_map_that_changes_its_input() -> None:
    """At once, rather than in the backward pass. (Without `solve` before it nobody else looks.)"""
    W = torch.ones(3, 1, requires_grad=True)
    with pytest.raises(ValueError, match=r"T must keep the shape of its input: expected \(2, 3\), got \(2, 1\)"):
        Implicit().attach(lambda z: z @ W, torch.zeros(2, 3))
    with pytest.raises(TypeError, match="T must keep the dtype of its input: expected float32, got float64"):
        Implicit().attach(lambda z: z.double() * W.double().sum(), torch.zeros(2, 3))
    with pytest.raises(TypeError, match="T must keep the structure of z0"):
        Implicit().attach(lambda z: (z * W.sum(),), torch.zeros(2, 3))
