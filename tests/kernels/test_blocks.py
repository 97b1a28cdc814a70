"""A stack of blocks in plain torch, against the modules and autograd in float64."""

import copy

import pytest
import torch
from torch import Tensor, nn

from banach.kernels import Layout, Plain, repeated_stack, residual_stack
from banach.kernels.compare import compare
from banach.models.cifar10 import Block
from kernels.reference_blocks import Answer, answer, distance, modules, stack_of, worst

EXACT = 1e-11
RATE = 0.25


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def pair(train: bool, dropout: float, blocks: nn.Sequential) -> tuple[Answer, Answer]:
    """The stack's answer and the modules', on the same input, masks and cotangent."""
    torch.manual_seed(1)
    x, cotangent = normal(3, 35, 5, 4), normal(3, 35, 5, 4)
    masks = torch.rand(len(blocks), 3, 35) >= dropout if dropout and train else None
    got = answer(blocks, x, lambda b, leaf: residual_stack(b, leaf, masks=masks), cotangent)
    scale = 1 / (1 - dropout)
    return got, answer(blocks, x, lambda b, leaf: modules(b, leaf, masks, scale), cotangent)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, RATE])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_a_stack_is_its_modules(train: bool, dropout: float, count: int) -> None:
    """Values, every gradient, and the running statistics that are left behind."""
    got, wanted = pair(train, dropout, stack_of(count, dropout=dropout, train=train).double())
    for kind, error in worst(got, wanted).items():
        assert error < EXACT, kind


@pytest.mark.parametrize("lying", [torch.contiguous_format, torch.channels_last])
def test_gradients_lie_as_the_weights_do(lying: torch.memory_format) -> None:
    """So that autograd keeps them as they are; by `grad`, since `backward` lays them out itself."""
    blocks = stack_of(2).to(memory_format=lying)  # type: ignore[call-overload]
    weights = [p for p in blocks.parameters() if p.dim() == 4]
    loss = residual_stack(blocks, torch.randn(3, 35, 4, 4)).square().sum()
    for weight, found in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        assert found.stride() == weight.stride()


def test_storage_in_bf16_costs_what_bf16_costs() -> None:
    blocks, x = stack_of(3), torch.randn(8, 35, 8, 8)
    cotangent = torch.randn_like(x)
    narrow = Plain(Layout(35), torch.bfloat16)
    got = answer(blocks, x, lambda b, leaf: residual_stack(b, leaf, operations=narrow), cotangent)
    wanted = answer(blocks.double(), x.double(), lambda b, leaf: modules(b, leaf, None, 1), cotangent)
    errors = worst(got, wanted)
    assert 1e-4 < errors["output"] < 1e-2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        usual = worst(
            answer(blocks.float(), x.bfloat16(), lambda b, leaf: modules(b, leaf, None, 1), cotangent), wanted
        )
    # Where a value rounds to the other side of zero, the leaky ReLU's slope is another: gradients err by more,
    # and by as much in the modules.
    for kind, error in errors.items():
        assert error < 1.5 * usual[kind], kind
    assert got.out.dtype == torch.float32


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_without_gradients_the_answer_is_the_same(train: bool) -> None:
    blocks, x = stack_of(2, train=train).double(), normal(2, 35, 4, 4)
    recorded = residual_stack(copy.deepcopy(blocks), x)
    with torch.no_grad():
        bare = residual_stack(copy.deepcopy(blocks), x)
    assert recorded.requires_grad
    assert not bare.requires_grad
    assert torch.equal(recorded, bare)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_a_repeated_stack_is_the_same_map(train: bool) -> None:
    """Packed once, used many times: no batch's statistics leak into the next, and none are written back."""
    blocks, inputs = stack_of(3, train=train).double(), normal(2, 2, 35, 4, 4)
    before = copy.deepcopy(blocks.state_dict())
    repeated = repeated_stack(blocks, inputs[0])
    for x in (inputs[0], inputs[1], inputs[0]):
        got = repeated(x)
        assert not got.requires_grad
        torch.testing.assert_close(got, copy.deepcopy(blocks)(x), rtol=EXACT, atol=EXACT)
    for name, value in blocks.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_repeated_stack_refuses_dropout() -> None:
    with pytest.raises(ValueError, match="has no dropout"):
        repeated_stack(stack_of(1, dropout=RATE), torch.randn(2, 35, 4, 4))


