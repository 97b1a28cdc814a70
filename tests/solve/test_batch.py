"""Who is in the batch: freezing, leaving it, coupled samples, one sample, none, and latents without a width."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import RMS, Euclidean, Solver, Status, Tolerance, WorstPixel, solve
from banach.solve import Norm
from contracts import close, solvers
from problems import Problem, distance, mixed_rates, normal

norms = pytest.mark.parametrize("norm", [RMS(), Euclidean(), WorstPixel()], ids=repr)
couplings = pytest.mark.parametrize("coupled", [False, True])


def useful_work(p: Problem, compact: bool, tolerance: Tolerance) -> float:
    """The share of the rows T was given that still needed a step."""
    rows: list[int] = []

    def T(z: Tensor, given: dict[str, Tensor]) -> Tensor:  # nested inputs are cut too
        rows.append(len(z))
        assert all(len(x) == len(z) for x in given.values())
        return p.T(z, given["q"], given["b"])

    inputs = ({"q": p.inputs[0], "b": p.inputs[1]},)
    found = solve(T, p.z0, inputs=inputs, tolerance=tolerance, compact=compact)
    assert found.converged.all()
    assert distance(found.value, p.solution) < 1e-3
    return int(found.steps.sum()) / sum(rows)


@pytest.mark.parametrize("batch", [16, 256])
def test_compaction_spends_its_work_on_samples_that_need_it(batch: int) -> None:
    p, tolerance = mixed_rates(batch=batch, low=0.2, high=0.95), Tolerance(atol=1e-5, max_steps=1000)
    assert useful_work(p, True, tolerance) >= 0.9
    assert useful_work(p, False, tolerance) < 0.4, "freezing alone: all rows until the slowest is done"


@pytest.mark.parametrize("batch", [3, 6, 20])
def test_an_input_that_all_samples_share_is_refused_where_it_has_as_many_rows(batch: int) -> None:
    """It would be cut with the batch. The patterns here can be cut without an error of a shape."""
    x, patterns = normal(batch, 4) * torch.logspace(-2, 1, batch).double()[:, None], normal(batch, 4, seed=1)

    def T(u: Tensor, x: Tensor, patterns: Tensor) -> Tensor:
        attention = torch.softmax((u[:, None] @ patterns.mT), -1) @ patterns
        return 0.3 * attention.reshape(u.shape) + 0.8 * torch.tanh(u) * torch.sigmoid(x) + x

    how: dict[str, Any] = {"tolerance": Tolerance(atol=1e-8, max_steps=400), "compact": True}
    with pytest.raises(ValueError, match="T is another map then; give what all samples share"):
        solve(T, torch.zeros_like(x), inputs=(x, patterns), **how)
    found = solve(T, torch.zeros_like(x), inputs=(x, patterns.expand(batch, -1, -1)), **how)
    z = torch.zeros_like(x)
    for _ in range(400):
        z = T(z, x, patterns)
    assert found.converged.all()
    assert distance(found.value, z) < 1e-6


def test_T_never_sees_an_empty_batch_when_samples_that_failed_have_left() -> None:
    def T(z: Tensor, q: Tensor) -> Tensor:
        return q * z.reshape(len(z), -1, 2).flatten(1)  # refuses an empty batch

    found = solve(T, torch.ones(2, 4), inputs=(torch.tensor([[1e30], [1e3]]),), compact=True)
    assert found.status == (Status.NONFINITE, Status.NONFINITE)


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
    assert (p.z0 == 0).all(), "the start is left alone"
    close(reused, plain, 1e-6)


@pytest.mark.parametrize("max_steps", [0, 1, 9, 300])
@pytest.mark.parametrize("compact", [False, True])
def test_iterates_and_value_share_their_memory_with_nobody(max_steps: int, compact: bool) -> None:
    p, kept, copies = mixed_rates(batch=16), list[Tensor](), list[Tensor]()

    def see(k: int, z: Tensor) -> None:
        kept.append(z)
        copies.append(z.clone())

    tolerance = Tolerance(max_steps=max_steps)
    found = solve(p.T, p.z0, inputs=p.inputs, tolerance=tolerance, compact=compact, on_step=see)
    found.value.fill_(7)
    assert (p.z0 == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


@solvers
@norms
def test_a_number_is_one_sample(solver: Solver, norm: Norm) -> None:
    z0, tolerance = torch.tensor(0.0, dtype=torch.float64), Tolerance(atol=1e-9, max_steps=100, norm=norm)
    found = solve(torch.cos, z0, solver, tolerance=tolerance)
    assert found.value.shape == ()
    assert found.value.item() == pytest.approx(0.7390851332151607, abs=1e-7)
    assert found.steps.shape == found.residual.shape == (1,)
    assert found.status == (Status.CONVERGED,)


@solvers
@norms
@couplings
@pytest.mark.parametrize("shape", [(0, 3), (0,), (0, 2, 4, 4)])
def test_an_empty_batch(solver: Solver, norm: Norm, coupled: bool, shape: tuple[int, ...]) -> None:
    calls: list[int] = []

    def T(z: Tensor, x: Tensor) -> Tensor:
        calls.append(len(z))
        return z / 2 + x

    z0, how = torch.zeros(shape), {"coupled": coupled, "compact": not coupled, "record": True, "throw": True}
    found: Any = solve(T, z0, solver, inputs=(z0,), tolerance=Tolerance(norm=norm), **how)  # type: ignore[arg-type]
    assert found.value.shape == shape
    assert found.steps.shape == found.residual.shape == (0,)
    assert found.status == ()
    assert found.summary() == "all 0 samples converged"
    assert found.trace.shape == (0, 0)
    assert coupled or calls[0] == 0


@solvers
@norms
@couplings
def test_a_latent_without_a_width(solver: Solver, norm: Norm, coupled: bool) -> None:
    how: dict[str, Any] = {"solver": solver, "tolerance": Tolerance(norm=norm), "coupled": coupled}
    found = solve(lambda z: z, torch.zeros(2, 0), **how)
    assert found.status == (Status.CONVERGED,) * 2
    assert found.residual.tolist() == [0.0, 0.0]
    nest = {"empty": torch.zeros(2, 0), "full": torch.zeros(2, 3)}
    part = solve(lambda z: {"empty": z["empty"], "full": z["full"] / 2 + 1}, nest, **how)
    assert part.converged.all()
    assert (part.value["full"] - 2).abs().max() < 1e-2


@solvers
@pytest.mark.parametrize("every", [1, 4])
def test_coupled_samples_stop_as_one(solver: Solver, every: int) -> None:
    # T(z) = z/4 + mean over the batch / 2 + x: solved sample by sample, mean first.
    x, tolerance = normal(6, 3), Tolerance(max_steps=100, check_every=every)
    T = lambda z: z / 4 + z.mean(0) / 2 + x  # noqa: E731
    found = solve(T, torch.zeros_like(x), solver, tolerance=tolerance, coupled=True)
    assert found.status == (Status.CONVERGED,) * 6
    assert len(found.steps.unique()) == len(found.residual.unique()) == 1
    assert found.steps.shape == found.residual.shape == (6,)
    assert distance(found.value, (2 * x.mean(0) + x) / 0.75) < 1e-3


def test_coupled_residual_is_over_the_whole_batch() -> None:
    # T(z) = q z + b, so the residual of evaluation k is q^(k-1) b, entry by entry.
    p = mixed_rates(batch=6, high=0.8)
    q, b = p.inputs
    expected = [float((q ** (k - 1) * b).square().mean().sqrt()) for k in range(1, 100)]
    n = next(k for k, size in enumerate(expected, 1) if size <= 1e-6)
    tolerance = Tolerance(atol=1e-6, max_steps=99)
    found: Any = solve(p.T, p.z0, inputs=p.inputs, tolerance=tolerance, coupled=True, record=True)
    assert found.steps.tolist() == [n] * 6
    assert found.trace.shape == (n, 6)
    torch.testing.assert_close(found.trace[:, 0], torch.tensor(expected[:n]).to(q), rtol=1e-5, atol=1e-14)


def test_coupled_leaves_need_not_share_an_axis() -> None:
    def T(z: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"pixels": z["pixels"] / 2 + z["shared"].sum(), "shared": z["shared"] / 2 + 1}

    found = solve(T, {"pixels": torch.zeros(6, 2), "shared": torch.zeros(3)}, coupled=True)
    assert found.converged.all()
    assert found.value["shared"].sum() == pytest.approx(6, abs=1e-2)


@couplings
def test_a_lone_vector_is_a_batch_of_numbers_unless_coupled(coupled: bool) -> None:
    b = torch.tensor([1.0, 100.0])
    steps = solve(lambda z: z / 2 + b, torch.zeros(2), coupled=coupled).steps
    assert (steps[0] == steps[1]) if coupled else (steps[0] < steps[1])
