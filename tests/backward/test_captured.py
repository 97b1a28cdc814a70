"""The adjoint equation in a captured backward pass: its loop runs on the device."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from banach import AdjointWarning, Anderson, Broyden, Implicit, NormalCG, Picard, Tolerance
from banach.solve.context import loops_by
from banach.solve.device import loop_eagerly

CASES = [(NormalCG(), -1.5), (Picard(), -1.5), (Anderson(6), -1.5)]
CASES += [(method, 0.4) for method in (NormalCG(), Picard(), Anderson(3), Broyden(4))]


@pytest.mark.parametrize(("method", "slope"), CASES, ids=repr)
def test_a_captured_adjoint_is_the_same(method: Any, slope: float) -> None:
    """Where Picard diverges, a captured one falls back to w = g too."""
    draw = torch.Generator().manual_seed(0)
    A = torch.randn(6, 6, generator=draw, dtype=torch.float64)
    A = slope * (A + A.T) / torch.linalg.matrix_norm(A + A.T, 2)
    z_star, mode = (
        torch.zeros(3, 6, dtype=torch.float64),
        Implicit(method, Tolerance(atol=0, rtol=1e-10, max_steps=500)),
    )
    g = torch.randn(3, 6, generator=draw, dtype=torch.float64)
    grads = []
    for captured in (False, True):
        v = torch.zeros(3, 6, dtype=torch.float64, requires_grad=True)
        with loops_by(loop_eagerly) if captured else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore", AdjointWarning)
            mode.attach(lambda z, v: z @ A + v, z_star, (v,)).backward(g)
        grads.append(v.grad)
    exact = torch.linalg.solve(torch.eye(6, dtype=torch.float64) - A.T, g.T).T
    diverges = slope == -1.5 and isinstance(method, Picard)
    if diverges:
        torch.testing.assert_close(grads[1], g)
    else:
        torch.testing.assert_close(grads[1], exact, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(grads[0], exact, rtol=1e-8, atol=1e-8)
