"""Linear layers and convolutions held to a Lipschitz constant: one, or all of a module; their operator norms."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import grad

from banach import checks
from banach.nn.passes import once_per_pass
from banach.solve.context import assigned, without_autocast

AffineLayer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
KEPT = 1e-3  # share of the old directions in the new ones, so that none is lost where A is zero
_SQUARINGS = 8  # of a small Gram matrix: its 256th power
FOLLOWED = 8  # directions: others overtake one alone while weights move, and then the bound does not hold


class Lipschitz(nn.Module):
    """x -> A x / max(1, |A| / bound) + b, A and b those of `layer`: at most `bound`-Lipschitz.

    |A| is the norm of the operator itself: of a convolution on a grid of `size` pixels, with its padding,
    stride, dilation and groups; another size is refused. A layer below its bound is left alone. |A| is the
    largest |A x| in the span of a few directions, kept in a buffer: found to high accuracy when the layer is made,
    followed by `steps` steps of orthogonal iteration at every call in train mode (inside R: once per pass), left
    as they are in eval mode. It approaches from below, so weights that move fast exceed the bound, mostly by a few
    percent, until the directions catch up. Where the bound must hold, call `refine()`, which finds them again:
    before an evaluation, or after every optimizer step. The gradient takes x as constant, which is exact for first
    derivatives once x is found. (Miyato et al. 2018; for convolutions Gouk et al. 2021.)
    """

    directions: Tensor
    layer: AffineLayer

    def __init__(
        self, layer: AffineLayer, bound: float = 1.0, *, size: int | Sequence[int] | None = None, steps: int = 2
    ) -> None:
        super().__init__()
        self.shape = _input_shape(layer, size)
        self.layer, self.bound, self.steps = layer, checks.above_zero("bound", bound), checks.whole("steps", steps)
        self.register_buffer("directions", _random_directions(FOLLOWED, self.shape, layer.weight))
        self.refine()

    def forward(self, x: Tensor) -> Tensor:
        grid = self.shape[2:]
        if x.shape[2:] != grid and not isinstance(self.layer, nn.Linear):
            raise ValueError(f"expected a grid of size={grid}, on which |A| is known, got {tuple(x.shape[2:])}")
        weight = self.layer.weight
        scaled, directions = once_per_pass(self, weight, lambda: self._scaled(weight))
        if self.training and self.steps:
            with torch.no_grad():
                self.directions.copy_(directions)
        return _applied(self.layer, scaled, self.layer.bias, x)

    def norm(self) -> Tensor:
        """|A| before scaling, as far as it is known."""
        operator = _Operator(self.layer, self.layer.weight, self.shape)
        return operator.stretch(operator.best(self.directions))

    def refine(self) -> Self:
        """Find the leading directions again, to high accuracy, at the price of a hundred products."""
        operator = _Operator(self.layer, self.layer.weight.detach(), self.shape)
        first = operator.leading(self.directions[:1])
        self.directions.copy_(operator.followed(torch.cat([first, self.directions[1:].to(first)]), 10))
        return self

    def extra_repr(self) -> str:
        size = self.shape[2:]
        return f"bound={self.bound}" + (f", size={size}" if size else "") + f", steps={self.steps}"

    def _scaled(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        operator = _Operator(self.layer, weight, self.shape)
        directions = operator.followed(self.directions, self.steps if self.training else 0)
        excess = (operator.stretch(operator.best(directions)) / self.bound).clamp(min=1)
        return weight / excess.to(weight.dtype), directions


_OTHERS = (nn.modules.conv._ConvTransposeNd, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
_FORWARDS = {kind.forward for kind in get_args(AffineLayer)}


def lipschitz_(module: nn.Module, bound: float = 1.0, *, example: Any = None, steps: int = 2) -> nn.Module:
    """Replace every linear layer and convolution in the module by `Lipschitz(layer, bound)`, in place.

    A chain of k such layers and 1-Lipschitz activations is then bound^k-Lipschitz. Normalisation layers,
    and what `forward` itself adds or multiplies, are not bounded. A layer that is used at several places stays
    one layer; `Lipschitz` layers stay as they are. A layer with a `torch.nn.utils.parametrize` parametrization is
    bounded after it. On an error nothing is replaced.

    Args:
        module: what to change. Its code may call these layers, but not read their `weight`.
        bound: of every layer's operator norm.
        example: an input, or a tuple of inputs, of the module: one evaluation in eval mode finds the grid of every
            convolution.
        steps: of the iteration at every call, as in `Lipschitz`.

    Returns:
        The module; if it is itself such a layer, the `Lipschitz` layer that holds it.

    Raises:
        TypeError: if the module holds layers that cannot be bounded. The message names them all.
        ValueError: if the grid of a convolution is not known, or not always the same.
    """
    layers = _layers(module)
    grids = _grids(module, layers, example)
    made: dict[nn.Module | None, Lipschitz] = {
        layer: Lipschitz(layer, bound, size=grids.get(layer), steps=steps).train(layer.training)
        for layer in layers
    }
    for holder in list(module.modules()):
        if not isinstance(holder, Lipschitz):
            holder._modules.update({key: made[part] for key, part in holder._modules.items() if part in made})
    return made.get(module, module)


def _layers(module: nn.Module) -> dict[Any, str]:
    """Return the layers to bound, each with its first name. Refuse those that do more than multiply."""
    layers: dict[Any, str] = {}
    for name, part in module.named_modules(remove_duplicate=False):  # a layer may have several holders
        holder = module.get_submodule(name.rpartition(".")[0])
        if isinstance(part, (AffineLayer, *_OTHERS)) and not isinstance(holder, Lipschitz):
            layers.setdefault(part, name)
    refused = []
    for layer, name in layers.items():
        hooks = " with forward hooks" if layer._forward_hooks or layer._forward_pre_hooks else ""
        if hooks or type(layer).forward not in _FORWARDS:
            refused.append(f"{name or 'the module'} ({type(layer).__name__}{hooks})")
    if refused:
        raise TypeError(
            f"expected nn.Linear and nn.Conv1d, 2d or 3d without hooks, got {', '.join(refused)}; replace them, "
            "or call lipschitz_ on the parts of the module that do not hold them"
        )
    return layers


@torch.no_grad()
def _grids(module: nn.Module, layers: dict[Any, str], example: Any) -> dict[nn.Module, tuple[int, ...]]:
    """Return the size that each convolution sees in one evaluation in eval mode, which changes no statistics."""
    seen: dict[Any, set[tuple[int, ...]]] = {part: set() for part in layers if not isinstance(part, nn.Linear)}

    def note(layer: Any, given: tuple[Tensor, ...]) -> None:
        seen[layer].add(tuple(given[0].shape[-len(layer.kernel_size) :]))

    with ExitStack() as hooks, assigned([(part, "training", False) for part in module.modules()]):
        for layer in seen:
            hooks.enter_context(layer.register_forward_pre_hook(note))
        if example is not None:
            module(*(example if isinstance(example, tuple) else (example,)))
    for layer, found in seen.items():
        if len(found) != 1:
            got = " and ".join(map(str, sorted(found))) or "no input"
            raise ValueError(
                f"a convolution's norm depends on its grid: expected one for {layers[layer] or 'the module'}, got "
                f"{got}; give example=, an input of the module that reaches it at one size"
            )
    return {layer: found.pop() for layer, found in seen.items()}


class _Operator:
    """x -> A x, the layer without its bias, on one input of this shape. Products are in at least float32.

    The norm of a convolution is that of this operator, not of the kernel reshaped to a matrix: that one ignores
    where the kernel meets the border and is off by up to the square root of the kernel's area, in both directions.
    Products are those of A / `unit`, a constant: squares of large or small entries would overflow or vanish.
    """

    def __init__(self, layer: AffineLayer, weight: Tensor, shape: tuple[int, ...]) -> None:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        largest = torch.linalg.vector_norm(weight.detach(), torch.inf)
        self.unit = largest.clamp(min=torch.finfo(weight.dtype).tiny)
        self.layer, self.weight, self.shape = layer, weight / self.unit, shape

    def forward(self, x: Tensor) -> Tensor:
        return _applied(self.layer, self.weight, None, x)

    def transposed(self, y: Tensor) -> Tensor:
        """Return A' y. Not by `torch.func.vjp`, which fails inside a checkpoint."""
        layer, grid = self.layer, self.shape[2:]
        if isinstance(layer, nn.Linear):
            return y @ self.weight
        around = layer._reversed_padding_repeated_twice  # before and after, the last axis first
        pads = list(zip(around[-2::-2], around[::-2], strict=True))
        padded = (len(y), self.shape[1], *(n + sum(pair) for n, pair in zip(grid, pads, strict=True)))
        derivative = getattr(grad, f"conv{len(grid)}d_input")  # in the input, which is A' y
        x = derivative(padded, self.weight, y, layer.stride, 0, layer.dilation, layer.groups)
        for axis, (n, pair) in enumerate(zip(grid, pads, strict=True), start=2):
            x = _fold(x, axis, n, pair, layer.padding_mode)
        return x

    def stretch(self, x: Tensor) -> Tensor:
        """Return |A x| / |x|. At the leading x this is |A|, and so is its derivative in the weight."""
        with without_autocast(x.device):
            x = x.to(self.weight.dtype)
            return torch.linalg.vector_norm(self.forward(x)) / torch.linalg.vector_norm(x) * self.unit

    def followed(self, directions: Tensor, steps: int) -> Tensor:
        """Return a copy after some steps X <- A'A X, its rows made orthonormal. Costs no host sync."""
        with torch.no_grad(), without_autocast(directions.device):
            X = directions.to(self.weight.dtype, copy=True)
            for _ in range(steps):
                Z = self.transposed(_unit(self.forward(X)))
                X = _orthonormal(_unit(Z) + KEPT * X)
        return X

    def best(self, directions: Tensor) -> Tensor:
        """Return the x in the span of orthonormal directions with the largest |A x|. Costs no host sync."""
        with torch.no_grad(), without_autocast(directions.device):
            X = directions.to(self.weight.dtype)
            Y = _unit(self.forward(X).flatten(1))  # so that no square overflows or vanishes
            gram = Y @ Y.mT
            for _ in range(_SQUARINGS):  # becomes c c', c the leading eigenvector
                gram = gram / gram.diagonal().sum()
                gram = gram @ gram
            c = gram.index_select(0, gram.diagonal().argmax()[None])
            return _unit((c @ X.flatten(1)).view_as(X[:1]), otherwise=X[:1])

    @torch.no_grad()
    def leading(self, x: Tensor) -> Tensor:
        """Return the leading right singular vector, by restarted Lanczos: five Krylov spaces of 20 vectors.

        The singular values of a random layer crowd at the top: there 200 power steps were seen to be 5e-3 off,
        100 products of this 1e-5 at worst.
        """
        with without_autocast(x.device):
            x = x.to(self.weight.dtype)
            for _ in range(5):
                basis, images = _krylov(self, x, 20)
                gram = (images @ images.mT).to("meta" if x.is_meta else "cpu")  # some GPUs have no eigh
                x = _unit((torch.linalg.eigh(gram)[1][:, -1].to(x) @ basis).view_as(x), otherwise=x)
        return x


