"""Types and memory: what T is given, what a solver works in and keeps, what comes back; TF32's rounding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import Anderson, Broyden, Picard, Solver, Tolerance, solve
from banach.latent import Space
from banach.solve.context import rounding
from contracts import Spy, solvers
from problems import affine, convolution, distance, rotation


@solvers
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_what_T_gets_and_what_the_solver_works_in(solver: Solver, dtype: torch.dtype, autocast: bool) -> None:
    """T gets z0's dtype, under autocast at least float32; the solver at least float32, and no autocast."""
    p, spy = affine(batch=4, dtype=torch.float32 if autocast else dtype), Spy(solver)
    matrix, given, made = p.matrix, set(), set()
    assert matrix is not None
    long = torch.float64 if dtype == torch.float64 else torch.float32

    def T(z: Tensor, b: Tensor) -> Tensor:
        given.add((z.dtype, torch.is_autocast_enabled("cpu")))
        product = z @ matrix.to(z.dtype).T
        made.add(product.dtype)
        return product + b.to(product.dtype)

    tolerance = Tolerance(atol=1e-2 if autocast else 1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        see = lambda k, z: given.add((z.dtype, autocast))  # noqa: E731
        found = solve(T, p.z0.to(dtype), spy, inputs=p.inputs, tolerance=tolerance, on_step=see)
        assert torch.is_autocast_enabled("cpu") is autocast
    kept = long if autocast else dtype
    assert given == {(kept, autocast)}
    assert made == {torch.bfloat16 if autocast and kept == torch.float32 else kept}
    assert (spy.dtypes, spy.autocast) == ({long}, {False})
    assert (found.value.dtype, found.residual.dtype) == (kept, long)
    assert distance(found.value, p.solution) < (0.1 if autocast else 30 * max(1e-3, torch.finfo(dtype).eps))


@pytest.mark.parametrize(
    "solver", [Picard(), Anderson(), Anderson(1, damping=0.4), Broyden(), Broyden(1)], ids=repr
)
def test_a_solver_writes_to_nothing_but_its_memory_and_may_keep_what_it_is_given(solver: Solver) -> None:
    """The numbers of an evaluation were views of memory that the next step writes to."""
    p, spy = affine(), Spy(solver)
    solve(p.T, p.z0, spy, inputs=p.inputs, tolerance=Tolerance(atol=1e-9, max_steps=20))
    assert len(spy.seen) > 3
    for now, before in zip(spy.seen, spy.copies, strict=True):
        assert all(map(torch.equal, now, before))


@pytest.mark.parametrize("solver", [Anderson(memory=3), Broyden(memory=3)], ids=repr)
def test_memory_is_bounded_whatever_max_steps(solver: Solver) -> None:
    p, spy = rotation(batch=2, n=16, gamma=0.99), Spy(solver)
    solve(p.T, p.z0, spy, inputs=p.inputs, tolerance=Tolerance(atol=1e-14, max_steps=200))
    assert len(spy.seen) > 100
    assert len(spy.sizes) == 1
    assert max(spy.sizes) <= 8 * 16 * 2 * (2 + 4 * 3) * 2


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
    p, tolerance, layouts = convolution(batch=4), Tolerance(atol=1e-9), set()
    x = p.inputs[0].contiguous(**last)

    def T(z: Tensor, x: Tensor) -> Tensor:
        layouts.update({z.is_contiguous(**last), x.is_contiguous(**last)})
        return p.T(z, x)

    found = solve(T, p.z0.contiguous(**last), solver, inputs=(x,), tolerance=tolerance, compact=compact)
    assert layouts == {True}
    assert found.value.is_contiguous(**last)
    # T may return another layout than it was given.
    plain = solve(lambda z, x: p.T(z, x).contiguous(**last), p.z0, solver, inputs=p.inputs, tolerance=tolerance)
    assert plain.value.is_contiguous()
    assert plain.steps.tolist() == found.steps.tolist()
    assert max(distance(found.value, p.solution), distance(plain.value, p.solution)) < 1e-7


@solvers
def test_T_may_return_a_transposed_matrix(solver: Solver) -> None:
    p = affine()
    matrix: Any = p.matrix
    T = lambda z, b: (matrix @ z.T).T + b.T.contiguous().T  # noqa: E731
    found = solve(T, p.z0, solver, inputs=p.inputs, tolerance=Tolerance(atol=1e-9))
    assert distance(found.value, p.solution) < 1e-7


class Switch:
    """Stands for torch.backends.cuda.matmul or torch.backends.cudnn, old interface and new (then old is None)."""

    def __init__(self, old: bool | None, new: str = "none") -> None:
        self.old, self.fp32_precision = old, new

    @property
    def allow_tf32(self) -> bool:
        if self.old is None:
            raise RuntimeError("set through the newer interface")
        return self.old


@pytest.mark.parametrize(
    ("matmul", "cudnn", "conv", "allowed"),
    [
        (Switch(False), Switch(False), Switch(False), False),
        (Switch(True), Switch(False), Switch(False), True),
        (Switch(None, "ieee"), Switch(None), Switch(None, "ieee"), False),
        (Switch(None, "tf32"), Switch(None), Switch(None, "ieee"), True),
        (Switch(False), Switch(None), Switch(None, "tf32"), True),
    ],
)
def test_rounding_of_tf32(
    monkeypatch: pytest.MonkeyPatch, matmul: Any, cudnn: Any, conv: Any, allowed: bool
) -> None:
    cudnn.conv = conv
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    on_gpu = replace(Space.of(torch.zeros(1, 1)), device=torch.device("cuda"))
    assert rounding(on_gpu) == (2.0**-10 if allowed else 2.0**-23)
    assert rounding(replace(on_gpu, dtype=torch.float64)) == 2.0**-52, "TF32 is about float32 alone"
    assert rounding(replace(on_gpu, dtype=torch.bfloat16)) == 2.0**-7
    assert rounding(Space.of(torch.zeros(1, 1))) == 2.0**-23, "the CPU has no TF32"
