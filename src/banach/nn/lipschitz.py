"""Linear layers and convolutions held to a Lipschitz constant: one, or all of a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from banach import checks
from banach.nn.affine import AffineLayer, Operator, applied, first_direction, input_shape
from banach.nn.layers import in_modes
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
        checks.whole("steps", steps, 0)
        self.shape = input_shape(layer, size)
        self.layer, self.bound, self.steps = layer, float(bound), steps
        self.register_buffer("direction", first_direction(self.shape, layer.weight))
        self.refine()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2:] != self.shape[2:] and not isinstance(self.layer, nn.Linear):
            raise ValueError(
                f"this convolution is bounded on a grid of size={self.shape[2:]}, got one of {tuple(x.shape[2:])}"
            )
        return applied(self.layer, self.bounded_weight(), self.layer.bias, x)

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
        return Operator(self.layer, self.layer.weight, self.shape).stretch(self.direction.clone())

    def refine(self, rounds: int = 5) -> Lipschitz:
        """Find the leading direction again, to high accuracy, each round at the price of twenty power steps."""
        operator = Operator(self.layer, self.layer.weight.detach(), self.shape)
        self.direction.copy_(operator.leading(self.direction, rounds))
        return self

    def extra_repr(self) -> str:
        size = self.shape[2:]
        return f"bound={self.bound}" + (f", size={size}" if size else "") + f", steps={self.steps}"

    def _scaled(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        operator = Operator(self.layer, weight, self.shape)
        # A copy: the graph keeps this direction, and the buffer is written at the next call.
        x = self.direction.clone()
        if self.training and self.steps:
            x = operator.power(x, self.steps)
        excess = (operator.stretch(x) / self.bound).clamp(min=1)
        return weight / excess.to(weight.dtype), x


_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OTHERS = (
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase),
)
_FORWARDS = {kind.forward for kind in _KINDS}


def lipschitz_(module: nn.Module, bound: float = 1.0, *, example: Any = None, steps: int = 1) -> nn.Module:
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
        steps: power steps a call, as in `Lipschitz`.

    Returns:
        The module; if it is itself such a layer, the `Lipschitz` layer that holds it.

    Raises:
        TypeError: if the module holds layers that cannot be bounded. The message names them all.
        ValueError: if the grid of a convolution is not known, or not always the same.
    """
    grids = {} if example is None else _grids(module, example if isinstance(example, tuple) else (example,))
    made: dict[nn.Module | None, Lipschitz] = {}
    for layer, name in _layers(module).items():
        grid = None if isinstance(layer, nn.Linear) else _grid(name, grids.get(layer, set()))
        made[layer] = Lipschitz(layer, bound, size=grid, steps=steps).train(layer.training)
    for holder in list(module.modules()):
        if not isinstance(holder, Lipschitz):
            holder._modules.update({key: made[part] for key, part in holder._modules.items() if part in made})
    return made.get(module, module)


def _layers(module: nn.Module) -> dict[Any, str]:
    """Return the layers to bound, each with its first name. Refuse those that do more than multiply."""
    bounded = {layer for part in module.modules() if isinstance(part, Lipschitz) for layer in part.children()}
    parts = ((name, part) for name, part in module.named_modules() if isinstance(part, (*_KINDS, *_OTHERS)))
    layers = {part: name for name, part in parts if part not in bounded}
    refused = [f"{name or 'the module'} ({_fault(layer)})" for layer, name in layers.items() if _fault(layer)]
    if refused:
        raise TypeError(
            f"expected nn.Linear and nn.Conv1d, 2d or 3d without hooks, got {', '.join(refused)}; replace them, "
            "or call lipschitz_ on the parts of the module that do not hold them"
        )
    return layers


def _fault(layer: Any) -> str | None:
    kind = type(layer).__name__
    if type(layer).forward not in _FORWARDS:
        return kind
    return f"{kind} with forward hooks" if layer._forward_hooks or layer._forward_pre_hooks else None


def _grid(name: str, found: set[tuple[int, ...]]) -> tuple[int, ...]:
    if len(found) != 1:
        got = " and ".join(map(str, sorted(found))) or "no input"
        raise ValueError(
            f"a convolution's norm depends on its grid: expected one for {name or 'the module'}, got {got}; give "
            "example=, an input of the module that reaches it at one size"
        )
    return next(iter(found))


@torch.no_grad()
def _grids(module: nn.Module, inputs: tuple[Any, ...]) -> dict[nn.Module, set[tuple[int, ...]]]:
    """Return the sizes that each convolution sees in one evaluation in eval mode, which changes no statistics."""
    seen: dict[nn.Module, set[tuple[int, ...]]] = {}

    def note(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.setdefault(layer, set()).add(tuple(given[0].shape[-len(layer.kernel_size) :]))  # type: ignore[arg-type]

    convolutions = [layer for layer in module.modules() if isinstance(layer, _KINDS[1:])]
    hooks = [layer.register_forward_pre_hook(note) for layer in convolutions]
    try:
        with in_modes([(part, False) for part in module.modules()]):
            module(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
