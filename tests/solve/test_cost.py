"""What a step costs beside T: kernels, allocations of the latent's size, questions to the host; and tracing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from banach import RMS, Anderson, Broyden, Picard, Solution, Solver, Status, Tolerance, WorstPixel, solve
from banach.solve import Norm, run, state
from banach.solve.state import to_numpy
from problems import affine, convolution, distance, mixed_rates

SOLVERS: list[Solver] = [Picard(), Picard(0.5), Anderson(), Broyden()]
solvers = pytest.mark.parametrize("solver", SOLVERS, ids=repr)
SHAPE = (4, 3, 8, 8)


class Meter(TorchDispatchMode):
    """Counts non-view aten calls, new tensors of at least the latent's size, and reads of a value by the host."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.kernels, self.allocations, self.reads = size, 0, 0, 0
        self.paused = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if self.paused or op.is_view:
            return out
        old = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        new = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in old]
        self.kernels += 1
        self.allocations += sum(t.numel() >= self.size for t in new)
        self.reads += op.overloadpacket.__name__ in ("_local_scalar_dense", "item", "is_nonzero", "equal")
        return out


def measure(solver: Solver, steps: int, z0: Tensor, *, coupled: bool = False, **settings: Any) -> Meter:
    """The meter after so many steps of z -> q z, another rate for every entry; T itself not counted."""
    meter = Meter(z0.numel())
    rates = torch.linspace(0.1, 0.95, z0.numel()).view_as(z0.contiguous()) * torch.ones_like(z0)

    def T(z: Tensor) -> Tensor:
        meter.paused = True
        value = z * rates
        meter.paused = False
        return value

    with meter:
        found = solve(T, z0, solver, tolerance=Tolerance(atol=0, max_steps=steps, **settings), coupled=coupled)
    assert (found.steps == steps).all(), "nobody is done before the end, or nothing is measured"
    return meter


def per_step(solver: Solver, z0: Tensor, **settings: Any) -> tuple[int, ...]:
    """The most that any one step, from the third on, adds: kernels, allocations, reads."""
    meters = [measure(solver, n, z0, **settings) for n in range(2, 15)]
    added = [
        (b.kernels - a.kernels, b.allocations - a.allocations, b.reads - a.reads) for a, b in pairwise(meters)
    ]
    return tuple(map(max, zip(*added, strict=True)))


LAST = torch.ones(SHAPE).contiguous(memory_format=torch.channels_last)


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
    assert found[2] == 0


@solvers
def test_cost_of_a_step_does_not_grow(solver: Solver) -> None:
    z0 = torch.ones(1, 400)
    measure(solver, 1, z0, check_every=0)  # the space of a latent is made once
    counts = [measure(solver, n, z0, check_every=0).kernels for n in (21, 31, 41)]
    assert counts[2] - counts[1] == counts[1] - counts[0]


@solvers
@pytest.mark.parametrize("coupled", [False, True])
def test_a_fixed_depth_needs_no_data_at_all(solver: Solver, coupled: bool) -> None:
    """On the meta device there are no values: an `.item()`, a branch or a copy to the host would raise."""
    z0 = torch.zeros(4, 3, device="meta")
    tolerance = Tolerance(max_steps=15, rtol=1e-3, check_every=0)
    found = solve(lambda z: z / 2, z0, solver, tolerance=tolerance, coupled=coupled)
    assert found.value.shape == (4, 3)
    assert found.steps.shape == (4,)


@pytest.mark.parametrize("solver", [Picard(), Anderson()], ids=repr)
@pytest.mark.parametrize(("every", "asked"), [(1, 20), (4, 5), (7, 3), (0, 0), (50, 1)])
def test_the_host_is_asked_at_checks_alone(
    monkeypatch: pytest.MonkeyPatch, solver: Solver, every: int, asked: int
) -> None:
    looks: list[Tensor] = []

    def counted(tensor: Tensor) -> Any:
        looks.append(tensor)
        return to_numpy(tensor)

    for room in (run, state):
        monkeypatch.setattr(room, "to_numpy", counted)
    slow = torch.linspace(0.95, 0.99, 50)
    z0, tolerance = torch.ones(2, 50), Tolerance(atol=0, max_steps=20, check_every=every)
    solve(lambda z: slow * z, z0, solver, tolerance=tolerance)
    assert len(looks) == asked


