"""problems x solvers x dtypes x batch sizes: every solver keeps the contract on every fixed point we know."""

from collections.abc import Callable

import pytest
import torch

import contracts
import problems
from banach import Anderson, Broyden, Picard, Solver

SOLVERS: list[Solver] = [
    Picard(),
    Picard(damping=0.3),
    Anderson(),
    Anderson(memory=1),
    Anderson(memory=3, damping=0.2),
    Broyden(),
    Broyden(memory=2),
]
PROBLEMS: dict[str, Callable[..., problems.Problem]] = {
    "affine": problems.affine,
    "tanh": problems.tanh_network,
    "relu": problems.relu_network,
    "convolution": problems.convolution,
    "toy": problems.toy,
    "nested": problems.nested,
    "constant": problems.constant,
    "mixed_rates": lambda batch, dtype: problems.mixed_rates(batch, high=0.8, dtype=dtype),
}
ATOL = {torch.float64: 1e-9, torch.float32: 2e-5}
CONTRACTS = [contracts.finds, contracts.does_not_depend_on_checks, contracts.same_alone, contracts.same_compacted]

solvers = pytest.mark.parametrize("solver", SOLVERS, ids=repr)
names = pytest.mark.parametrize("name", PROBLEMS)
dtypes = pytest.mark.parametrize("dtype", ATOL, ids=str)


@solvers
@names
@dtypes
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_contract(contract: Callable[..., None], solver: Solver, name: str, dtype: torch.dtype) -> None:
    contract(solver, PROBLEMS[name](batch=5, dtype=dtype), ATOL[dtype])


@solvers
@names
def test_reports_what_happened(solver: Solver, name: str) -> None:
    contracts.reports_what_happened(solver, PROBLEMS[name](batch=4, dtype=torch.float64), 1e-4)


@solvers
@names
@pytest.mark.parametrize("batch", [0, 1, 33])
def test_any_batch_size(solver: Solver, name: str, batch: int) -> None:
    contracts.finds(solver, PROBLEMS[name](batch=batch, dtype=torch.float64), 1e-9)
