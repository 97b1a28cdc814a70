"""A fused Picard step, in Triton's interpreter, against plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from banach import RMS, Euclidean, Picard, Tolerance
from banach.fast.picard import PicardLoop

pytest.importorskip("triton")


def differences() -> list[float]:
    """Iterate nests of two tensors, halved batches among them, with a sample that diverges; in both ways."""
    worst = []
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

        found = [PicardLoop(R, Picard(damping), tolerance, fused=fused)(start, pair) for fused in (False, True)]
        a, b = ([*one.value, one.residual, one.steps, one.converged, one.nonfinite] for one in found)
        worst.append(max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True)))
    return worst


def test_it_is_the_plain_step() -> None:
    code = "import banach.fast.picard as p, kernels.test_picard as t; p.LARGE = 1; import json; "
    code += "import banach.kernels.picard as k; k._BLOCK = 2; "
    code += "print(json.dumps(t.differences()))"
    path = os.pathsep.join(("src", "tests"))
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert max(json.loads(ran.stdout)) < 1e-5
