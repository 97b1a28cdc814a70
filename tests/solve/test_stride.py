"""stride(), which Picard takes on a GPU: the same answers as the loop that checks every step. Here on a CPU."""

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import RMS, Picard, Solution, Tolerance, WorstPixel, solve
from banach.latent import Latent, leaves, map_leaves
from banach.solve.run import SolveRun
from banach.solve.stride import stride
from contracts import same
from problems import normal


def take_strides(monkeypatch: pytest.MonkeyPatch, large: int | None = None) -> None:
    """Take the steps that a GPU would take, from here on, with this limit of small iterates."""
    monkeypatch.setattr(SolveRun, "sprint", lambda self, state, k, *, compact: stride(self, state, k))
    if large is not None:
        monkeypatch.setattr(import_module("banach.solve.stride"), "LARGE", large)


def both(monkeypatch: pytest.MonkeyPatch, T: Any, z0: Latent, **options: Any) -> tuple[Solution, Solution]:
    """Return what stride() finds, the same for small and large iterates, and what a check at every step finds."""
    expected = solve(T, z0, **options)
    found = []
    for large in (None, 0):
        take_strides(monkeypatch, large)
        found.append(solve(T, z0, **options))
        monkeypatch.undo()
    same(*found)
    return found[0], expected


def two_scales(z: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = z
    return 0.4 * torch.tanh(x + v[0]) + 0.1 * y.repeat_interleave(2, -1), 0.5 * torch.cos(y + v[1])


@pytest.mark.parametrize("norm", [RMS(), WorstPixel()], ids=str)
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_a_nest(norm: Any, damping: float, monkeypatch: pytest.MonkeyPatch) -> None:
    v = normal(6, 3, 8, seed=1) * torch.logspace(-2, 1, 6)[:, None, None], normal(6, 3, 4, seed=2)
    z0, tolerance = map_leaves(torch.zeros_like, v), Tolerance(atol=1e-9, norm=norm)
    options: dict[str, Any] = {"solver": Picard(damping), "inputs": (v,), "tolerance": tolerance}
    same(*both(monkeypatch, two_scales, z0, **options))


def other_order(z: dict[str, Tensor], v: Tensor) -> dict[str, Tensor]:
    a, b = z.values()
    return {"b": 0.5 * b + v, "a": 0.3 * torch.sin(a) + v}


def a_list(z: tuple[Tensor, Tensor], v: Tensor) -> list[Tensor]:
    return [0.5 * z[0] + v, 0.3 * z[1]]


def records(z: tuple[Tensor, Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = z[0].detach().requires_grad_()
        (gradient,) = torch.autograd.grad((0.1 * x.square() + v * x).sum(), x, create_graph=True)
        return x - 0.4 * gradient - 0.5 * x, z[1] * 0.5


@pytest.mark.parametrize("T", [other_order, a_list, records], ids=lambda T: T.__name__)
@pytest.mark.filterwarnings("error")
def test_a_nest_is_always_given_in_the_form_of_z0(T: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    v = normal(4, 3, 2, 2, seed=5)
    first = torch.zeros_like(v).to(memory_format=torch.channels_last)
    z0: Any = {"a": first, "b": first} if T is other_order else (first, first)
    forms = []

    def watched(z: Any, v: Tensor) -> Any:
        forms.append([type(z), *(leaf.is_contiguous(memory_format=torch.channels_last) for leaf in leaves(z))])
        assert not any(leaf.requires_grad for leaf in leaves(z))
        return T(z, v)

    found, expected = both(monkeypatch, watched, z0, inputs=(v,))
    same(found, expected)
    assert found.converged.all()
    assert all(form == forms[0] for form in forms)


def test_a_nest_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    W, v = 0.1 * normal(4, 4, dtype=torch.float32), normal(3, 4, dtype=torch.float32, seed=1)
    z0 = (torch.zeros(3, 4), torch.zeros(3, 4))

    def T(z: tuple[Tensor, Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
        return z[0] @ W + v, z[1] @ W  # the second is bfloat16

    with torch.autocast("cpu", torch.bfloat16):
        same(*both(monkeypatch, T, z0, inputs=(v,), tolerance=Tolerance(atol=1e-2)))


def test_coupled_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    z0, (rate, b) = torch.zeros(4, 5), (torch.linspace(0.1, 0.8, 4)[:, None], normal(4, 5, dtype=torch.float32))
    T = lambda z, b: 0.5 * z.roll(1, 0) * rate + b  # noqa: E731
    same(*both(monkeypatch, T, z0, inputs=(b,), coupled=True))


class Static:
    """T that writes its values to one of a few memories in turn, as replayed CUDA graphs do."""

    def __init__(self, memories: int, *shapes: tuple[int, ...]) -> None:
        self.memories = [[torch.zeros(shape, dtype=torch.float64) for shape in shapes] for _ in range(memories)]

    def __call__(self, z: tuple[Tensor, ...], v: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.memories.append(self.memories.pop(0))
        for out in (out for memory in self.memories for out in memory):
            out.zero_()  # T sees zeros where its input is memory of its own
        for out, x, b in zip(self.memories[0], z, v, strict=True):
            out.copy_(0.7 * x.roll(1, -1) + b)
        return tuple(self.memories[0])


@pytest.mark.parametrize("memories", [1, 2, 5])
def test_t_may_use_its_memory_again(memories: int, monkeypatch: pytest.MonkeyPatch) -> None:
    v = normal(5, 3, 4, seed=3), normal(5, 2, seed=4)
    z0 = map_leaves(torch.zeros_like, v)
    fresh = solve(lambda z, v: tuple(0.7 * x.roll(1, -1) + b for x, b in zip(z, v, strict=True)), z0, inputs=(v,))
    take_strides(monkeypatch)
    same(solve(Static(memories, (5, 3, 4), (5, 2)), z0, inputs=(v,)), fresh)
    one = Static(memories, (5, 2))
    alone = solve(lambda z, v: one((z,), (v,))[0], z0[1], inputs=(v[1],))
    assert torch.equal(alone.value, solve(lambda z, v: 0.7 * z.roll(1, -1) + v, z0[1], inputs=(v[1],)).value)


def turn(angle: float, squeeze: float) -> Tensor:
    """A map that turns and squeezes: its residual falls in waves, which are hard to predict."""
    c, q = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, -squeeze * q], [q / squeeze, c]])


@pytest.mark.parametrize(
    ("A", "rest"), [(0.5 * torch.eye(2), 1), (0.995 * turn(0.03, 3.0), 320)], ids=["halves", "turns"]
)
def test_evaluations_between_two_checks_are_few(A: Tensor, rest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def T(z: Tensor, b: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return z @ A.T + b

    b = normal(3, 2, dtype=torch.float32)
    take_strides(monkeypatch)
    found = solve(T, torch.zeros_like(b), inputs=(b,), tolerance=Tolerance(atol=1e-3, max_steps=5000))
    assert found.converged.all()
    assert int(found.steps.max()) <= calls <= int(found.steps.max()) + rest
