"""Fused steps of Picard and Anderson, in Triton's interpreter, against plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import banach.kernels
from banach import RMS, Anderson, Euclidean, Picard, Tolerance, solve
from banach.fast.iteration import Iteration
from kernels.cases import plain_picard_step

pytest.importorskip("triton")


def differences() -> list[float]:
    """Iterate nests of two tensors, halved batches among them, with a sample that diverges; in both ways."""
    worst, own_step = [], banach.kernels.picard_step
    for dtype, damping, norm, rtol in (
        (torch.float32, 0.0, RMS(), 1e-4),
        (torch.float64, 0.3, Euclidean(), 0.0),
        (torch.float32, 0.0, Euclidean(), 1e-3),
    ):
        v = torch.linspace(0.1, 0.9, 12, dtype=dtype)[:, None].repeat(1, 5)
        v[3] = 30.0
        pair = v, v[:, :3, None, None].repeat(1, 1, 2, 2).to(memory_format=torch.channels_last)
        tolerance = Tolerance(atol=1e-5, rtol=rtol, max_steps=25, norm=norm)
        start = tuple(map(torch.zeros_like, pair))

        def R(u: Any, v: Any) -> Any:
            return v[0] * u[0] + v[0], (v[1] * u[1]).contiguous() + 1

        found = []
        for banach.kernels.picard_step in (own_step, plain_picard_step):
            found.append(Iteration(R, Picard(damping), tolerance)(start, pair))
        a, b = ([*one.value, one.residual, one.steps, one.converged, one.nonfinite] for one in found)
        pairs = zip(a, b, strict=True)  # relative: a sample that diverges is large
        gaps = ((x.double() - y.double()).abs() / (1 + y.double().abs()) for x, y in pairs)
        worst.append(max(float(gap.max()) for gap in gaps))
    return worst


def anderson_differences() -> list[float]:
    """Iterate a tensor by Anderson, in several settings, also where it falls back to Picard; in both ways."""
    worst = []
    draw = torch.Generator().manual_seed(0)
    A = torch.randn(9, 6, 6, generator=draw, dtype=torch.float64)
    A = 0.9 * A / torch.linalg.matrix_norm(A, 2)[:, None, None]
    A[4] *= 30
    v = torch.randn(9, 6, generator=draw, dtype=torch.float64)
    for solver, steps, norm, rtol in (
        (Anderson(3), 30, RMS(), 0.0),
        (Anderson(5, damping=0.2, bound=float("inf")), 12, Euclidean(), 1e-4),
        (Anderson(1, bound=1.5, patience=3), 30, Euclidean(), 0.0),
    ):
        tolerance = Tolerance(atol=1e-6, rtol=rtol, max_steps=steps, norm=norm)

        def R(u: Any, v: Any) -> Any:
            return torch.tanh((A @ u[..., None])[..., 0]) + v

        made: Any = Iteration(R, solver, tolerance)(torch.zeros_like(v), v)
        own: Any = solve(R, torch.zeros_like(v), solver, inputs=(v,), tolerance=tolerance)
        pairs = [(made.value[own.converged], own.value[own.converged]), (made.steps, own.steps)]
        pairs += [(made.converged, own.converged), (made.residual * own.converged, own.residual * own.converged)]
        worst.append(max(float((x.double() - y.double()).abs().max()) for x, y in pairs))
    return worst


def test_it_is_the_plain_step() -> None:
    code = "import banach.fast.iteration as p, kernels.test_picard as t; p.LARGE = 1; import json; "
    code += "import banach.kernels.steps as k; k._BLOCK = k._PRODUCTS = k._MIX = 2; "
    code += "print(json.dumps(t.differences() + t.anderson_differences()))"
    path = os.pathsep.join(("src", "tests"))
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert max(json.loads(ran.stdout)) < 1e-5
