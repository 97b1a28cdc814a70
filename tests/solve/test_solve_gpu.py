"""On a GPU: nothing is asked of the host between checks, one round trip at each, a fixed depth can be captured."""

import warnings
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import Solver, Status, Tolerance, solve
from banach.latent import map_leaves
from contracts import close, solvers
from problems import Problem, affine, distance, mixed_rates, nested, tanh_network, turns_nan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


def on_gpu(p: Problem) -> Problem:
    """The inputs of a problem on the GPU; T must close over nothing."""
    z0, inputs = map_leaves(Tensor.cuda, p.z0), map_leaves(Tensor.cuda, p.inputs)
    return replace(p, z0=z0, inputs=inputs)


def dense(batch: int = 6) -> Problem:
    """`affine`, its matrix as one more input."""
    p = affine(batch)
    assert p.matrix is not None
    return replace(
        p,
        T=lambda z, b, A: torch.baddbmm(b[:, None], z[:, None], A.mT)[:, 0],
        inputs=(*p.inputs, p.matrix.expand(batch, -1, -1).contiguous()),
    )


@solvers
@pytest.mark.parametrize("rtol", [0.0, 1e-6])
def test_a_fixed_depth_syncs_with_host_for_nothing(solver: Solver, rtol: float) -> None:
    p, tolerance = on_gpu(dense()), Tolerance(atol=1e-3, rtol=rtol, max_steps=40, check_every=0)
    solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance)  # libraries are set up here
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.converged.all()


@solvers
@pytest.mark.parametrize(("every", "steps", "trips"), [(1, 6, 6), (2, 6, 3), (1, 0, 0)])
def test_a_check_is_one_round_trip(solver: Solver, every: int, steps: int, trips: int) -> None:
    p, tolerance = on_gpu(dense()), Tolerance(atol=0, max_steps=steps, check_every=every)
    solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as asked:
            warnings.simplefilter("always")
            solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in asked if "synchronizing" in str(w.message)]) == trips


@solvers
def test_a_fixed_depth_can_be_captured(solver: Solver) -> None:
    p, tolerance = on_gpu(dense()), Tolerance(atol=1e-6, max_steps=25, check_every=0)
    b = p.inputs[0].clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        solve(p.T, p.z0, solver, inputs=(b, *p.inputs[1:]), tolerance=tolerance)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = solve(p.T, p.z0, solver, inputs=(b, *p.inputs[1:]), tolerance=tolerance)
    for scale in (1.0, -3.0):
        b.copy_(scale * p.inputs[0])
        graph.replay()
        eager = solve(p.T, p.z0, solver, inputs=(b, *p.inputs[1:]), tolerance=tolerance)
        assert captured.steps.tolist() == eager.steps.tolist()
        assert distance(captured.value.cpu(), eager.value.cpu()) < 1e-12


@solvers
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("compact", [False, True])
def test_the_answer_is_that_of_the_cpu(solver: Solver, compact: bool, every: int) -> None:
    tolerance = Tolerance(atol=1e-8, max_steps=400, check_every=every)
    for p in (dense(), mixed_rates(batch=20, high=0.9)):
        q = on_gpu(p)
        here = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance, compact=compact)
        there = solve(q.T, q.z0, solver, inputs=q.inputs, tolerance=tolerance, compact=compact)
        parts = {field.name: getattr(there, field.name) for field in fields(there)}
        tensors: dict[str, Any] = {name: part.cpu() for name, part in parts.items() if isinstance(part, Tensor)}
        close(replace(there, **tensors), here, 1e-8)


@solvers
@pytest.mark.parametrize("compact", [False, True])
def test_nan_and_nests(solver: Solver, compact: bool) -> None:
    base = turns_nan()
    matrix = base.matrix
    assert matrix is not None
    A = matrix.cuda()

    def T(z: Tensor, b: Tensor, u: Tensor, reach: Tensor) -> Tensor:
        close_by = torch.linalg.vector_norm(z - u, dim=1) < reach
        return torch.where(close_by[:, None], torch.nan, z @ A.T + b)

    p = on_gpu(replace(base, T=T))
    tolerance = Tolerance(atol=1e-8, max_steps=80)
    found = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance, compact=compact)
    assert [s is Status.NONFINITE for s in found.status] == [i in (1, 4) for i in range(6)]
    assert p.closed(found.value).isfinite().all()
    nest = map_leaves(Tensor.cuda, nested().z0)
    halves = solve(lambda z: map_leaves(lambda leaf: leaf / 2 + 1, z), nest, solver)
    assert halves.converged.all()
    assert halves.value["level"].is_cuda


def test_tf32_stalls_and_says_so() -> None:
    p = tanh_network(batch=32, n=256, gamma=0.95, dtype=torch.float32)
    W = (torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) / 32).cuda()
    x = p.inputs[0].cuda()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        T, tolerance = lambda z, x: torch.tanh(z @ W + x), Tolerance(atol=1e-9, max_steps=1000)
        found = solve(T, torch.zeros_like(x), inputs=(x,), tolerance=tolerance)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert set(found.status) <= {Status.STALLED, Status.CONVERGED}
    assert Status.STALLED in found.status
    assert int(found.steps.max()) < 200
