"""The Triton kernels on a GPU, at the sizes they were made for, against float64 and in a CUDA graph."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from banach.kernels import has_triton, residual_stack
from banach.kernels.device import SideStream
from kernels.reference_blocks import answer, distance, modules, stack_of, worst

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs CUDA and Triton"),
]
BF16 = 1e-2  # of operands in bf16, by relative error


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("side", "dropout"), [(40, 0.15), (20, 0.0), (10, 0.0)])
def test_a_stack_agrees_with_float64(side: int, dropout: float, train: bool) -> None:
    """Two blocks, every gradient, as well as the modules do it in bf16: where a value rounds to the other side of
    zero the leaky ReLU has another slope."""
    blocks = stack_of(2, dropout=dropout, train=train).cuda()
    x = torch.randn(64, 35, side, side, device="cuda").to(memory_format=torch.channels_last)
    cotangent = torch.randn_like(x)
    masks = torch.rand(2, 64, 35, device="cuda") >= dropout if dropout and train else None
    got = answer(blocks, x, lambda b, leaf: residual_stack(b, leaf, masks=masks), cotangent)
    scale = 1 / (1 - dropout)
    wanted = answer(
        blocks.double(), x.double(), lambda b, leaf: modules(b, leaf, masks, scale), cotangent.double()
    )
    errors = worst(got, wanted)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        usual = worst(
            answer(blocks.float(), x.bfloat16(), lambda b, leaf: modules(b, leaf, masks, scale), cotangent), wanted
        )
    assert errors["output"] < BF16
    for kind, error in errors.items():
        assert error < 1.5 * usual[kind] + 1e-3, kind


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_have_the_strides_of_the_weights(memory_format: torch.memory_format) -> None:
    """So that autograd does not copy them; by `grad`, since `backward` copies to the strides of the weights."""
    blocks = stack_of(2).cuda().to(memory_format=memory_format)  # type: ignore[call-overload]
    weights = [p for p in blocks.parameters() if p.dim() == 4]
    loss = residual_stack(blocks, torch.randn(3, 35, 4, 4, device="cuda")).square().sum()
    for weight, found in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        assert found.stride() == weight.stride()


def test_a_kept_zero_is_not_taken_for_a_dropped_one() -> None:
    """conv1 gives zeros: the leaky ReLU still passes its slope wherever nothing was dropped."""
    blocks = stack_of(1, dropout=0.25).cuda()
    conv1: Any = blocks.get_submodule("0.conv1")
    nn.init.zeros_(conv1.weight)
    nn.init.zeros_(conv1.bias)
    x, masks = torch.randn(16, 35, 20, 20, device="cuda"), torch.rand(1, 16, 35, device="cuda") >= 0.25
    got = answer(blocks, x, lambda b, leaf: residual_stack(b, leaf, masks=masks), x)
    wanted = answer(blocks.double(), x.double(), lambda b, leaf: modules(b, leaf, masks, 1 / 0.75), x)
    assert distance(got.gradients["0.conv1.weight"], wanted.gradients["0.conv1.weight"]) < 3e-2


def test_the_same_bits_every_time() -> None:
    blocks, x = stack_of(2).cuda(), torch.randn(64, 35, 20, 20, device="cuda")
    first, second = (answer(blocks, x, residual_stack, x) for _ in range(2))
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.dx, second.dx)
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name]), name


def test_a_stack_can_be_captured() -> None:
    blocks = stack_of(2).cuda()
    x = torch.randn(64, 35, 20, 20, device="cuda").requires_grad_()
    fresh = copy.deepcopy(blocks)

    def step() -> torch.Tensor:
        out = residual_stack(blocks, x)
        gradients = torch.autograd.grad(out.square().sum(), [x, *blocks.parameters()])
        return torch.cat([gradient.flatten() for gradient in gradients])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    blocks = fresh
    assert distance(captured, step()) == 0


def test_a_side_stream_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, many times, from two streams: what the second stream reads must not be overwritten."""
    blocks = stack_of(8).cuda()
    x = torch.randn(64, 35, 20, 20, device="cuda").to(memory_format=torch.channels_last)
    cotangent = torch.randn_like(x)
    with monkeypatch.context() as patch:
        patch.setattr(SideStream, "run", lambda self, work, *reads: work(*reads))
        wanted = answer(copy.deepcopy(blocks), x, residual_stack, cotangent)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for turn in range(6):
        with torch.cuda.stream(streams[turn % 2]):
            got = answer(copy.deepcopy(blocks), x, residual_stack, cotangent)
            assert torch.equal(got.dx, wanted.dx)
            for name, gradient in got.gradients.items():
                assert torch.equal(gradient, wanted.gradients[name]), name
