"""residual_stack without a GPU: the modules, masks, refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach.kernels import residual_stack, stack
from banach.models.paper import Block
from kernels.cases import stack_of

RATE = 0.25


def test_without_a_kernel_a_stack_is_its_modules() -> None:
    blocks, x = stack_of(3, train=False).double(), torch.randn(3, 35, 5, 4, dtype=torch.float64)
    assert torch.equal(residual_stack(blocks, x), blocks(x))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Simulate kernels; return the masks and scales they are called with."""
    seen: list[Any] = []

    def record(blocks: Any, x: Tensor, masks: Tensor | None, scale: float) -> Tensor:
        seen.append((masks, scale))
        return x

    monkeypatch.setattr(stack, "has_kernel", lambda x: True)
    monkeypatch.setattr(stack, "fused_stack", record)
    return seen


def test_masks_are_drawn_at_the_rate_of_the_blocks(kernel: list[Any]) -> None:
    blocks, x = stack_of(4, dropout=RATE), torch.randn(200, 35, 1, 1)
    residual_stack(blocks, x)
    residual_stack(blocks.eval(), x)
    (masks, scale), without = kernel
    assert masks.shape == (4, 200, 35)
    assert float(masks.float().mean()) == pytest.approx(1 - RATE, abs=0.02)  # 28,000 draws: a deviation of .0026
    assert scale == 1 / (1 - RATE)
    assert without == (None, 1.0)


def changed(name: str, value: nn.Module) -> Callable[[], nn.Sequential]:
    def make() -> nn.Sequential:
        blocks = stack_of(2, dropout=RATE)
        setattr(blocks[0], name, value)
        return blocks

    return make


UNFIT: dict[str, Callable[[], nn.Sequential]] = {
    "affine": changed("norm", nn.BatchNorm2d(35)),
    "no momentum": changed("norm", nn.BatchNorm2d(35, affine=False, momentum=None)),
    "a larger convolution": changed("conv2", nn.Conv2d(35, 35, 5, padding=2)),
    "two modes": changed("norm", nn.BatchNorm2d(35, affine=False).eval()),
    "two rates": changed("drop", nn.Dropout2d(0.5)),
    "another dropout": changed("drop", nn.Dropout(RATE)),
    "no batch norm": lambda: nn.Sequential(Block(batch_norm=False)),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_blocks_that_would_be_computed_wrongly_are_left_to_the_modules(unfit: str, kernel: list[Any]) -> None:
    for dropout in (0.0, RATE):
        residual_stack(stack_of(2, dropout=dropout), torch.randn(2, 35, 4, 4))
    assert len(kernel) == 2
    residual_stack(UNFIT[unfit](), torch.randn(2, 35, 4, 4))
    assert len(kernel) == 2
