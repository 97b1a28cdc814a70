"""The Triton kernels on a GPU, at the sizes they were made for: against float64, in graphs, on two streams."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from banach.kernels import has_triton, latent_solve, residual_stack
from banach.kernels.host import SideStream
from banach.kernels.stack import fused_stack
from banach.solve import Solution
from contracts import same
from kernels import cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_triton(), reason="needs Triton")]
Made = TypeVar("Made")


def made(name: str, *, train: bool, batch: int, seed: int = 0) -> tuple[nn.Module, Tensor, torch.dtype]:
    """As each network is used: SVHN in float32, the others with products in bf16."""
    R, v = cases.network(name, train=train, batch=batch, seed=seed, device="cuda")
    v = v.to(memory_format=torch.channels_last)
    return R, v, torch.float32 if name == "svhn" else torch.bfloat16


def solved(*given: Any, dtype: torch.dtype, **how: Any) -> Solution:
    with torch.autocast("cuda", enabled=dtype == torch.bfloat16, dtype=torch.bfloat16):
        return latent_solve(*given, **how)


def captured(call: Callable[[], Made]) -> tuple[torch.cuda.CUDAGraph, Made]:
    """Run once on another stream, then capture: the graph and its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("n", [1, 16, 56, 60, 128])
def test_inverses_agree_with_float64(n: int) -> None:
    assert cases.inverse_error(n, torch.device("cuda")) < 1e-5


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch", [1, 7, 100, 300])
@pytest.mark.parametrize("name", cases.NETWORKS)
def test_few_steps_agree_with_float64(name: str, batch: int, train: bool) -> None:
    R, v, dtype = made(name, train=train, batch=batch)
    z0 = torch.randn_like(v)
    stop = cases.tolerance(atol=0.0, max_steps=3)
    got = solved(R, v, z0, tolerance=stop, dtype=dtype)
    wanted = cases.solve_by_modules(R.double(), v.double(), z0.double(), tolerance=stop)
    bound = 2e-5 if dtype == torch.float32 else 1e-2
    assert cases.distance(got.value, wanted.value) < bound
    assert cases.distance(got.residual, wanted.residual) < bound
    assert bool((got.steps == 3).all())
    assert not bool(got.converged.any())


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", cases.NETWORKS)
def test_it_converges_to_a_fixed_point(name: str, train: bool) -> None:
    R, v, dtype = made(name, train=train, batch=100)
    stop = cases.tolerance(atol=1e-4 if name == "svhn" else 1e-1, max_steps=200)
    got = solved(R, v, tolerance=stop, dtype=dtype)
    assert bool(got.converged.all())
    assert bool((got.residual <= stop.atol).all())
    wanted = cases.solve_by_modules(R.double(), v.double(), tolerance=stop)
    assert int((got.steps - wanted.steps).abs().max()) <= 2
    moved = (R(got.value.double(), v.double()) - got.value).detach()
    assert float(moved.norm(dim=1).max()) < 2 * stop.atol


@pytest.mark.parametrize("name", cases.NETWORKS)
def test_an_image_does_not_depend_on_the_others(name: str) -> None:
    R, v, dtype = made(name, train=False, batch=300)
    whole = solved(R, v, tolerance=cases.tolerance(), dtype=dtype)
    for number in (0, 131, 299):
        alone = solved(R, v[number : number + 1], tolerance=cases.tolerance(), dtype=dtype)
        assert torch.equal(alone.value[0], whole.value[number])
        assert int(alone.steps) == int(whole.steps[number])


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", cases.NETWORKS)
def test_a_graph_replays_it_with_other_inputs_to_the_bit(name: str, train: bool) -> None:
    R, v, dtype = made(name, train=train, batch=150)
    others = [made(name, train=train, batch=150, seed=seed)[1] * scale for seed, scale in ((1, 1.0), (2, 5.0))]
    held, stop = v.clone(), cases.tolerance(atol=1e-2)
    graph, found = captured(lambda: solved(R, held, tolerance=stop, dtype=dtype))
    for other in (*others, v):
        held.copy_(other)
        for _ in range(2):
            graph.replay()
            same(found, solved(R, other, tolerance=stop, dtype=dtype))


