"""Fused stacks stand in for Sequentials: the same values, gradients and statistics, by the plain twins."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from banach import ImplicitNetwork, models
from banach.fast.fuse import FusedStack, can_fuse, stacks_of, with_fused_stacks
from banach.fast.twin import traceless_twin


def latent_map() -> Any:
    torch.manual_seed(0)
    net = models.build("cifar10")
    assert isinstance(net, ImplicitNetwork)
    return net.R.double().train()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    u, v = (torch.randn(2, 35, 4, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    return u, v


def test_the_same_value_gradient_and_statistics() -> None:
    own, other = latent_map(), latent_map()
    fused = with_fused_stacks(other)
    u, v = inputs()
    expected, value = own(u, v), fused(u, v)
    torch.testing.assert_close(value, expected)
    expected.square().sum().backward()
    value.square().sum().backward()
    for (name, a), b in zip(own.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)
    for (name, a), b in zip(own.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(b, a, msg=name)


def test_the_twin_for_iterations_leaves_no_trace_and_packs_once() -> None:
    R = latent_map()
    before = copy.deepcopy(R.state_dict())
    twin = traceless_twin(with_fused_stacks(R))
    u, v = inputs()
    with torch.no_grad():
        value = twin(u, v)
        torch.testing.assert_close(value, latent_map()(u, v))
        assert all(torch.equal(value, before[name]) for name, value in R.state_dict().items())
        for p in R.parameters():
            p.mul_(0.5)
        torch.testing.assert_close(twin(u, v), value)  # packed before the change
        for stack in stacks_of(twin):
            stack.forget()
        assert not torch.allclose(twin(u, v), value)


def test_only_stacks_are_replaced_and_their_blocks_are_not_children() -> None:
    net = models.build("cifar10")
    assert isinstance(net, ImplicitNetwork)
    fused = with_fused_stacks(net.Q)
    assert [type(child).__name__ for child in fused.children()] == ["Conv2d", "FusedStack", "FusedStack"]
    assert fused.conv.weight is net.Q.conv.weight
    assert isinstance(net.Q.stage1, nn.Sequential)
    assert sum(p.numel() for p in fused.parameters()) == net.Q.conv.weight.numel() + net.Q.conv.bias.numel()
    again = copy.deepcopy(fused)
    assert stacks_of(again)[0].blocks[0] is net.Q.stage1[0]


@pytest.mark.parametrize("name", ["mnist", "svhn", "digits"])
def test_other_networks_have_nothing_to_fuse(name: str) -> None:
    net = models.build(name)
    assert isinstance(net, ImplicitNetwork)
    assert not any(map(can_fuse, (net.Q, net.R, net.S)))
    assert stacks_of(with_fused_stacks(net.R)) == []


def test_without_batch_norm_there_is_nothing_to_fuse() -> None:
    net = models.build("cifar10", batch_norm=False)
    assert isinstance(net, ImplicitNetwork)
    assert stacks_of(with_fused_stacks(net.R)) == []
    assert len(stacks_of(with_fused_stacks(net.Q))) == 2


def test_what_is_no_module_stays() -> None:
    assert with_fused_stacks(torch.tanh) is torch.tanh
    assert not can_fuse(torch.tanh)
    assert isinstance(with_fused_stacks(models.build("cifar10").Q.stage1), FusedStack)  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it where a graph goes on
def test_what_is_around_a_stack_compiles() -> None:
    """A stack is called as it is between compiled pieces."""
    torch.manual_seed(0)
    Q: Any = models.build("cifar10").Q.double().eval()  # type: ignore[union-attr]
    Q.stage1, Q.stage2 = Q.stage1[:1], Q.stage2[:1]
    d = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    compiled = torch.compile(with_fused_stacks(Q), backend="aot_eager")
    value = compiled(d)
    torch.testing.assert_close(value, Q(d))
    gradients = torch.autograd.grad(Q(d).square().sum(), list(Q.parameters()))
    for a, b in zip(torch.autograd.grad(value.square().sum(), list(Q.parameters())), gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_a_fused_step_is_near_the_plain_one() -> None:
    """The first loss and the gradients of a bf16 step, against the network itself in fp32."""
    import torch.nn.functional as F

    from banach import Tolerance, WorstPixel
    from banach.fast import FixedDepth

    torch.manual_seed(0)
    net: Any = (
        models.build("cifar10", tolerance=Tolerance(atol=0.1, max_steps=50, norm=WorstPixel())).cuda().train()
    )
    for module in net.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.p = 0.0
    d, y = torch.randn(64, 3, 32, 32, device="cuda"), torch.randint(10, (64,), device="cuda")
    F.cross_entropy(net(d), y).backward()
    exact = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    made = FixedDepth(net, half=True)
    assert stacks_of(made.Q)
    made.refresh()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output, reached = made(d, 12)
    F.cross_entropy(output.float(), y).backward()
    made.collect()
    cosine = torch.nn.functional.cosine_similarity(
        torch.cat([p.grad.flatten() for p in net.parameters()]), torch.cat([g.flatten() for g in exact]), dim=0
    )
    assert float(cosine) > 0.98
    assert float(reached.residual.max()) < 0.1
