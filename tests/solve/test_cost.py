"""What a step costs beside T: kernels, allocations of the latent, host syncs; compile, export, torch.func."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from benchmarks.counting import Calls
from torch import Tensor

from banach import RMS, Anderson, ImplicitNetwork, Picard, Solver, Status, Tolerance, WorstPixel, solve
from banach.solve import Norm, state
from banach.solve.run import SolveRun
from contracts import solvers
from problems import affine, distance

SHAPE = (4, 3, 8, 8)
LAST = torch.ones(SHAPE).contiguous(memory_format=torch.channels_last)
# PyTorch's own, where its compiler is first imported.
torch_warns = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


def totals(
    solver: Solver, steps: int, z0: Tensor, *, coupled: bool = False, **settings: Any
) -> tuple[int, int, int]:
    """Return kernels, allocations and syncs of so many steps of z -> q z, another rate for every entry."""
    calls = Calls(z0.numel())
    rates = torch.linspace(0.1, 0.95, z0.numel()).view_as(z0.contiguous()) * torch.ones_like(z0)
    T, tolerance = calls.without(lambda z: z * rates), Tolerance(atol=0, max_steps=steps, **settings)
    with calls:
        found = solve(T, z0, solver, tolerance=tolerance, coupled=coupled)
    assert (found.steps == steps).all(), "nobody is done before the end, or nothing is measured"
    return calls.totals()


def per_step(solver: Solver, z0: Tensor, **settings: Any) -> tuple[int, ...]:
    """Return the most that any one step, from the third on, adds: kernels, allocations, syncs."""
    counts = [totals(solver, n, z0, **settings) for n in range(2, 15)]
    return tuple(max(after[i] - before[i] for before, after in pairwise(counts)) for i in range(3))


@pytest.mark.parametrize("check_every", [0, 1, 3])
@pytest.mark.parametrize(
    "z0", [torch.ones(4, 200), torch.ones(SHAPE), LAST], ids=["rows", "image", "channels_last"]
)
@pytest.mark.parametrize(
    ("solver", "rtol", "kernels", "allocations"),
    [(Picard(), 0.0, 10, 2), (Picard(), 1e-12, 12, 2), (Anderson(memory=5), 0.0, 25, 3)],
)
def test_figures_of_one_step(
    solver: Solver, rtol: float, kernels: int, allocations: int, z0: Tensor, check_every: int
) -> None:
    found = per_step(solver, z0, rtol=rtol, check_every=check_every)
    assert found[0] <= kernels
    assert found[1] <= allocations
    assert found[2] == (check_every > 0), "a host check reads once"


@pytest.mark.parametrize(("rtol", "kernels"), [(0.0, 3), (1e-12, 6)])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("norm", [RMS(), WorstPixel()], ids=repr)
def test_a_step_that_the_host_watches(norm: Norm, coupled: bool, rtol: float, kernels: int) -> None:
    """Picard: a difference, its norm (of pixels: two kernels), a copy; with rtol T(z)'s norm and the excess."""
    pixels = (1 + (rtol > 0)) * isinstance(norm, WorstPixel)
    assert per_step(Picard(), torch.ones(SHAPE), rtol=rtol, norm=norm, coupled=coupled) == (kernels + pixels, 2, 1)


@solvers
@pytest.mark.parametrize("coupled", [False, True])
def test_a_fixed_depth_needs_no_data_at_all(solver: Solver, coupled: bool) -> None:
    """On the meta device there are no values: an `.item()`, a branch or a copy to the host would raise."""
    z0 = torch.zeros(4, 3, device="meta")
    tolerance = Tolerance(max_steps=15, rtol=1e-3, check_every=0)
    found = solve(lambda z: z / 2, z0, solver, tolerance=tolerance, coupled=coupled)
    assert found.value.shape == (4, 3)
    assert found.steps.shape == (4,)


@torch_warns
@pytest.mark.parametrize(("solver", "mode"), [(Picard(), torch.no_grad), (Anderson(3), torch.inference_mode)])
def test_a_compiled_network_with_host_checks(solver: Solver, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the device keeps the numbers: the compiler would make programs of the host's arithmetic."""
    torch.manual_seed(0)
    inner, d = torch.nn.Linear(8, 8), torch.randn(6, 4)
    R = lambda u, v: torch.tanh(0.3 * inner(u) + v)  # noqa: E731
    net = ImplicitNetwork(torch.nn.Linear(4, 8), R, torch.nn.Linear(8, 2), solver=solver)
    expected = net(d).detach()
    monkeypatch.setattr(state, "on_device", None)
    monkeypatch.setattr(SolveRun, "sprint", None)
    torch._dynamo.reset()
    with mode():
        torch.testing.assert_close(torch.compile(net, backend="eager")(d), expected)


@solvers
def test_inference_mode(solver: Solver) -> None:
    p, tolerance = affine(), Tolerance(atol=1e-9, max_steps=200)
    with torch.inference_mode():
        made_inside = p.z0.clone()
        found = solve(p.T, made_inside, solver, inputs=p.inputs, tolerance=tolerance)
    assert found.status == (Status.CONVERGED,) * 3
    outside = solve(p.T, made_inside, solver, inputs=p.inputs, tolerance=tolerance)
    assert distance(outside.value, p.solution) < 1e-7