@pytest.mark.parametrize("name", ["mnist", "svhn"])
def test_two_solves_at_once_on_one_device_do_not_wait_for_each_other(name: str) -> None:
    """Each has a program for most multiprocessors: if half of both ran, neither would come to its meetings."""
    both = [made(name, train=True, batch=100, seed=seed) for seed in (0, 1)]
    stop = cases.tolerance(atol=0.0, max_steps=60)
    wanted = [solved(R, v, tolerance=stop, dtype=dtype) for R, v, dtype in both]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    got = []
    for _ in range(20):
        for stream, (R, v, dtype) in zip(streams, both, strict=True):
            with torch.cuda.stream(stream):
                got.append(solved(R, v, tolerance=stop, dtype=dtype))
    torch.cuda.synchronize()
    for number, one in enumerate(got):
        same(one, wanted[number % 2])


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("side", "dropout"), [(40, 0.15), (20, 0.0), (10, 0.0)])
def test_a_stack_agrees_with_float64(side: int, dropout: float, train: bool) -> None:
    """Two blocks, every gradient, as well as the modules do it in bf16: where a value rounds to the other side of
    zero the leaky ReLU has another slope."""
    blocks = cases.stack_of(2, dropout=dropout, train=train).cuda()
    x = torch.randn(64, 35, side, side, device="cuda").to(memory_format=torch.channels_last)
    cotangent = torch.randn_like(x)
    masks = torch.rand(2, 64, 35, device="cuda") >= dropout if dropout and train else None
    scale = 1.0 if masks is None else 1 / (1 - dropout)

    def by_modules(b: nn.Sequential, leaf: Tensor) -> Tensor:
        return cases.modules(b, leaf, masks, scale)

    got = cases.answer(blocks, x, lambda b, leaf: fused_stack(b, leaf, masks, scale), cotangent)
    wanted = cases.answer(blocks.double(), x.double(), by_modules, cotangent.double())
    errors = cases.worst(got, wanted)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        usual = cases.worst(cases.answer(blocks.float(), x.bfloat16(), by_modules, cotangent), wanted)
    assert errors["output"] < 1e-2
    for kind, error in errors.items():
        assert error < 1.5 * usual[kind] + 1e-3, kind


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_have_the_strides_of_the_weights(memory_format: torch.memory_format) -> None:
    """So that autograd does not copy them; by `grad`, since `backward` copies to the strides of the weights."""
    blocks = cases.stack_of(2).cuda().to(memory_format=memory_format)  # type: ignore[call-overload]
    weights = [p for p in blocks.parameters() if p.dim() == 4]
    loss = residual_stack(blocks, torch.randn(3, 35, 4, 4, device="cuda")).square().sum()
    for weight, found in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        assert found.stride() == weight.stride()


def test_a_kept_zero_is_not_taken_for_a_dropped_one() -> None:
    """conv1 gives zeros: the leaky ReLU still passes its slope wherever nothing was dropped."""
    blocks = cases.stack_of(1, dropout=0.25).cuda()
    conv1: Any = blocks.get_submodule("0.conv1")
    nn.init.zeros_(conv1.weight)
    nn.init.zeros_(conv1.bias)
    x, masks = torch.randn(16, 35, 20, 20, device="cuda"), torch.rand(1, 16, 35, device="cuda") >= 0.25
    got = cases.answer(blocks, x, lambda b, leaf: fused_stack(b, leaf, masks, 1 / 0.75), x)
    wanted = cases.answer(blocks.double(), x.double(), lambda b, leaf: cases.modules(b, leaf, masks, 1 / 0.75), x)
    assert cases.distance(got.gradients["0.conv1.weight"], wanted.gradients["0.conv1.weight"]) < 3e-2


def test_a_stack_gives_the_same_bits_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, many times, from two streams: what the second stream reads must not be overwritten."""
    blocks = cases.stack_of(8).cuda()
    x = torch.randn(64, 35, 20, 20, device="cuda").to(memory_format=torch.channels_last)
    cotangent = torch.randn_like(x)
    with monkeypatch.context() as patch:
        patch.setattr(SideStream, "run", lambda self, work, *reads: work(*reads))
        wanted = cases.answer(blocks, x, residual_stack, cotangent)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for turn in range(6):
        with torch.cuda.stream(streams[turn % 2]):
            got = cases.answer(blocks, x, residual_stack, cotangent)
            assert torch.equal(got.out, wanted.out)
            assert torch.equal(got.dx, wanted.dx)
            for name, gradient in got.gradients.items():
                assert torch.equal(gradient, wanted.gradients[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_a_convolution_agrees_with_float64(case: cases.Case, dtype: torch.dtype) -> None:
    for images in (2, 37, 140, 600):  # tiles for few pixels and for many
        bound = 3e-6 if dtype == torch.float32 else 6e-3
        assert cases.worst_error(case, dtype, images, "cuda") < bound
