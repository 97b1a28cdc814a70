"""Linear layers and convolutions held to a Lipschitz constant: one, or all of a module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from banach.nn.affine import (
    AffineLayer,
    at_least_float32,
    first_direction,
    leading,
    operator_of,
    power,
    stretch,
    without_autocast,
)
from banach.nn.passes import once_per_pass


class Lipschitz(nn.Module):
    """x -> A x / max(1, |A| / bound) + b, A and b those of `layer`: at most `bound`-Lipschitz.

    |A| is the norm of the operator itself: of a convolution on a grid of `size` pixels, with its padding,
    stride, dilation and groups; another size is refused. A layer below its bound is left alone. |A| = |A x|
    at a direction x kept in a buffer: found to high accuracy when the layer is made, followed by `steps` power
    steps at every call in train mode (inside R: once per pass), left as it is in eval mode. It approaches
    from below, so weights that move fast may exceed the bound by a little until x catches up; `refine()` finds x
    again. The gradient takes x as constant, which is exact for first derivatives once x is found.
    (Miyato et al. 2018; for convolutions Gouk et al. 2021.)
    """

    direction: Tensor
    layer: AffineLayer

    def __init__(
        self,
        layer: AffineLayer,
        bound: float = 1.0,
        *,
        size: int | Sequence[int] | None = None,
        steps: int = 1,
    ) -> None:
        super().__init__()
        if not 0 < bound < float("inf"):
            raise ValueError(f"bound must be above 0 and finite, got {bound}")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps must be a whole number of at least 0, got {steps!r}")
        self.operator = operator_of(layer, size)
        self.layer, self.bound, self.steps = layer, float(bound), steps
        self.register_buffer("direction", first_direction(self.operator, self.layer.weight))
        self.refine()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2:] != self.operator.shape[2:] and not isinstance(self.layer, nn.Linear):
            seen, given = tuple(x.shape[2:]), tuple(self.operator.shape[2:])
            raise ValueError(f"this convolution is bounded on a grid of size={given}, got one of {seen}")
        weight = self.bounded_weight()
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, weight, self.layer.bias)
        return self.layer._conv_forward(x, weight, self.layer.bias)

    def bounded_weight(self) -> Tensor:
        """The layer's weight, scaled down where its norm is above the bound. In train mode x takes its steps."""
        weight = self.layer.weight
        scaled, direction = once_per_pass(self, weight, lambda: self._scaled(weight))
        if self.training and self.steps:
            with torch.no_grad():
                self.direction.copy_(direction)
        return scaled

    def norm(self) -> Tensor:
        """|A| before scaling, as far as it is known."""
        return self._norm(self.layer.weight, self.direction.clone())

    def refine(self, rounds: int = 5) -> Lipschitz:
        """Find the leading direction again, to high accuracy, each round at the price of twenty power steps."""
        with without_autocast(self.direction):
            weight = at_least_float32(self.layer.weight.detach())
            self.direction.copy_(leading(self.operator, weight, self.direction.to(weight.dtype), rounds))
        return self

    def extra_repr(self) -> str:
        size = self.operator.shape[2:]
        return f"bound={self.bound}" + (f", size={tuple(size)}" if size else "") + f", steps={self.steps}"

    def _scaled(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        # A copy: the graph keeps this direction, and the buffer is written at the next call.
        x = self.direction.clone()
        if self.training and self.steps:
            x = self._follow(weight, x)
        excess = (self._norm(weight, x) / self.bound).clamp(min=1)
        return weight / excess.to(weight.dtype), x

    def _follow(self, weight: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad(), without_autocast(weight):
            weight = at_least_float32(weight)
            return power(self.operator, weight, x.to(weight.dtype), self.steps)

    def _norm(self, weight: Tensor, x: Tensor) -> Tensor:
        with without_autocast(weight):
            weight = at_least_float32(weight)
            return stretch(self.operator, weight, x.to(weight.dtype))


_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OTHERS = (
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase),
)
_FORWARDS = {kind.forward for kind in _KINDS}
Place = tuple[nn.Module, str]  # the module that holds a layer, and the name it has there


def lipschitz_(
    module: nn.Module,
    bound: float = 1.0,
    *,
    example: Any = None,
    size: int | Sequence[int] | None = None,
    steps: int = 1,
) -> nn.Module:
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
        size: the grid of all convolutions, instead of `example`.
        steps: power steps a call, as in `Lipschitz`.

    Returns:
        The module; if it is itself such a layer, the `Lipschitz` layer that holds it.

    Raises:
        TypeError: if the module holds layers that cannot be bounded. The message names them all.
        ValueError: if the grid of a convolution is not known, or not always the same.
    """
    if example is not None and size is not None:
        raise ValueError("expected example or size, got both; size is for convolutions on one grid")
    root = nn.Module()
    root._modules[""] = module
    grids = {} if example is None else _grids(module, example if isinstance(example, tuple) else (example,))
    places = {name: (holder, key) for holder, key, name in _places(root, "", set())}
    _check_bounded(places)
    made: dict[nn.Module, Lipschitz] = {}
    for name, (holder, key) in places.items():
        layer: Any = holder._modules[key]
        if layer not in made:
            grid = None if isinstance(layer, nn.Linear) else _grid(name, layer, grids, size)
            made[layer] = Lipschitz(layer, bound, size=grid, steps=steps).train(layer.training)
    for holder, key in places.values():
        holder._modules[key] = made[holder._modules[key]]  # type: ignore[index]
    return cast(nn.Module, root._modules[""])


def _places(holder: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[nn.Module, str, str]]:
    """(holder, key, name) of every layer to bound or to refuse. A layer that is shared has several places."""
    if holder in seen:
        return
    seen.add(holder)
    for key, child in holder._modules.items():
        name = f"{path}.{key}".strip(".")
        if isinstance(child, (*_KINDS, *_OTHERS)):
            yield holder, key, name
        elif child is not None and not isinstance(child, Lipschitz):
            yield from _places(child, name, seen)


def _check_bounded(places: dict[str, Place]) -> None:
    """Refuse layers of other kinds, and those whose own call does more than multiply by the weight."""
    refused = []
    for name, (holder, key) in places.items():
        layer: Any = holder._modules[key]
        why = None
        if isinstance(layer, _OTHERS) or type(layer).forward not in _FORWARDS:
            why = type(layer).__name__
        elif is_lazy(layer.weight):
            why = f"{type(layer).__name__} without a weight yet: give example="
        elif layer._forward_hooks or layer._forward_pre_hooks:
            why = f"{type(layer).__name__} with forward hooks"
        refused += [] if why is None else [f"{name or 'the module'} ({why})"]
    if refused:
        raise TypeError(
            f"expected nn.Linear and nn.Conv1d, 2d or 3d without hooks, got {', '.join(refused)}; replace them, "
            "or call lipschitz_ on the parts of the module that do not hold them"
        )


def _grid(
    name: str, layer: nn.Module, grids: dict[nn.Module, set[tuple[int, ...]]], size: int | Sequence[int] | None
) -> int | Sequence[int]:
    if size is not None:
        return size
    found = grids.get(layer, set())
    if len(found) != 1:
        got = "no input" if not found else " and ".join(map(str, sorted(found)))
        raise ValueError(
            f"a convolution's norm depends on its grid: expected one for {name or 'the module'}, got {got}; give "
            "example=, an input of the module that reaches it at one size, or size="
        )
    return next(iter(found))


@torch.no_grad()
def _grids(module: nn.Module, inputs: tuple[Any, ...]) -> dict[nn.Module, set[tuple[int, ...]]]:
    """The sizes that each convolution sees in one evaluation, which changes no buffer of PyTorch's layers."""
    seen: dict[nn.Module, set[tuple[int, ...]]] = {}

    def note(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.setdefault(layer, set()).add(tuple(given[0].shape[-len(layer.kernel_size) :]))  # type: ignore[arg-type]

    with ExitStack() as stack:
        stack.enter_context(_evaluating(module))
        for layer in module.modules():
            if isinstance(layer, _KINDS[1:]):
                stack.callback(layer.register_forward_pre_hook(note).remove)
        module(*inputs)
    return seen


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode, and every module's own mode afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
