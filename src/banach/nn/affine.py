"""Linear layers and convolutions as operators: the products with A and with A', and the norm of A."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from banach.solve.context import without_autocast

AffineLayer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


class Operator:
    """x -> A x, the layer without its bias, on one input of this shape. Products are in at least float32.

    The norm of a convolution is that of this operator, not of the kernel reshaped to a matrix: that one ignores
    where the kernel meets the border and is off by up to the square root of the kernel's area, in both directions.
    """

    def __init__(self, layer: AffineLayer, weight: Tensor, shape: tuple[int, ...]) -> None:
        short = weight.dtype in (torch.bfloat16, torch.float16)
        self.layer, self.weight, self.shape = layer, weight.float() if short else weight, shape

    def forward(self, x: Tensor) -> Tensor:
        return applied(self.layer, self.weight, None, x)

    def transposed(self, y: Tensor) -> Tensor:
        layer, grid = self.layer, self.shape[2:]
        if isinstance(layer, nn.Linear):
            return y @ self.weight
        around = layer._reversed_padding_repeated_twice  # before and after, the last axis first
        pads = list(zip(around[-2::-2], around[::-2], strict=True))
        padded = [n + sum(pair) for n, pair in zip(grid, pads, strict=True)]
        like, zeros = y.new_empty(1).expand(*self.shape[:2], *padded), [0] * len(grid)
        options = (list(layer.stride), zeros, list(layer.dilation), False, zeros, layer.groups)
        wanted = [True, False, False]  # the derivative in the input, which is A' y
        x = torch.ops.aten.convolution_backward(y, like, self.weight, None, *options, wanted)[0]
        for axis, (n, pair) in enumerate(zip(grid, pads, strict=True), start=2):
            x = _fold(x, axis, n, pair, layer.padding_mode)
        return x

    def stretch(self, x: Tensor) -> Tensor:
        """Return |A x| / |x|. At the leading x this is |A|, and so is its derivative in the weight."""
        with without_autocast(x.device):
            x = x.to(self.weight.dtype)
            return torch.linalg.vector_norm(self.forward(x)) / torch.linalg.vector_norm(x)

    def power(self, x: Tensor, steps: int) -> Tensor:
        """Return x after some steps x <- A'A x, normalised. Costs no host sync."""
        with torch.no_grad(), without_autocast(x.device):
            x = x.to(self.weight.dtype)
            for _ in range(steps):
                y = _unit(self.forward(x))  # normalised twice, so that a large A does not overflow
                x = _unit(self.transposed(y), otherwise=x)
        return x

    @torch.no_grad()
    def leading(self, x: Tensor, rounds: int, *, width: int = 20) -> Tensor:
        """Return the leading right singular vector, by restarted Lanczos: `rounds` Krylov spaces of this width.

        The singular values of a random layer crowd at the top: there 200 power steps were seen to be 5e-3 off,
        100 products of this 1e-5 at worst.
        """
        scale = self.weight.abs().amax()  # the direction is the same at every scale, and A'A could overflow
        scaled = Operator(self.layer, torch.where(scale > 0, self.weight / scale, self.weight), self.shape)
        with without_autocast(x.device):
            x = x.to(self.weight.dtype)
            for _ in range(rounds):
                basis, images = _krylov(scaled, x, width)
                gram = images @ images.mT
                x = _unit((torch.linalg.eigh(gram)[1][:, -1] @ basis).view_as(x), otherwise=x)
        return x


def applied(layer: AffineLayer, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return what the layer makes of x with another weight and bias."""
    return F.linear(x, weight, bias) if isinstance(layer, nn.Linear) else layer._conv_forward(x, weight, bias)


def input_shape(layer: AffineLayer, size: int | Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the shape of one input; a convolution needs the size of the grid it is applied to."""
    if isinstance(layer, nn.Linear):
        if size is not None:
            raise ValueError(f"a linear layer has no spatial size, got size={size}; leave it out")
        return (1, layer.in_features)
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        raise TypeError(f"expected nn.Linear or nn.Conv1d, 2d or 3d, got {type(layer).__name__}")
    axes = len(layer.kernel_size)
    grid = (size,) * axes if isinstance(size, int) else tuple(size or ())
    if len(grid) != axes:
        raise ValueError(f"a convolution's norm depends on its grid: give size with {axes} numbers, got {size}")
    return (1, layer.in_channels, *grid)


def operator_norm(layer: AffineLayer, size: int | Sequence[int] | None = None, *, rounds: int = 5) -> Tensor:
    """Return |A|, the largest singular value of the layer's operator. It carries no gradient.

    Args:
        layer: nn.Linear, nn.Conv1d, nn.Conv2d or nn.Conv3d.
        size: of the grid that a convolution is applied to.
        rounds: restarts of the Lanczos iteration, of 20 products with A and A' each.
    """
    operator = Operator(layer, layer.weight.detach(), input_shape(layer, size))
    return operator.stretch(operator.leading(first_direction(operator.shape, operator.weight), rounds))


def first_direction(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a random unit vector from a separate generator: measuring a norm changes no run."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (x / torch.linalg.vector_norm(x)).to(like)


def _krylov(operator: Operator, x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return orthonormal rows v that span x, A'A x, (A'A)^2 x, ..., and the rows A v.

    An exhausted space adds zeros.
    """
    basis, images = [_unit(x).flatten()], []
    for _ in range(width):
        y = operator.forward(basis[-1].view_as(x))
        images.append(y.flatten())
        v = before = operator.transposed(y).flatten()
        for _ in range(2):  # once loses orthogonality
            V = torch.stack(basis)
            v = v - (V @ v) @ V
        kept = torch.linalg.vector_norm(v) > 1e3 * torch.finfo(v.dtype).eps * torch.linalg.vector_norm(before)
        basis.append(torch.where(kept, _unit(v), 0.0))
    return torch.stack(basis[:-1]), torch.stack(images)


def _unit(x: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Return x / |x|; `otherwise` if |x| is zero or not finite: a weight of zero must not lose the direction."""
    size = torch.linalg.vector_norm(x)
    sound = (size > 0) & (size < torch.inf)
    return torch.where(sound, x / size, torch.zeros_like(x) if otherwise is None else otherwise)


def _fold(x: Tensor, axis: int, n: int, pair: tuple[int, int], mode: str) -> Tensor:
    """Return the transpose of padding one axis of n pixels: the border goes back to the pixels it came from."""
    if mode == "zeros" or not any(pair):
        return x.narrow(axis, pair[0], n)
    source = F.pad(torch.arange(n, dtype=torch.float32, device=x.device)[None, None], pair, mode=mode)
    shape = [*x.shape[:axis], n, *x.shape[axis + 1 :]]
    return x.new_zeros(shape).index_add(axis, source.flatten().long(), x)
