"""Misspelt options are TypeErrors; a bad value gives one sentence that says what was got and what to do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from backward.contracts_backward import MODES, name
from banach import GMRES, JFB, Implicit, Mode, Neumann, NormalCG, Picard, Unroll

BAD: list[tuple[type[Exception], Any, str]] = [
    (ValueError, lambda: Neumann(-1), "order must be a whole number of at least 0, got -1"),
    (ValueError, lambda: Neumann(2.5), "order must be a whole number of at least 0, got 2.5"),  # type: ignore[arg-type]
    (ValueError, lambda: Neumann(True), "order must be a whole number of at least 0, got True"),
    (ValueError, lambda: Unroll(0), "steps must be a whole number of at least 1, got 0"),
    (ValueError, lambda: Unroll(2, damping=1.0), "damping must be a number, at least 0 and below 1, got 1.0"),
    (ValueError, lambda: Unroll(2, damping=-0.1), "damping must be a number, at least 0 and below 1, got -0.1"),
    (ValueError, lambda: GMRES(0), "restart must be a whole number of at least 1, got 0"),
    (TypeError, lambda: Implicit("cg"), "method must be NormalCG.., GMRES.., Picard.. or Anderson.., got 'cg'"),  # type: ignore[arg-type]
    (TypeError, lambda: Implicit(NormalCG), "method must be NormalCG.., .* got <class"),  # type: ignore[arg-type]
    (TypeError, lambda: Implicit(Picard), "method must be NormalCG.., .* got <class"),  # type: ignore[arg-type]
    (TypeError, lambda: Implicit(tolerance=1e-6), "tolerance must be a Tolerance, got 1e-06; write Tolerance"),  # type: ignore[arg-type]
    (ValueError, lambda: Implicit(order=0), "order must be a whole number of at least 1, got 0"),
    (TypeError, lambda: Implicit(report=3), "report must be a function of .* got 3"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("kind", "make", "sentence"), BAD, ids=[sentence for *_, sentence in BAD])
def test_bad_values(kind: type[Exception], make: Any, sentence: str) -> None:
    with pytest.raises(kind, match=f"^{sentence}") as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [JFB, Neumann, Unroll, Implicit, NormalCG, GMRES])
def test_misspelt_options(kind: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'oder'"):
        kind(oder=3)


@pytest.mark.parametrize("mode", MODES, ids=name)
def test_settings_are_frozen_equal_by_value_and_travel(mode: Mode) -> None:
    assert copy.deepcopy(mode) == mode
    assert pickle.loads(pickle.dumps(mode)) == mode
    assert hash(copy.copy(mode)) == hash(mode)
    with pytest.raises(AttributeError):
        mode.order = 3  # type: ignore[attr-defined]


def test_implicit_refuses_a_map_that_changes_its_input() -> None:
    """At once, rather than in the backward pass. (Without `solve` before it nobody else looks.)"""
    W = torch.ones(3, 1, requires_grad=True)
    with pytest.raises(ValueError, match=r"T must keep the shape of its input: \(2, 3\) became \(2, 1\)"):
        Implicit().attach(lambda z: z @ W, torch.zeros(2, 3))
    with pytest.raises(TypeError, match="T must keep the dtype of its input: float32 became float64"):
        Implicit().attach(lambda z: z.double() * W.double().sum(), torch.zeros(2, 3))
    with pytest.raises(TypeError, match="T must keep the structure of z0"):
        Implicit().attach(lambda z: (z * W.sum(),), torch.zeros(2, 3))
