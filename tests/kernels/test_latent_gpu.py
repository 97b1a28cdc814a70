"""The kernel that solves for a latent, on a GPU: programs that meet, graphs, the same bits, and the guard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from banach.kernels import has_triton
from banach.kernels.latent import LatentMap, evaluate, latent_map, latent_solve, reference_solve
from banach.solve import Solution
from kernels.latent_networks import network, tolerance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs CUDA and Triton"),
]
NETWORKS = ("mnist", "svhn", "cifar10")


def made(name: str, *, train: bool, batch: int, seed: int = 0) -> tuple[LatentMap, Tensor, torch.dtype]:
    """As each network is used: SVHN in float32, the others with products in bf16."""
    R, v = network(name, train=train, batch=batch, seed=seed, device="cuda")
    v = v.to(memory_format=torch.channels_last)
    return latent_map(R), v, torch.float32 if name == "svhn" else torch.bfloat16


def exactly(R: LatentMap) -> LatentMap:
    known = None if R.known is None else R.known.double()
    return LatentMap(R.form, R.weights.double(), R.biases.double(), R.eps, known)


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch", [1, 7, 100, 300])
@pytest.mark.parametrize("name", NETWORKS)
def test_few_steps_agree_with_float64(name: str, batch: int, train: bool) -> None:
    R, v, dtype = made(name, train=train, batch=batch)
    z0 = torch.randn_like(v)
    stop = tolerance(atol=0.0, max_steps=3)
    got = latent_solve(R, v, z0, tolerance=stop, dtype=dtype)
    wanted = reference_solve(exactly(R), v.double(), z0.double(), stop, torch.float64)
    bound = 2e-5 if dtype == torch.float32 else 1e-2
    assert distance(got.value, wanted.value) < bound
    assert distance(got.residual, wanted.residual) < bound
    assert bool((got.steps == 3).all())
    assert not bool(got.converged.any())


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_converges_to_a_fixed_point(name: str, train: bool) -> None:
    R, v, dtype = made(name, train=train, batch=100)
    stop = tolerance(atol=1e-4 if name == "svhn" else 1e-1, max_steps=200)
    got = latent_solve(R, v, tolerance=stop, dtype=dtype)
    assert bool(got.converged.all())
    assert bool((got.residual <= stop.atol).all())
    exact = exactly(R)
    wanted = reference_solve(exact, v.double(), None, stop, torch.float64)
    assert int((got.steps - wanted.steps).abs().max()) <= 2
    moved = evaluate(exact, got.value.double(), v.double(), torch.float64) - got.value
    assert float(moved.norm(dim=1).max()) < 2 * stop.atol


@pytest.mark.parametrize("name", NETWORKS)
def test_an_image_does_not_depend_on_the_others(name: str) -> None:
    R, v, dtype = made(name, train=False, batch=300)
    whole = latent_solve(R, v, tolerance=tolerance(), dtype=dtype)
    for number in (0, 131, 299):
        alone = latent_solve(R, v[number : number + 1], tolerance=tolerance(), dtype=dtype)
        assert torch.equal(alone.value[0], whole.value[number])
        assert int(alone.steps) == int(whole.steps[number])


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_graph_replays_it_with_other_inputs_to_the_bit(name: str, train: bool) -> None:
    R, v, dtype = made(name, train=train, batch=150)
    others = [made(name, train=train, batch=150, seed=seed)[1] * scale for seed, scale in ((1, 1.0), (2, 5.0))]
    held, stop = v.clone(), tolerance(atol=1e-2)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        latent_solve(R, held, tolerance=stop, dtype=dtype)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = latent_solve(R, held, tolerance=stop, dtype=dtype)
    for other in (*others, v):
        held.copy_(other)
        for _ in range(2):
            graph.replay()
            assert_equal(captured, latent_solve(R, other, tolerance=stop, dtype=dtype))


def assert_equal(one: Solution, other: Solution) -> None:
    for name in ("value", "residual", "converged", "steps", "stalled", "nonfinite", "diverged"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_programs_that_cannot_all_run_at_once_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from banach.kernels import latent

    R, v, dtype = made("cifar10", train=True, batch=300)
    monkeypatch.setattr(latent, "_cooperative", dict)  # as with a Triton that does not know it
    monkeypatch.setattr(latent, "SPINS", 1 << 14)
    lost = latent.kernel_solve(R, v, None, tolerance(), dtype, programs=256)
    assert bool(lost.value.isnan().all())
    assert bool((lost.steps == -1).all())
    assert not bool(lost.converged.any())


@pytest.mark.parametrize("name", ["mnist", "svhn"])
def test_two_solves_at_once_on_one_device_do_not_wait_for_each_other(name: str) -> None:
    """Each has a program for most multiprocessors: if half of both ran, neither would come to its meetings."""
    cases = [made(name, train=True, batch=100, seed=seed) for seed in (0, 1)]
    stop = tolerance(atol=0.0, max_steps=60)
    wanted = [latent_solve(R, v, tolerance=stop, dtype=dtype) for R, v, dtype in cases]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    got = []
    for _ in range(20):
        for stream, (R, v, dtype) in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                got.append(latent_solve(R, v, tolerance=stop, dtype=dtype))
    torch.cuda.synchronize()
    for number, one in enumerate(got):
        assert_equal(one, wanted[number % 2])