def _applied(layer: AffineLayer, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return what the layer makes of x with another weight and bias."""
    return F.linear(x, weight, bias) if isinstance(layer, nn.Linear) else layer._conv_forward(x, weight, bias)


def _input_shape(layer: AffineLayer, size: int | Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the shape of one input; a convolution needs the size of the grid it is applied to."""
    if isinstance(layer, nn.Linear):
        if size is not None:
            raise ValueError(f"a linear layer has no spatial size, got size={size}; leave it out")
        return (1, layer.in_features)
    if not isinstance(layer, AffineLayer):
        raise TypeError(f"expected nn.Linear or nn.Conv1d, 2d or 3d, got {type(layer).__name__}")
    axes = len(layer.kernel_size)
    grid = (size,) * axes if isinstance(size, int) else tuple(size or ())
    if len(grid) != axes:
        raise ValueError(f"a convolution's norm depends on its grid: give size with {axes} numbers, got {size}")
    return (1, layer.in_channels, *grid)


def operator_norm(layer: AffineLayer, size: int | Sequence[int] | None = None) -> Tensor:
    """Return |A|, the largest singular value of the layer's operator. It carries no gradient.

    Args:
        layer: nn.Linear, nn.Conv1d, nn.Conv2d or nn.Conv3d.
        size: of the grid that a convolution is applied to.
    """
    shape = _input_shape(layer, size)  # refuses other layers, some of which have no weight
    operator = _Operator(layer, layer.weight.detach(), shape)
    return operator.stretch(operator.leading(_random_directions(1, shape, operator.weight)))


def _random_directions(count: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return orthonormal vectors, at most `count`, from a separate generator: measuring a norm changes no run."""
    count, generator = min(count, math.prod(shape)), torch.Generator().manual_seed(0)
    x = torch.randn(count, *shape[1:], generator=generator, dtype=torch.float64, device="cpu")
    return _orthonormal(x).to(like)


def _krylov(operator: _Operator, x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return orthonormal rows v that span x, A'A x, (A'A)^2 x, ..., and the rows A v.

    An exhausted space adds zeros.
    """
    basis, images = [_unit(x).flatten()], []
    for _ in range(width):
        y = operator.forward(basis[-1].view_as(x))
        images.append(y.flatten())
        v = before = operator.transposed(y).flatten()
        for _ in range(2):  # one pass is not orthogonal enough
            V = torch.stack(basis)
            v = v - (V @ v) @ V
        kept = torch.linalg.vector_norm(v) > 1e3 * torch.finfo(v.dtype).eps * torch.linalg.vector_norm(before)
        basis.append(torch.where(kept, _unit(v), 0.0))
    return torch.stack(basis[:-1]), torch.stack(images)


def _orthonormal(rows: Tensor) -> Tensor:
    """Return orthonormal rows, the first ones of which span the same space as the first ones given."""
    if not rows.is_cpu:
        return gram_schmidt(rows)  # unlike LAPACK's routines it can be captured, and exists everywhere
    return torch.linalg.qr(rows.flatten(1).mT)[0].mT.reshape(rows.shape)


def gram_schmidt(rows: Tensor) -> Tensor:
    """Return the same by matrix products alone."""
    made: list[Tensor] = []
    for row in rows.flatten(1):
        for _ in range(2 if made else 0):  # one pass is not orthogonal enough
            before = torch.stack(made)
            row = row - (before @ row) @ before
        made.append(_unit(row))
    return torch.stack(made).view_as(rows)


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
