"""residual_stack without a GPU: the reference against the modules in float64, masks, refusals, the side stream."""

import copy

import pytest
import torch
from torch import Tensor, nn

from banach.kernels import repeated_stack, residual_stack
from banach.kernels.device import SideStream
from banach.kernels.stack import Layout
from banach.models.cifar10 import Block
from kernels.reference_blocks import Answer, answer, modules, stack_of, worst

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
    with pytest.raises(ValueError, match="without dropout"):
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


def test_autocast_changes_nothing_inside() -> None:
    blocks, x = stack_of(2), torch.randn(2, 35, 4, 4)
    wanted = residual_stack(copy.deepcopy(blocks), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = residual_stack(copy.deepcopy(blocks), x)
    assert torch.equal(got, wanted)


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
        ("one mode", mixed),
        ("one rate", rates),
        ("end in BatchNorm2d", without),
    ]


@pytest.mark.parametrize(("message", "blocks"), unfit(), ids=lambda value: value if isinstance(value, str) else "")
def test_blocks_that_would_be_computed_wrongly_are_refused(message: str, blocks: nn.Sequential) -> None:
    with pytest.raises(ValueError, match=message):
        residual_stack(blocks, torch.randn(2, 35, 4, 4))


@pytest.mark.parametrize("channels", [1, 5, 13, 29, 35, 61])
def test_a_pixel_has_room_for_the_ones_and_begins_at_16_bytes(channels: int) -> None:
    layout = Layout.of(channels)
    assert channels + 3 <= layout.pitch <= layout.columns <= 64
    assert layout.pitch % 8 == 0
    assert 3 * layout.pitch <= layout.depth


def test_on_a_cpu_a_side_stream_works_at_once() -> None:
    side = SideStream(torch.device("cpu"))
    (total,) = side.run(lambda x, y: (x + y,), torch.ones(2), torch.ones(2))
    side.join()
    assert total.tolist() == [2.0, 2.0]
