"""Failure is visible: Solution, `throw=True` and the first warning agree; no wrong answer is marked converged."""

import itertools
import math
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import (
    Anderson,
    Broyden,
    ConvergenceWarning,
    ImplicitNetwork,
    NotConverged,
    Picard,
    Solution,
    Solver,
    Status,
    Tolerance,
    fixed_point,
    solve,
)
from banach.solve import Fault, mixes_samples

SOLVERS: list[Solver] = [Picard(), Picard(damping=0.3), Anderson(3), Broyden(4)]
solvers = pytest.mark.parametrize("solver", SOLVERS, ids=str)
every = pytest.mark.parametrize("every", [None, 1, 3])


def shift(z: Tensor) -> Tensor:
    """Each row takes the value of the row before it; the fixed point is all ones."""
    return torch.cat([torch.ones_like(z[:1]), z[:-1]])


def caught(T: Callable[..., Tensor], z0: Tensor, **how: Any) -> tuple[list[str], Solution]:
    """Return the texts of the warnings of `fixed_point`, and its solution."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _, found = fixed_point(T, z0, solution=True, **how)
    assert all(issubclass(one.category, ConvergenceWarning) for one in seen)
    return [str(one.message) for one in seen], found


@every
def test_a_forgotten_coupled_returned_a_wrong_answer_marked_converged(every: int | None) -> None:
    z0, tolerance = torch.zeros(10), Tolerance(check_every=every)
    (text,), found = caught(shift, z0, tolerance=tolerance)
    assert not found.converged.any(), "it was [1, 0, ..., 0], all converged"
    assert found.fault is Fault.MIXES
    for said in (found.summary(), text):
        assert "T mixes samples: pass coupled=True" in said
    with pytest.raises(NotConverged, match="T mixes samples"):
        fixed_point(shift, z0, tolerance=tolerance, throw=True)
    z, found = fixed_point(shift, z0, tolerance=tolerance, coupled=True, solution=True)
    assert torch.equal(z, torch.ones(10))
    assert found.fault is None
    few = Tolerance(max_steps=3, check_every=every)
    (text,), found = caught(shift, z0, tolerance=few, solver=Anderson(), coupled=True)
    assert found.fault is None, "advice to pass what was passed"
    assert "mixes" not in text


def steps_twice(z: Tensor) -> Tensor:
    """Row 0 moves by 1 and then by 0.0002: at the end the residual of row 1 has long been 1."""
    return torch.stack([torch.where(z[0] < 0.5, 1.0, 1.0002 + 0 * z[0]), z[0]])


def pulls_to_the_mean(z: Tensor) -> Tensor:
    """Some rows freeze between the last two checks: their residual was compared with itself."""
    g = torch.Generator().manual_seed(1)
    W = torch.randn(4, 4, generator=g)
    x = torch.randn(5, 4, generator=g)
    return 0.7 * torch.tanh(z @ W / torch.linalg.matrix_norm(W, 2)) + x + 0.5 * (z.mean(0) - z)


def draws(z: Tensor) -> Tensor:
    """The second sample converges by chance, and its residual is another one at every later evaluation."""
    return torch.cat([0.9 * z[:1] + 1, torch.rand(1, 1)])


def rises_last(z: Tensor) -> Tensor:
    """Both samples freeze at their first step; the second one rises at the very last evaluation."""
    return torch.stack([0.01 * z[0] + 0.005, 3 * z[1] + 0.9e-4])


@pytest.mark.parametrize(
    ("T", "shape", "solver", "tolerance", "fault"),
    [
        (steps_twice, (2, 1), Picard(), Tolerance(), Fault.MIXES),
        (pulls_to_the_mean, (5, 4), Anderson(2, damping=0.2), Tolerance(check_every=3), Fault.MIXES),
        (draws, (2, 1), Picard(), Tolerance(atol=0.05, max_steps=200), Fault.RANDOM),
        (rises_last, (2, 1), Picard(), Tolerance(), None),  # probed, and found innocent
    ],
)
def test_what_a_probe_finds(T: Any, shape: Any, solver: Solver, tolerance: Tolerance, fault: Fault | None) -> None:
    torch.manual_seed(0)
    found = solve(T, torch.zeros(shape), solver, tolerance=tolerance)
    assert found.fault is fault
    assert found.converged.tolist() == [fault is None] * shape[0]
    assert fault is None or fault.value in found.summary()


@every
def test_mixing_is_noticed_where_samples_have_left_the_batch(every: int | None) -> None:
    """The mean over the batch changes when samples leave: this gave (0, 2.5, 2.5, 2.5), all converged."""

    def T(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * x * z + 0.5 * x + 0.3 * z.mean(0)

    x, tolerance = torch.tensor([[0.0], [1.0], [1.0], [1.0]]), Tolerance(check_every=every)
    found = solve(T, torch.zeros(4, 1), inputs=(x,), compact=True, tolerance=tolerance)
    assert found.fault is Fault.MIXES
    assert not found.converged.any()
    net = ImplicitNetwork(nn.Identity(), T, nn.Identity(), compact=True, tolerance=tolerance)
    with pytest.warns(ConvergenceWarning, match="T mixes samples"):
        net(x)


def test_a_sample_that_rises_on_its_own_stays_converged() -> None:
    """T expands near 0: |T(z) - z| is below the tolerance at z = 0 and above it one step later."""
    calls: list[int] = []

    def T(z: Tensor, slow: Tensor) -> Tensor:
        calls.append(len(z))
        return torch.where(slow, 0.9 * z + 1, 3 * z + 0.9e-4)

    slow, tolerance = torch.tensor([[True], [False], [False]]), Tolerance(max_steps=200)
    texts, found = caught(T, torch.zeros(3, 1), inputs=(slow,), tolerance=tolerance)
    assert found.converged.all()
    assert (found.fault, texts) == (None, [])
    assert len(calls) == int(found.steps.max()) + 1, "a steady residual needs no probe; attach evaluates once"
    cut = solve(T, torch.zeros(3, 1), inputs=(slow,), tolerance=tolerance, compact=True)
    assert cut.converged.all()
    assert cut.fault is None


@pytest.mark.parametrize("every", [None, 1])
def test_mixing_is_noticed_where_it_raises_a_residual_slowly(every: int | None) -> None:
    """Row 0 follows row 1, which moves by less than a thousandth per step: 9 times the tolerance in the end."""

    def T(z: Tensor) -> Tensor:
        return torch.stack([0.5 * z[0] + 5e-4 * z[1], 0.9995 * z[1]])

    z0 = torch.tensor([[0.0], [20.0]], dtype=torch.float64)
    tolerance = Tolerance(atol=1e-3, max_steps=10_000, check_every=every)
    assert solve(T, z0, tolerance=tolerance).fault is Fault.MIXES


@solvers
@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_that_rises_beside_one_that_overflows(
    solver: Solver, every: int | None, dtype: torch.dtype
) -> None:
    """NumPy warned of infinity minus infinity, at a line of the library."""

    def T(z: Tensor, x: Tensor) -> Tensor:
        return torch.where(x == 0, 3 * z + 0.9e-4, torch.where(x == 1, 1e30 * z + 1, 2e4 * z + 1))

    x, tolerance = torch.arange(3, dtype=dtype)[:, None], Tolerance(check_every=every, max_steps=100)
    found = solve(T, torch.zeros(3, 1, dtype=dtype), solver, inputs=(x,), tolerance=tolerance)
    assert found.status[0] is Status.CONVERGED
    assert found.value.isfinite().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_probe_where_T_is_not_defined_does_not_raise(sign: int) -> None:
    """A T that raises far from its iterates, as a Cholesky factorisation does, warns as any other."""

    def T(z: Tensor) -> Tensor:
        if (sign * z > 1).any():
            raise ValueError("not defined here")
        return 0.5 * z.cos() - 0.3 * z

    tolerance = Tolerance(atol=1e-12, max_steps=3)
    assert "max_steps" in caught(T, torch.zeros(4, 2), solver=Anderson(), tolerance=tolerance)[0][0]


@pytest.mark.parametrize("solver", [Picard(), Anderson()], ids=str)
def test_what_the_probe_after_a_solve_finds_is_in_the_solution(solver: Solver) -> None:
    """The warning named the fault, and the summary advised more steps. Picard's T was not probed."""

    def noisy(u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * u + v + torch.rand_like(u)

    v = torch.ones(4, 2)
    (text,), found = caught(noisy, torch.zeros(4, 2), inputs=(v,), solver=solver)
    with pytest.warns(ConvergenceWarning, match="it draws at random"):
        _, same = ImplicitNetwork(nn.Identity(), noisy, nn.Identity(), solver=solver)(v, solution=True)
    for one in (found, same):
        assert one.fault is Fault.RANDOM
        assert one.fault.value in text
        assert one.summary().endswith(f"try: {one.fault.value}")
        assert len(one.status) == 4

    class Slotted:  # cannot be referenced weakly, so it is probed every time
        __slots__ = ()

        def __call__(self, z: Tensor) -> Tensor:
            return 0.5 * z + 1

    (text,), _ = caught(Slotted(), torch.zeros(4, 2), solver=solver, tolerance=Tolerance(max_steps=1))
    assert "stopped at max_steps" in text


@solvers
def test_a_failed_solve_probes_T_once(solver: Solver) -> None:
    """Also where no sample has frozen, and T is found to be in order."""
    tolerance, calls = Tolerance(atol=1e-9, max_steps=2), []
    (text,), found = caught(lambda z: 0.5 * z + z.mean(0) + 1, torch.eye(3), solver=solver, tolerance=tolerance)
    assert "T mixes samples: pass coupled=True" in text
    assert (found.fault, found.steps.tolist()) == (Fault.MIXES, [2] * 3)

    class Counted:
        def __call__(self, z: Tensor) -> Tensor:
            calls.append(len(z))
            return 0.9 * z + 1

    T = Counted()
    for extra in (3, 0):  # as T is, and with other rows moved up and down
        calls.clear()
        (text,), found = caught(T, torch.eye(3), solver=solver, tolerance=tolerance)
        assert "stopped at max_steps" in text
        assert len(calls) == 2 + extra + 1


def test_a_function_made_again_in_every_turn_of_a_loop_is_probed_once() -> None:
    tolerance, calls = Tolerance(atol=1e-9, max_steps=2), []
    for _ in range(3):

        def T(z: Tensor) -> Tensor:
            calls.append(len(z))
            return 0.9 * z + 1

        caught(T, torch.eye(3), tolerance=tolerance)
    assert len(calls) == 3 * 3 + 3

    def shifted(b: float, z: Tensor) -> Tensor:
        calls.append(len(z))
        return 0.9 * z + b

    calls.clear()
    for _ in range(3):
        caught(partial(shifted, 1.0), torch.eye(3), tolerance=tolerance)
    assert len(calls) == 3 * 3 + 3


def test_a_decorated_function_is_probed_for_itself() -> None:
    """Functions of one decorator share its code: the second one was not probed."""

    def plain(f: Any) -> Any:
        return wraps(f)(lambda z: f(z))

    maps = plain(lambda z: 0.9 * z + 1), plain(lambda z: 0.9 * z + z.mean(0) + 1)
    faults = [caught(T, torch.eye(3), tolerance=Tolerance(atol=1e-9, max_steps=2))[1].fault for T in maps]
    assert faults == [None, Fault.MIXES]


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_the_probe(rows: int) -> None:
    z = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    assert not mixes_samples(torch.tanh, z)
    assert not mixes_samples(lambda u: torch.relu(-u.abs()), z), "a map that is flat here"
    assert mixes_samples(lambda u: u - u.mean(0), z) == (rows > 1)
    assert mixes_samples(shift, z) == (rows > 1)
    assert not mixes_samples(lambda u, v: u + v, z, (z,))
    assert torch.equal(before, torch.get_rng_state())


def test_the_probe_of_a_nest_and_of_nonfinite_values() -> None:
    nest = {"a": torch.zeros(3, 2), "b": torch.ones(3)}
    assert not mixes_samples(lambda u: {"a": u["a"] / 2, "b": u["b"].cos()}, nest)
    assert mixes_samples(lambda u: {"a": u["a"] / 2 + u["b"].sum(), "b": u["b"]}, nest)
    assert not mixes_samples(lambda z: z / 0, torch.zeros(4, 2))
    z = torch.zeros(4, 2, dtype=torch.float64)
    assert not mixes_samples(lambda z: -2 + 1e-15 * z.sum(0) + 0 * z, z), "rounding of negative values"


@every
@pytest.mark.parametrize(
    ("T", "value", "text"),
    [
        (lambda x: 2 * x + 1, 0.0, "stopped at max_steps"),  # returned 2.25e15
        (lambda x: 0.99 * x + 1, None, "stopped at max_steps"),  # returned 40, correct 100
        (lambda x: x * x + 2, 0.0, "NaN or infinity"),
    ],
)
def test_forward_failure_was_silent(T: Any, value: float | None, text: str, every: int | None) -> None:
    z0, tolerance = torch.zeros(2, 3), Tolerance(check_every=every)
    (message,), found = caught(T, z0, tolerance=tolerance)
    assert text in message
    assert not any(letter.isdigit() for letter in message), "constant: Python shows it once per place"
    with pytest.raises(NotConverged) as error:
        fixed_point(T, z0, tolerance=tolerance, throw=True)
    assert error.value.solution.status == found.status
    assert value is None or (found.value == value).all(), "the best iterate"


def test_a_warning_points_at_the_users_line_and_is_shown_once() -> None:
    net = ImplicitNetwork(nn.Identity(), _Double(), nn.Identity())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            net(torch.ones(2, 2))
    assert [one.filename for one in seen] == [__file__]
    with pytest.raises(NotConverged, match="diverges for 2 of 2 samples"):
        net(torch.ones(2, 2), throw=True)


class _Double(nn.Module):
    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 2 * u + v


def test_fixed_depth_and_max_steps_zero_only_record() -> None:
    assert caught(lambda x: 2 * x + 1, torch.zeros(2, 3), tolerance=Tolerance(max_steps=0))[0] == []
    texts, found = caught(lambda x: 2 * x + 1, torch.zeros(2, 3), tolerance=Tolerance(check_every=0))
    assert texts == []
    assert found.diverged.all()
    assert (found.value == 0).all()


@pytest.mark.parametrize("make", [Anderson, Broyden])
def test_advice_of_a_larger_memory_helps(make: Any) -> None:
    """Found on a map that turns in ten planes: the advice was more steps, but 5000 did not help."""
    angles = torch.linspace(0.3, 3, 10, dtype=torch.float64)
    turn = torch.polar(torch.full_like(angles, 0.99), angles)

    def T(z: Tensor) -> Tensor:
        return torch.view_as_real(turn * torch.view_as_complex(z)) + 1

    z0, tolerance = torch.zeros(1, 10, 2, dtype=torch.float64), Tolerance(atol=1e-10, max_steps=100)
    short = solve(T, z0, make(), tolerance=tolerance)
    assert short.status == (Status.MAX_STEPS,)
    assert short.summary().endswith("a larger tolerance, or a larger memory")
    long = solve(T, z0, make(memory=40), tolerance=tolerance)
    assert long.converged.all()
    wanted = torch.view_as_real((1 + 1j) / (1 - turn))
    torch.testing.assert_close(long.value[0], wanted)


def test_advice_knows_what_was_tried() -> None:
    slow, tolerance = (lambda z: 0.999 * z + 1), Tolerance(max_steps=3)
    by = {solver: solve(slow, torch.zeros(2, 1), solver, tolerance=tolerance).summary() for solver in SOLVERS}
    assert "Anderson()" in by[Picard()]
    assert "Anderson()" in by[Picard(damping=0.3)]
    assert "Picard(damping" not in by[Picard(damping=0.3)]
    rough = solve(torch.tanh, torch.ones(2, 1) * 3, Anderson(3), tolerance=Tolerance(atol=0, max_steps=2))
    assert "Anderson" not in rough.summary()
    away = solve(lambda z: 1.5 * z.roll(1, 1) + torch.eye(16)[:1], torch.zeros(1, 16), Anderson(3))
    assert away.diverged.all()
    assert "Picard(damping=0.5)" in away.summary()
    for solver in (Anderson(), Broyden()):  # z0 is a flat place, where a secant step is far too long
        flat = solve(lambda z: z + 0.2 * (2 - z**3), torch.zeros(1, 1), solver)
        assert flat.nonfinite.all()
        assert "Picard(damping=0.5)" in flat.summary()
    assert all("Anderson" not in status.value for status in Status)
    assert all("try" not in status.value for status in Status)


def test_a_solution_prints_in_one_line() -> None:
    found = solve(lambda z: z / 2 + 1, torch.zeros(500, 40))
    worst = float(found.residual.max())
    assert str(found) == f"Solution(500 CONVERGED; steps 15 to 15; worst residual {worst:.3g})"
    assert str(solve(torch.tanh, torch.zeros(0, 3))) == "Solution(no samples)"
    assert found.summary() == "all 500 samples converged"


def test_the_tensors_of_a_solution_share_no_memory() -> None:
    found = solve(lambda z: z / 2, torch.ones(2, 3))
    found.stalled.fill_(True)
    assert not found.nonfinite.any()
    assert not found.diverged.any()
    assert found.status == (Status.STALLED,) * 2


# 1,000 random maps. Each is affine, z -> A z + b, on 4 samples of 3 numbers, so its fixed point is known; A mixes
# samples or not, and contracts, rotates or expands.
KINDS = ("contracts", "diverges", "mixes", "mixes and diverges", "mixes a little")


def matrix(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randn(4, 3, 3, generator=g, dtype=torch.float64)
    size = (
        (1.05 + torch.rand(4, 1, 1, generator=g)) if "diverges" in kind else 0.9 * torch.rand(4, 1, 1, generator=g)
    )
    blocks = size * blocks / torch.linalg.eigvals(blocks).abs().amax(-1)[:, None, None]
    A = torch.block_diag(*blocks)
    if "mixes" in kind:
        other = torch.randn(12, 12, generator=g, dtype=torch.float64)
        other = other * (torch.rand(12, 12, generator=g) < 0.3)
        A = A + (0.02 if "little" in kind else 0.5) * other
        radius = torch.linalg.eigvals(A).abs().max()
        A = A * ((1.3 if "diverges" in kind else 0.8) / radius)
    return A, torch.randn(12, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_maps(kind: str) -> None:
    counts = {"converged": 0, "warned": 0}
    kinds = itertools.cycle(itertools.product(SOLVERS, (None, 3), (torch.float64, torch.float32)))
    for seed, (solver, check, dtype) in zip(range(200), kinds, strict=False):
        A, b = (part.to(dtype) for part in matrix(kind, seed))
        tolerance = Tolerance(atol=1e-4, max_steps=60, check_every=check)

        def T(z: Tensor, A: Tensor = A, b: Tensor = b) -> Tensor:
            return (A @ z.flatten() + b).view(4, 3)

        z0, how = torch.zeros(4, 3, dtype=dtype), {"solver": solver, "tolerance": tolerance}
        texts, found = caught(T, z0, **how)
        converged = bool(found.converged.all())
        assert (texts == []) == converged == _does_not_throw(T, z0, **how), (kind, seed)
        counts["converged" if converged else "warned"] += 1
        if converged:
            _check_answer(found, A, b, tolerance)
        elif found.fault is not None:
            assert "mixes" in kind, (kind, seed)
            assert "coupled=True" in texts[0]
    if kind == "contracts":
        assert counts["warned"] < 30, "those that contract slowly"
    elif "diverges" in kind:
        assert counts["converged"] < 100, "only what Anderson and Broyden solve all the same"
    else:
        assert counts["warned"] > 20, "or nothing was tested"


def _does_not_throw(T: Any, z0: Tensor, **how: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        try:
            fixed_point(T, z0, throw=True, **how)
        except NotConverged:
            return False
    return True


def _check_answer(found: Solution, A: Tensor, b: Tensor, tolerance: Tolerance) -> None:
    """The residual of the whole batch is near the tolerance, as a frozen sample's may be; the answer is right."""
    A, b, z = A.double(), b.double(), found.value.double().flatten()
    residual = (A @ z + b - z).view(4, 3).square().mean(1).sqrt()
    reach = 1 + float(torch.linalg.matrix_norm(A, 2))
    assert residual.max() <= 12 * reach * tolerance.atol
    inverse = torch.linalg.inv(torch.eye(12, dtype=torch.float64) - A)
    allowed = float(torch.linalg.matrix_norm(inverse, 2)) * 12 * reach * tolerance.atol * math.sqrt(12)
    assert float((z - inverse @ b).norm()) <= allowed


def test_numbers_are_listed_before_they_are_read() -> None:
    """For tab completion: on a CPU they become tensors when they are read."""
    found = solve(lambda z: z / 2, torch.ones(2, 1))
    assert {"value", "residual", "steps", "converged", "status"} <= set(dir(found))
