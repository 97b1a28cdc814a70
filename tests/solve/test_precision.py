"""Types and memory layout: what T is given, what the solver works in, what comes back; TF32's rounding."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import Anderson, Broyden, Picard, Solver, Status, Tolerance, solve
from banach.latent import Space
from banach.solve import Memory, Point, run
from banach.solve.context import rounding
from problems import affine, convolution, distance

SOLVERS: list[Solver] = [Picard(), Picard(0.5), Anderson(), Broyden()]
solvers = pytest.mark.parametrize("solver", SOLVERS, ids=repr)


@dataclass
class Spy:
    """A solver that passes on to another, and writes down what it was given."""

    inner: Solver
    dtypes: set[torch.dtype] = field(default_factory=set)
    autocast: set[bool] = field(default_factory=set)

    def start(self, z: Tensor) -> Memory:
        return self.inner.start(z)

    def step(self, memory: Memory, at: Point) -> tuple[Tensor, Memory]:
        proposal, memory = self.inner.step(memory, at)
        self.dtypes |= {part.dtype for part in (at.z, at.Tz, at.r, at.residual, proposal, *memory)}
        self.autocast.add(torch.is_autocast_enabled("cpu"))
        return proposal, memory


@solvers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_T_gets_the_dtype_of_z0_and_the_solver_at_least_float32(solver: Solver, dtype: torch.dtype) -> None:
    p, spy, given = affine(batch=4, dtype=dtype), Spy(solver), set()

    def T(z: Tensor, b: Tensor) -> Tensor:
        given.add(z.dtype)
        return p.T(z, b)

    found = solve(T, p.z0, spy, inputs=p.inputs, tolerance=Tolerance(atol=1e-3))
    assert given == {dtype}
    assert spy.dtypes == {torch.float64 if dtype == torch.float64 else torch.float32}
    assert found.value.dtype == dtype
    assert found.residual.dtype in spy.dtypes
    assert distance(found.value, p.solution) < 30 * max(1e-3, torch.finfo(dtype).eps)


@solvers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_under_autocast_T_gets_float32(solver: Solver, dtype: torch.dtype) -> None:
    p, spy, given, made, inside = affine(batch=4, dtype=torch.float32), Spy(solver), set(), set(), set()

    def T(z: Tensor, b: Tensor) -> Tensor:
        given.add(z.dtype)
        inside.add(torch.is_autocast_enabled("cpu"))
        product = z @ p.matrix.T  # type: ignore[union-attr]
        made.add(product.dtype)
        return product + b.to(product.dtype)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = solve(T, p.z0.to(dtype), spy, inputs=p.inputs, tolerance=Tolerance(atol=1e-2))
        assert torch.is_autocast_enabled("cpu")
    assert given == {torch.float32}
    assert (inside, made) == ({True}, {torch.bfloat16})
    assert (spy.dtypes, spy.autocast) == ({torch.float32}, {False})
    assert found.value.dtype == torch.float32
    assert distance(found.value, p.solution) < 0.1


def test_damping_in_bfloat16_keeps_what_bfloat16_cannot_hold() -> None:
    # z <- .99 z + .01: one step from 1 - 2^-6 moves z by less than half a bfloat16 rounding.
    z0 = torch.full((1, 1), 1 - 2.0**-6, dtype=torch.bfloat16)
    found = solve(lambda z: torch.ones_like(z), z0, Picard(0.99), tolerance=Tolerance(atol=0, max_steps=300))
    assert found.value.item() == 1.0
    assert found.residual.item() == pytest.approx(2.0**-6 * 0.99**299, rel=1e-3)


@solvers
@pytest.mark.parametrize("compact", [False, True])
def test_channels_last_is_kept(solver: Solver, compact: bool) -> None:
    last: Any = {"memory_format": torch.channels_last}
    p = convolution(batch=4)
    x = p.inputs[0].contiguous(**last)
    layouts = set()

    def T(z: Tensor, x: Tensor) -> Tensor:
        layouts.update({z.is_contiguous(**last), x.is_contiguous(**last)})
        return p.T(z, x)

    tolerance = Tolerance(atol=1e-9)
    found = solve(T, p.z0.contiguous(**last), solver, inputs=(x,), tolerance=tolerance, compact=compact)
    assert layouts == {True}
    assert found.value.is_contiguous(**last)
    assert distance(found.value, p.solution) < 1e-7
    plain = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance)
    assert plain.value.is_contiguous()
    assert plain.steps.tolist() == found.steps.tolist()


@solvers
def test_T_may_return_another_layout(solver: Solver) -> None:
    p = convolution(batch=3)
    found = solve(
        lambda z, x: p.T(z, x).contiguous(memory_format=torch.channels_last),
        p.z0,
        solver,
        inputs=p.inputs,
        tolerance=Tolerance(atol=1e-9),
    )
    assert found.value.is_contiguous()
    assert distance(found.value, p.solution) < 1e-7
    q = affine()
    matrix = q.matrix
    assert matrix is not None
    transposed = solve(
        lambda z, b: (matrix @ z.T).T + b.T.contiguous().T,
        q.z0,
        solver,
        inputs=q.inputs,
        tolerance=Tolerance(atol=1e-9),
    )
    assert distance(transposed.value, q.solution) < 1e-7


def test_three_dimensional_channels_last() -> None:
    z0 = torch.ones(2, 3, 2, 4, 5).contiguous(memory_format=torch.channels_last_3d)
    seen = set()

    def T(z: Tensor) -> Tensor:
        seen.add(z.is_contiguous(memory_format=torch.channels_last_3d))
        return z / 2

    solve(T, z0)
    assert seen == {True}


class Switch:
    """Stands for torch.backends.cuda.matmul or torch.backends.cudnn, old interface and new."""

    def __init__(self, old: bool | None, new: str) -> None:
        self.old, self.fp32_precision = old, new

    @property
    def allow_tf32(self) -> bool:
        if self.old is None:
            raise RuntimeError("set through the newer interface")
        return self.old


CASES = [
    (Switch(False, "ieee"), Switch(False, "ieee"), Switch(False, "ieee"), 2.0**-23),
    (Switch(True, "tf32"), Switch(False, "ieee"), Switch(False, "ieee"), 2.0**-10),
    (Switch(False, "ieee"), Switch(True, "tf32"), Switch(True, "tf32"), 2.0**-10),
    (Switch(None, "ieee"), Switch(None, "none"), Switch(None, "ieee"), 2.0**-23),
    (Switch(None, "tf32"), Switch(None, "none"), Switch(None, "ieee"), 2.0**-10),
    (Switch(None, "ieee"), Switch(None, "none"), Switch(None, "tf32"), 2.0**-10),
    (Switch(False, "none"), Switch(None, "none"), Switch(None, "tf32"), 2.0**-10),
]


@pytest.mark.parametrize(("matmul", "cudnn", "conv", "expected"), CASES)
def test_rounding_of_tf32(
    monkeypatch: pytest.MonkeyPatch, matmul: Any, cudnn: Any, conv: Any, expected: float
) -> None:
    cudnn.conv = conv
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    on_gpu = replace(Space.of(torch.zeros(1, 1)), device=torch.device("cuda"))
    assert rounding(on_gpu) == expected
    assert rounding(replace(on_gpu, dtype=torch.float64)) == 2.0**-52, "TF32 is about float32 alone"
    assert rounding(replace(on_gpu, dtype=torch.bfloat16)) == 2.0**-7
    assert rounding(Space.of(torch.zeros(1, 1))) == 2.0**-23, "the CPU has no TF32"


def test_tf32_is_called_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    # The residual is 2^-10 of T, as TF32 leaves it.
    def T(z: Tensor) -> Tensor:
        return torch.where(z > 1.0, 1.0, 1.0 + 2.0**-10)

    monkeypatch.setattr(run, "rounding", lambda space: 2.0**-10)
    assert solve(T, torch.ones(1, 1)).status == (Status.STALLED,)


def test_rounding_under_autocast() -> None:
    space = Space.of(torch.zeros(1, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rounding(Space.of(torch.zeros(1, 1))) == 2.0**-7
        assert rounding(Space.of(torch.zeros(1, 1, dtype=torch.float64))) == 2.0**-52
    with torch.autocast("cpu", dtype=torch.float16):
        assert rounding(Space.of(torch.zeros(1, 1))) == 2.0**-10
    assert rounding(space) == 2.0**-23
