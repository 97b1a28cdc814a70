"""Other weights and layers compute the same: bf16 weights, fused blocks, window convolutions, channels_last."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import networks
from banach import ImplicitNetwork, Tolerance, models
from banach.fast import FastNetwork, channels_last, plan
from banach.fast.network import (
    Bf16Weights,
    FusedStack,
    WindowConv2d,
    with_kernels,
)
from banach.fast.plan import arithmetic, convolves_in_tf32
from fast.simulated import digits, images
from problems import normal


def gradients(bf16: bool) -> tuple[Any, torch.Tensor]:
    """Take two steps, between which the weights change. The loss reads them too, as weight decay does."""
    net, d = digits(Tolerance(atol=1e-2, max_steps=20)), images(dtype=torch.float32)
    made = FastNetwork(net, plan(net, precision="bf16" if bf16 else "fp32"))
    for _ in range(2):
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.9)
                p.grad = None
        made.bf16.refresh()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = made(d)[0]
        decay = 0.1 * torch.stack([p.square().sum() for p in net.parameters()]).sum()
        (F.cross_entropy(output.float(), torch.arange(6)) + decay).backward()
        made.bf16.collect()
    return net, output


def test_outputs_gradients_and_statistics_are_those_of_autocast() -> None:
    (own, expected), (net, output) = gradients(False), gradients(True)
    torch.testing.assert_close(output, expected)
    for (name, a), b in zip(net.named_parameters(), own.parameters(), strict=True):
        assert a.grad is not None, name
        assert a.grad.dtype == torch.float32
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    torch.testing.assert_close(dict(net.named_buffers()), dict(own.named_buffers()))


def test_modules_share_their_weights_in_bf16_too() -> None:
    layer = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    made: Any = Bf16Weights({"Q": layer, "R": torch.tanh, "S": layer[0]}).modules
    assert made["Q"][0].weight is made["S"].weight
    assert made["Q"][1].weight is layer[1].weight  # norms keep their weights in fp32
    assert made["R"] is torch.tanh


def test_weights_of_kernels_are_cast_to_channels_last_and_get_gradients_in_their_own_format() -> None:
    layer: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    made = Bf16Weights({"R": with_kernels(layer, windows=True)})
    R: Any = made.modules["R"]
    for original, cast in zip((layer[0], layer[2]), (R[0], R[2]), strict=True):
        assert cast.weight.is_contiguous(memory_format=torch.channels_last)
        assert not original.weight.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        layer[0].weight.mul_(3)
    made.refresh()
    torch.testing.assert_close(R[0].weight, layer[0].weight.bfloat16())
    x = normal(2, 3, 8, 8).float()
    R(x.bfloat16()).float().square().sum().backward()
    made.collect()
    expected = networks.gradients(layer, layer(x).square().sum())
    for p, grad in zip(layer.parameters(), expected, strict=True):
        assert p.grad is not None
        assert p.grad.stride() == p.stride()
        assert torch.nn.functional.cosine_similarity(p.grad.flatten(), grad.flatten(), dim=0) > 0.999


def latent_map() -> Any:
    torch.manual_seed(0)
    net = models.build("cifar10")
    assert isinstance(net, ImplicitNetwork)
    return net.R.double().train()


def data_part(name: str) -> Any:
    torch.manual_seed(0)
    Q: Any = models.build(name).double().eval().Q
    if name == "cifar10":
        Q.stage1, Q.stage2 = Q.stage1[:1], Q.stage2[:1]
    return Q


def fused(part: Any) -> Any:
    return with_kernels(part, stacks=True)


def windowed(part: Any) -> Any:
    return with_kernels(part, windows=True)


LATENT = normal(2, 35, 4, 4, seed=1), normal(2, 35, 4, 4, seed=2)
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], tuple[Tensor, ...]]] = {
    "fused blocks": (latent_map, fused, LATENT),
    "fused blocks, compiled around them": (
        lambda: data_part("cifar10"),
        lambda Q: torch.compile(fused(Q), backend="aot_eager"),
        (normal(1, 3, 8, 8),),
    ),
    "window convolutions": (lambda: data_part("mnist"), windowed, (normal(2, 1, 28, 28),)),
    "window convolutions, strided": (lambda: data_part("svhn"), windowed, (normal(2, 3, 32, 32),)),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it where a graph goes on
@pytest.mark.parametrize("name", CHANGES)
def test_the_same_value_gradient_and_statistics(name: str) -> None:
    make, change, inputs = CHANGES[name]
    own, other = make(), make()
    replaced = change(other)
    assert any(isinstance(module, FusedStack | WindowConv2d) for module in replaced.modules())
    value, expected = replaced(*inputs), own(*inputs)
    torch.testing.assert_close(value, expected)
    got, wanted = networks.gradients(other, value.square().sum()), networks.gradients(own, expected.square().sum())
    torch.testing.assert_close([*got, *other.buffers()], [*wanted, *own.buffers()])


def test_only_stacks_are_replaced_and_their_blocks_are_not_children() -> None:
    Q: Any = models.build("cifar10").Q
    made = fused(Q)
    assert [type(child).__name__ for child in made.children()] == ["Conv2d", "FusedStack", "FusedStack"]
    assert list(made.parameters()) == list(Q.conv.parameters())
    assert copy.deepcopy(made).stage1.blocks[0] is Q.stage1[0]
    without: Any = models.build("cifar10", batch_norm=False)
    assert all(fused(part) is part for part in (models.build("mnist"), without.R))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(65, 3, 3),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, (3, 1)),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
        nn.Conv1d(4, 4, 3),
    ],
    ids=str,
)
def test_other_convolutions_stay(layer: nn.Module) -> None:
    assert windowed(layer) is layer


def test_tf32_is_read_from_the_new_flags() -> None:
    """The old flag raises where the new one was set."""
    backends: Any = torch.backends.cudnn
    conv = backends.conv
    before = conv.fp32_precision
    try:
        conv.fp32_precision = "ieee"
        assert not convolves_in_tf32()
        conv.fp32_precision = "tf32"
        assert convolves_in_tf32()
    finally:
        conv.fp32_precision = before


@pytest.mark.parametrize("given", ["ieee", "tf32"])
def test_a_run_sets_tf32_where_the_new_flags_were_set(given: str) -> None:
    """Reading the old flag to put it back was an error of PyTorch: no run began on a GPU, and no evaluation."""
    cudnn: Any = torch.backends.cudnn
    flags: Any = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    before = [flag.fp32_precision for flag in flags]
    try:
        flags[0].fp32_precision, flags[1].fp32_precision = "tf32", given
        wanted = [flag.fp32_precision for flag in flags]
        for precision, inside in {"fp32": "ieee", "tf32": "tf32", "bf16": "ieee"}.items():
            with arithmetic(precision, torch.device("cuda")):
                assert [flag.fp32_precision for flag in flags] == [inside] * 3
                assert convolves_in_tf32() == (inside == "tf32")
            assert [flag.fp32_precision for flag in flags] == wanted
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.fp32_precision = value


def test_channels_last_stays_through_the_network() -> None:
    """The weights are the same numbers, and what the network makes of an image follows them."""
    torch.manual_seed(0)
    net: Any = models.build("digits", tolerance=Tolerance(atol=1e-9, max_steps=300)).double().eval()
    d = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    before, weights = net(d), [p.detach().clone() for p in net.parameters()]
    assert channels_last(net) is net
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), weights, strict=True))
    assert net.Q(d).is_contiguous(memory_format=torch.channels_last)
    after, found = net(d, solution=True)
    assert found.value.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)
