"""What the kernel that solves for a latent must know: which map R is, when to stop, and what it found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from banach.kernels.block import gather
from banach.kernels.known import says
from banach.kernels.modules import norms_of
from banach.nn.hooks import is_hooked

WIDEST = 64  # channels


@dataclass(frozen=True)
class LatentForm:
    """R(u, v) = outer * (B_n o ... o B_1)(v + inner * u), all B of one kind.

    B(x) = BN(x + LReLU(y)) or, if `late`, BN(LReLU(x + y)), with y = conv2(LReLU(conv1(x))) and no weights in BN.
    `slope` is that of the first leaky ReLU below zero, `slope_after` that of the second. A network of this form
    says so by an attribute `latent_form`; its blocks are `blocks`, each with conv1, conv2 and norm, and with an
    attribute `latent_block`. Both must stand in the class that defines `forward`.
    """

    inner: float = 1.0
    outer: float = 1.0
    slope: float = 0.1
    slope_after: float = 0.1
    late: bool = False


@dataclass(frozen=True)
class Stop:
    """A sample stops when its residual is at most atol + rtol * |T(z)|, or after max_steps evaluations.

    The norm is that of the worst pixel, or Euclidean over the sample, or the root of the mean square.
    """

    atol: float
    rtol: float = 0.0
    max_steps: int = 50
    worst_pixel: bool = True
    mean: bool = False

    def __post_init__(self) -> None:
        if self.worst_pixel and self.mean:
            raise ValueError("a norm is that of the worst pixel or a mean, got both; choose one")

    def scale(self, entries: int) -> float:
        """What turns the root of a sum of squares into the norm, for a sample of so many entries."""
        return 1.0 / math.sqrt(max(entries, 1)) if self.mean else 1.0


@dataclass(frozen=True, eq=False)
class LatentMap:
    """R as tensors: weights (2 blocks, C, C, 3, 3) and biases, in the order they are used.

    known: (2, blocks, C), mean and 1 / deviation to normalise by; None: those of the batch, which couple it.
    """

    form: LatentForm
    weights: Tensor
    biases: Tensor
    eps: float
    known: Tensor | None

    @property
    def blocks(self) -> int:
        return len(self.weights) // 2


@dataclass(frozen=True, eq=False)
class Solved:
    """As in a `Solution`: z_n after n steps, and the norm of T(z_{n-1}) - z_{n-1}; per sample but for the value.

    Where T was not finite: the iterate of least residual. Programs that lost each other leave NaN, and -1 steps.
    """

    value: Tensor
    residual: Tensor
    converged: Tensor
    steps: Tensor
    nonfinite: Tensor
    stalled: Tensor


def describe(R: Any) -> LatentForm | None:
    """The form of R, if it has one that the kernel computes."""
    form = getattr(R, "latent_form", None)
    if not isinstance(form, LatentForm) or not isinstance(R, nn.Module) or not _is_what_it_says(R):
        return None
    try:
        latent_map(R, form)
    except ValueError:
        return None
    return form


def _is_what_it_says(R: Any) -> bool:
    """Does R compute what its class says, and do its blocks? A class that changes `forward` must say so again."""
    blocks = getattr(R, "blocks", ())
    said = says(R, "latent_form") and all(says(block, "latent_block") for block in blocks)
    return said and not any(map(is_hooked, R.modules()))


def latent_map(R: Any, form: LatentForm | None = None) -> LatentMap:
    """R as tensors, in the mode that it is in. Nothing is changed, and no gradient recorded."""
    form = getattr(R, "latent_form", None) if form is None else form
    if form is None:
        raise ValueError(f"{type(R).__name__} has no latent_form, which says what it computes; use banach.solve")
    blocks: list[Any] = list(R.blocks)
    _refuse_unfit(blocks)
    layers = [layer for block in blocks for layer in (block.conv1, block.conv2)]
    norms = norms_of(blocks)
    with torch.no_grad(), torch.autocast(layers[0].weight.device.type, enabled=False):
        return LatentMap(
            form,
            gather([layer.weight for layer in layers]),
            gather([layer.bias for layer in layers]),
            norms[0].eps,
            None if norms[0].training else _known(norms),
        )


def _refuse_unfit(blocks: list[Any]) -> None:
    """Blocks that the kernel would compute wrongly."""
    for block in blocks:
        norm = getattr(block, "norm", None)
        if type(norm) is not nn.BatchNorm2d or norm.affine or not (norm.training or norm.track_running_stats):
            raise ValueError(f"the kernel's blocks end in BatchNorm2d(affine=False), got {norm}; use solve")
        for layer in (block.conv1, block.conv2):
            if not _is_plain(layer):
                raise ValueError(
                    f"the kernel's blocks have 3x3 convolutions, padding 1, bias, at most {WIDEST} channels, "
                    f"got {layer}; use solve"
                )
    if len({(block.norm.training, block.norm.eps, block.conv1.in_channels) for block in blocks}) != 1:
        raise ValueError("the blocks of R are alike, all in training or all in evaluation; use solve for others")


def _is_plain(layer: Any) -> bool:
    if type(layer) is not nn.Conv2d:
        return False
    shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)
    channels = layer.in_channels
    plain = shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros") and layer.bias is not None
    return plain and channels == layer.out_channels and channels <= WIDEST


def _known(norms: list[Any]) -> Tensor:
    mean = torch.stack([norm.running_mean for norm in norms])
    variance = torch.stack([norm.running_var for norm in norms])
    return torch.stack([mean, (variance + norms[0].eps).rsqrt()])
