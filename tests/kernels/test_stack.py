"""residual_stack without a GPU: the reference against the modules in float64, masks, refusals."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach.kernels import repeated_stack, residual_stack
from banach.models.paper import Block
from kernels.cases import answer, modules, stack_of, worst

EXACT = 1e-11
RATE = 0.25


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("dropout", [0.0, RATE])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_a_stack_is_its_modules(train: bool, dropout: float) -> None:
    """Values, every gradient, and the running statistics that are left behind."""
    blocks = stack_of(3, dropout=dropout, train=train).double()
    x, cotangent = normal(3, 35, 5, 4), normal(3, 35, 5, 4)
    masks = torch.rand(3, 3, 35) >= dropout if dropout and train else None
    got = answer(blocks, x, lambda b, leaf: residual_stack(b, leaf, masks=masks), cotangent)
    wanted = answer(blocks, x, lambda b, leaf: modules(b, leaf, masks, 1 / (1 - dropout)), cotangent)
    for kind, error in worst(got, wanted).items():
        assert error < EXACT, kind


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_a_repeated_stack_is_the_same_map(train: bool) -> None:
    """Copied once, used many times: no batch's statistics leak into the next, and none are written back."""
    blocks, inputs = stack_of(3, train=train).double(), normal(2, 2, 35, 4, 4)
    before = copy.deepcopy(blocks.state_dict())
    repeated = repeated_stack(blocks, inputs[0])
    for x in (inputs[0], inputs[1], inputs[0]):
        got = repeated(x)
        assert not got.requires_grad
        torch.testing.assert_close(got, copy.deepcopy(blocks)(x), rtol=EXACT, atol=EXACT)
    for name, value in blocks.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_masks_are_drawn_at_the_rate_of_the_blocks() -> None:
    """The mean of many draws is the answer without dropout, where that is linear in the mask."""
    blocks, x = stack_of(1, dropout=RATE).double(), normal(1, 35, 4, 4)
    block: Any = blocks[0]
    block.norm.eval()
    nn.init.constant_(block.conv1.bias, 50.0)
    nn.init.constant_(block.conv2.bias, 200.0)
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


def changed(name: str, value: nn.Module) -> Callable[[], nn.Sequential]:
    def make() -> nn.Sequential:
        blocks = stack_of(2, dropout=RATE)
        setattr(blocks[0], name, value)
        return blocks

    return make


UNFIT: dict[str, Callable[[], nn.Sequential]] = {
    "affine=False": changed("norm", nn.BatchNorm2d(35)),
    "running statistics": changed("norm", nn.BatchNorm2d(35, affine=False, momentum=None)),
    "3x3 convolutions": changed("conv2", nn.Conv2d(35, 35, 3, 2, 1)),
    "one mode": changed("norm", nn.BatchNorm2d(35, affine=False).eval()),
    "one rate": changed("drop", nn.Dropout2d(0.5)),
    "end in BatchNorm2d": lambda: nn.Sequential(Block(batch_norm=False)),
}


@pytest.mark.parametrize("message", UNFIT)
def test_blocks_that_would_be_computed_wrongly_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        residual_stack(UNFIT[message](), torch.randn(2, 35, 4, 4))


def test_a_repeated_stack_refuses_dropout() -> None:
    with pytest.raises(ValueError, match="without dropout"):
        repeated_stack(stack_of(1, dropout=RATE), torch.randn(2, 35, 4, 4))
