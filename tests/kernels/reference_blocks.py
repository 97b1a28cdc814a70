"""Stacks of the CIFAR-10 network's blocks, and what they compute by autograd in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.models.cifar10 import Block


@dataclass(frozen=True)
class Answer:
    """What a stack gives: output, gradient of the input, of each parameter, and the buffers it leaves."""

    out: Tensor
    dx: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def stack_of(count: int, *, dropout: float = 0.0, train: bool = True, seed: int = 0) -> nn.Sequential:
    """Blocks whose running statistics are not the ones they begin with."""
    torch.manual_seed(seed)
    blocks = nn.Sequential(*(Block(dropout=dropout) for _ in range(count)))
    for block in blocks:
        assert isinstance(block, Block)
        assert isinstance(block.norm, nn.BatchNorm2d)
        assert block.norm.running_mean is not None
        assert block.norm.running_var is not None
        block.norm.running_mean.normal_()
        block.norm.running_var.uniform_(0.5, 2)
    return blocks.train(train)


def modules(blocks: nn.Sequential, x: Tensor, masks: Tensor | None, scale: float) -> Tensor:
    """The modules one after the other, with dropout's masks given."""
    for number, block in enumerate(blocks):
        assert isinstance(block, Block)
        hidden = F.leaky_relu(block.conv1(x), 0.1)
        if masks is not None:
            hidden = hidden * masks[number, :, :, None, None] * scale
        x = block.norm(F.leaky_relu(x + block.conv2(hidden), 0.1))
    return x


def answer(blocks: nn.Sequential, x: Tensor, run: object, cotangent: Tensor) -> Answer:
    """Run a copy of the blocks forward and back."""
    copied, leaf = copy.deepcopy(blocks), x.detach().clone().requires_grad_()
    assert callable(run)
    out = run(copied, leaf)
    out.backward(cotangent.to(out.dtype))
    assert leaf.grad is not None
    gradients = {name: p.grad for name, p in copied.named_parameters() if p.grad is not None}
    return Answer(out.detach(), leaf.grad, gradients, dict(copied.named_buffers()))


def distance(got: Tensor, wanted: Tensor) -> float:
    """Relative error; a NaN stays one."""
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-300))


def worst(got: Answer, wanted: Answer) -> dict[str, float]:
    """The largest relative error of each kind."""
    assert got.gradients.keys() == wanted.gradients.keys()
    return {
        "output": distance(got.out, wanted.out),
        "input's gradient": distance(got.dx, wanted.dx),
        "parameters' gradients": max(distance(got.gradients[n], wanted.gradients[n]) for n in wanted.gradients),
        "buffers": max(distance(got.buffers[n], wanted.buffers[n]) for n in wanted.buffers),
    }