@pytest.mark.parametrize(("rtol", "kernels"), [(0.0, 3), (1e-12, 6)])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("norm", [RMS(), WorstPixel()], ids=repr)
def test_a_step_that_the_host_watches(norm: Norm, coupled: bool, rtol: float, kernels: int) -> None:
    """Picard: a difference, its norm (of pixels: two kernels), a copy; with rtol T(z)'s norm and the excess."""
    pixels = (1 + (rtol > 0)) * isinstance(norm, WorstPixel)
    assert per_step(Picard(), torch.ones(SHAPE), rtol=rtol, norm=norm, coupled=coupled) == (kernels + pixels, 2, 0)


@pytest.mark.parametrize("channels_last", [False, True])
def test_T_is_given_a_view(channels_last: bool) -> None:
    """The way between rows and latent copies nothing: T's argument shares memory with the iterate before it."""
    p = convolution()
    z0 = p.z0.contiguous(memory_format=torch.channels_last) if channels_last else p.z0
    given: list[int] = []
    shown: list[int] = [z0.data_ptr()]

    def T(z: Tensor, x: Tensor) -> Tensor:
        given.append(z.data_ptr())
        return p.T(z, x)

    solve(
        T, z0, inputs=p.inputs, tolerance=Tolerance(max_steps=4), on_step=lambda k, z: shown.append(z.data_ptr())
    )
    assert given == shown[:-1]


# PyTorch's own, where its compiler is first imported.
torch_warns = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


def compiled(run: Callable[[], Solution]) -> Solution:
    torch._dynamo.reset()
    return torch.compile(run, fullgraph=True, backend="eager")()


@torch_warns
@pytest.mark.parametrize(("solver", "rtol"), [*zip(SOLVERS, [0.0, 1e-6, 0.0, 1e-6], strict=True)], ids=repr)
def test_a_fixed_depth_is_one_graph(solver: Solver, rtol: float) -> None:
    p, tolerance = affine(), Tolerance(atol=1e-3, rtol=rtol, max_steps=6, check_every=0)
    eager = solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance)
    traced = compiled(lambda: solve(p.T, p.z0, solver, inputs=p.inputs, tolerance=tolerance))
    assert distance(traced.value, eager.value) < 1e-12
    assert traced.steps.tolist() == eager.steps.tolist()


@torch_warns
def test_an_exported_loop_freezes_too() -> None:
    p, tolerance = mixed_rates(batch=6), Tolerance(atol=1e-3, max_steps=60)

    class Solve(torch.nn.Module):
        def forward(self, q: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            found = solve(p.T, torch.zeros_like(b), inputs=(q, b), tolerance=tolerance)
            return found.value, found.residual, found.steps, found.converged

    exported = torch.export.export(Solve(), p.inputs, strict=False).module()
    for now, eager in zip(exported(*p.inputs), Solve()(*p.inputs), strict=True):
        torch.testing.assert_close(now, eager)


def test_inside_torch_func() -> None:
    """A solve inside a transform: values have no storage of their own, so the host is asked another way."""
    p = mixed_rates(batch=3, high=0.5)

    def loss(b: Tensor) -> Tensor:
        found = solve(lambda z: p.T(z, p.inputs[0], b), p.z0, Anderson())
        return (p.T(found.value, p.inputs[0], b) ** 2).sum() / 2

    b = p.inputs[1]
    gradient = torch.func.grad(loss)(b)
    torch.testing.assert_close(gradient, p.solution, rtol=0, atol=1e-3)  # d loss / db = T(u) = u


@solvers
def test_inference_mode(solver: Solver) -> None:
    p = affine()
    with torch.inference_mode():
        made_inside = p.z0.clone()
        found = solve(p.T, made_inside, solver, inputs=p.inputs, tolerance=Tolerance(atol=1e-9, max_steps=200))
    assert found.status == (Status.CONVERGED,) * 3
    outside = solve(p.T, made_inside, solver, inputs=p.inputs, tolerance=Tolerance(atol=1e-9, max_steps=200))
    assert distance(outside.value, p.solution) < 1e-7