def test_masks_are_drawn_at_the_rate_of_the_blocks() -> None:
    """The mean of many draws is the answer without dropout, where that is linear in the mask."""
    blocks, x = stack_of(1, dropout=RATE, train=True).double(), normal(1, 35, 4, 4)
    for module in blocks.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    block = blocks[0]
    assert isinstance(block, Block)
    nn.init.constant_(block.conv1.bias, 50.0)  # type: ignore[arg-type]
    nn.init.constant_(block.conv2.bias, 200.0)  # type: ignore[arg-type]
    with torch.no_grad():
        draws = torch.stack([residual_stack(blocks, x) for _ in range(600)])
        wanted = residual_stack(blocks.eval(), x)
    spread = draws.std(0) / 600**0.5
    assert float(draws.std(0).min()) > 0
    assert float(((draws.mean(0) - wanted) / spread).abs().max()) < 5


def test_a_kept_zero_is_not_taken_for_a_dropped_one() -> None:
    """conv1 of zeros: torch's leaky ReLU still passes its slope, and so do we, wherever nothing was dropped."""
    blocks = stack_of(1, dropout=RATE).double()
    block = blocks[0]
    assert isinstance(block, Block)
    nn.init.zeros_(block.conv1.weight)
    nn.init.zeros_(block.conv1.bias)  # type: ignore[arg-type]
    got, wanted = pair(True, RATE, blocks)
    assert float(wanted.gradients["0.conv1.weight"].norm()) > 0
    assert distance(got.gradients["0.conv1.weight"], wanted.gradients["0.conv1.weight"]) < EXACT


def test_second_derivatives_are_refused() -> None:
    x = normal(2, 35, 3, 3).requires_grad_()
    out = residual_stack(stack_of(1).double(), x)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)


def test_autocast_changes_nothing_inside() -> None:
    blocks, x = stack_of(2), torch.randn(2, 35, 4, 4)
    wanted = residual_stack(copy.deepcopy(blocks), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = residual_stack(copy.deepcopy(blocks), x)
    assert torch.equal(got, wanted)


def test_each_operation_in_bf16() -> None:
    """Alone, on the same input: nothing rounds to the other side of zero, and bf16 keeps eight bits."""
    errors = compare(Plain(Layout(35), torch.bfloat16), Layout(35), (3, 5, 4), "cpu")
    assert len(errors) == 19
    for name, error in errors.items():
        assert error < 4e-3, name


def unfit() -> list[tuple[str, nn.Sequential]]:
    affine, strided, mixed, rates = stack_of(1), stack_of(1), stack_of(2), stack_of(2, dropout=RATE)
    affine[0].norm = nn.BatchNorm2d(35)
    strided[0].conv2 = nn.Conv2d(35, 35, 3, 2, 1)
    mixed[0].eval()
    rates[0].drop = nn.Dropout2d(0.5)
    without = nn.Sequential(Block(batch_norm=False))
    return [
        ("affine=False", affine),
        ("3x3 convolutions", strided),
        ("all in training", mixed),
        ("one rate", rates),
        ("end in BatchNorm2d", without),
    ]


@pytest.mark.parametrize(("message", "blocks"), unfit(), ids=lambda value: value if isinstance(value, str) else "")
def test_blocks_that_would_be_computed_wrongly_are_refused(message: str, blocks: nn.Sequential) -> None:
    with pytest.raises(ValueError, match=message):
        residual_stack(blocks, torch.randn(2, 35, 4, 4))
