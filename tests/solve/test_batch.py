"""Who is in the batch: freezing, leaving it, coupled samples, one sample, none, and latents without a width."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import RMS, Anderson, Broyden, Euclidean, Picard, Solver, Status, Tolerance, WorstPixel, solve
from banach.latent import leaves
from banach.solve import Norm
from contracts import close, replay
from problems import Problem, distance, mixed_rates

SOLVERS: list[Solver] = [Picard(), Picard(0.5), Anderson(), Broyden()]
NORMS: list[Norm] = [RMS(), Euclidean(), WorstPixel()]
solvers = pytest.mark.parametrize("solver", SOLVERS, ids=repr)
norms = pytest.mark.parametrize("norm", NORMS, ids=repr)


def useful_work(p: Problem, compact: bool, tolerance: Tolerance) -> float:
    """The share of the rows T was given that still needed a step."""
    rows: list[int] = []

    def T(z: Tensor, *inputs: Tensor) -> Tensor:
        rows.append(len(z))
        assert all(len(x) == len(z) for x in inputs)
        return p.T(z, *inputs)

    found = solve(T, p.z0, inputs=p.inputs, tolerance=tolerance, compact=compact)
    assert found.converged.all()
    assert distance(found.value, p.solution) < 1e-3
    return int(found.steps.sum()) / sum(rows)


@pytest.mark.parametrize("batch", [16, 64, 256])
def test_compaction_spends_its_work_on_samples_that_need_it(batch: int) -> None:
    p, tolerance = mixed_rates(batch=batch, low=0.2, high=0.95), Tolerance(atol=1e-5, max_steps=1000)
    assert useful_work(p, True, tolerance) >= 0.9
    assert useful_work(p, False, tolerance) < 0.4, "freezing alone: all rows until the slowest is done"


def test_a_frozen_sample_keeps_its_value() -> None:
    p = mixed_rates(batch=5)
    seen = replay(p, Picard(), Tolerance(atol=1e-4, max_steps=200))
    for i, n in enumerate(seen.solution.steps.tolist()):
        assert all(torch.equal(z[i], seen.solution.value[i]) for z in seen.iterates[n:])
        assert not torch.equal(seen.iterates[n - 1][i], seen.solution.value[i])


@solvers
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("every", [1, 3, 0])
def test_T_may_write_every_value_into_the_same_memory(solver: Solver, compact: bool, every: int) -> None:
    """As a captured graph does: what it returned last is overwritten by the next evaluation."""
    p = mixed_rates(batch=9, high=0.8)
    tolerance = Tolerance(atol=1e-6, max_steps=150, check_every=every)
    plain = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance)
    memory = torch.empty_like(p.z0)

    def T(z: Tensor, *inputs: Tensor) -> Tensor:
        memory.fill_(math.nan)
        return memory[: len(z)].copy_(p.T(z, *inputs))

    reused = solve(T, p.z0, solver, inputs=p.inputs, tolerance=tolerance, compact=compact)
    assert plain.converged.all()
    close(reused, plain, 1e-6)
    kept: list[Tensor] = []
    again = solve(T, p.z0, solver, inputs=p.inputs, tolerance=tolerance, on_step=lambda k, z: kept.append(z))
    assert distance(again.value, plain.value) < 1e-6
    assert all(z.isfinite().all() for z in kept)


def test_iterates_kept_by_on_step_are_not_overwritten() -> None:
    p = mixed_rates(batch=16)
    kept: list[Tensor] = []
    copies: list[Tensor] = []

    def see(k: int, z: Tensor) -> None:
        kept.append(z)
        copies.append(z.clone())

    solve(p.T, p.z0, inputs=p.inputs, tolerance=Tolerance(max_steps=300), compact=True, on_step=see)
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_compaction_cuts_nested_inputs() -> None:
    p = mixed_rates(batch=12)
    q, b = p.inputs
    sizes = set()

    def T(z: Tensor, pair: dict[str, Tensor]) -> Tensor:
        sizes.add(len(z))
        return p.T(z, pair["q"], pair["b"])

    found = solve(T, p.z0, inputs=({"q": q, "b": b},), tolerance=Tolerance(max_steps=500), compact=True)
    assert found.converged.all()
    assert len(sizes) > 5


@solvers
@norms
def test_a_number_is_one_sample(solver: Solver, norm: Norm) -> None:
    found = solve(
        lambda z: z.cos(),
        torch.tensor(0.0, dtype=torch.float64),
        solver,
        tolerance=Tolerance(atol=1e-9, max_steps=100, norm=norm),
    )
    assert found.value.shape == ()
    assert found.value.item() == pytest.approx(0.7390851332151607, abs=1e-7)
    assert found.steps.shape == found.residual.shape == (1,)
    assert found.status == (Status.CONVERGED,)


@solvers
@norms
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("shape", [(0, 3), (0,), (0, 2, 4, 4)])
def test_an_empty_batch(solver: Solver, norm: Norm, coupled: bool, shape: tuple[int, ...]) -> None:
    found = solve(
        lambda z: z / 2, torch.zeros(shape), solver, tolerance=Tolerance(norm=norm), coupled=coupled, record=True
    )
    assert found.value.shape == shape
    assert found.steps.shape == found.residual.shape == (0,)
    assert found.status == ()
    assert found.summary() == "all 0 samples converged"
    assert found.trace is not None
    assert found.trace.shape == (0, 0)


def test_an_empty_batch_compacted() -> None:
    found = solve(lambda z, x: z / 2 + x, torch.zeros(0, 3), inputs=(torch.zeros(0, 3),), compact=True, throw=True)
    assert found.value.shape == (0, 3)


@solvers
@norms
@pytest.mark.parametrize("coupled", [False, True])
def test_a_latent_without_a_width(solver: Solver, norm: Norm, coupled: bool) -> None:
    found = solve(lambda z: z, torch.zeros(2, 0), solver, tolerance=Tolerance(norm=norm), coupled=coupled)
    assert found.status == (Status.CONVERGED,) * 2
    assert found.residual.tolist() == [0.0, 0.0]
    nest = {"empty": torch.zeros(2, 0), "full": torch.zeros(2, 3)}
    part = solve(
        lambda z: {"empty": z["empty"], "full": z["full"] / 2 + 1},
        nest,
        solver,
        tolerance=Tolerance(norm=norm),
        coupled=coupled,
    )
    assert part.converged.all()
    assert (part.value["full"] - 2).abs().max() < 1e-2


@pytest.mark.parametrize("make", [tuple, list])
def test_nests_come_back_as_they_were(make: Any) -> None:
    z0 = make([torch.zeros(2, 3), {"b": torch.zeros(2), "a": torch.zeros(2, 1)}])

    def T(z: Any) -> Any:
        first, rest = z
        return first / 2 + 1, {"a": rest["a"] / 2 + 2, "b": rest["b"] / 2 + 3}  # keys in another order

    found = solve(T, z0, tolerance=Tolerance(atol=1e-6))
    assert type(found.value) is type(z0)
    assert list(found.value[1]) == ["b", "a"]
    assert [round(leaf.mean().item(), 3) for leaf in leaves(found.value)] == [2.0, 6.0, 4.0]
