"""Products with the Jacobian of T at one point, and with its transpose, counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from banach.latent import Latent, Space, leaves_like, rebuild
from banach.solve import Map


class Jacobian:
    """J = dT/dz at z, as products with rows: one evaluation of T, then none.

    `products` counts one for every sample of a batched product. J' is the pullback of T, and J the pullback
    of that: J' is linear, so one recorded product with it is enough, at any vector. (Forward mode would
    evaluate T again for every product.) Call it without gradients, or T's graph is recorded once more.
    Rows come and go in units of their own, `unit` (samples,); T sees them in common ones.
    """

    def __init__(self, T: Map, z: Latent, inputs: tuple[Any, ...], space: Space, unit: Tensor) -> None:
        def fixed(z: Latent) -> Latent:
            """T at fixed inputs, in the structure of z; under autocast in its type too."""
            parts = leaves_like(space.template, T(z, *inputs), "T")
            return rebuild(space.template, [part.to(space.dtype) for part in parts])

        self.space, self.products, self.unit = space, 0, unit[:, None]
        with eagerly(), explained(_ADVICE):
            self._pullbacks = Pullbacks(fixed, z)

    def transposed(self, w: Tensor, *, record: bool = False) -> Tensor:
        """J' w. `record=True` keeps what `forward` needs, which would otherwise cost a product of its own."""
        nest = self._hand_over(w)
        with explained(_ADVICE):
            product = self._pullbacks.record(nest) if record else self._pullbacks.pull(nest)
        return self.space.rows(product[0], "J'") / self.unit

    def forward(self, v: Tensor) -> Tensor:
        """J v."""
        if self._pullbacks.push is None:
            self.transposed(v, record=True)
        return self.space.rows(self._pullbacks.forward(self._hand_over(v)), "J") / self.unit

    def _hand_over(self, rows: Tensor) -> Latent:
        self.products += self.space.batch
        return self.space.nest(rows * self.unit)


_ADVICE = "use ImplicitNetwork, which keeps them, or eval mode"
# Of torch.func, about hooks and old autograd.Functions, checkpoints, LSTMs.
_REFUSED = ("functorch transforms", "saved tensor hooks", "Expected a proper Tensor but got None")


class Pullbacks:
    """f(x), the pullback J' of f at x, and that of J', which is J, once `record` has recorded a product with J'.

    Torch's fast attentions have no second derivative: where J needs one, f is evaluated anew with the plain one.
    """

    def __init__(self, f: Callable[[Any], Latent], x: Latent) -> None:
        self.f, self.x = f, x
        self.value: Latent
        self.pull: Callable[..., Any]
        self.push: Callable[..., Any] | None = None
        self.value, self.pull = torch.func.vjp(f, x)[:2]

    def record(self, w: Latent) -> Any:
        product, self.push = torch.func.vjp(self.pull, w)[:2]
        return product

    def forward(self, v: Latent) -> Latent:
        assert self.push is not None, "a product with J' is recorded first"
        try:
            found: Latent = self.push((v,))[0]
        except RuntimeError as error:
            if "scaled_dot_product" not in str(error):
                raise
            with sdpa_kernel(SDPBackend.MATH), eagerly():
                self.value, self.pull = torch.func.vjp(self.f, self.x)[:2]
                self.record(self.value)
            found = self.push((v,))[0]
        return found


_stances: list[Any] = []
_one_at_a_time = threading.Lock()


@contextmanager
def eagerly() -> Iterator[None]:
    """A T that is compiled is run as it was written: torch.func cannot be traced through.

    The stance is of the whole process: of several threads the first sets it, and the last puts it back.
    """
    with _one_at_a_time:
        _stances.append(None if _stances else torch.compiler.set_stance("force_eager"))  # set as it is made
    try:
        yield
    finally:
        with _one_at_a_time:
            stance = _stances.pop()
            if stance is not None:
                stance.__exit__(None, None, None)


@contextmanager
def explained(advice: str) -> Iterator[None]:
    """Say in our words why torch.func cannot differentiate a map."""
    try:
        yield
    except RuntimeError as error:
        if "mutate a captured Tensor" in str(error):
            raise RuntimeError(
                "T writes to a tensor that it closes over, such as the running statistics of a batch norm in "
                f"train mode: {advice}"
            ) from error
        if any(words in str(error) for words in _REFUSED):
            raise RuntimeError(
                "products with the Jacobian of T are made by torch.func, which does not take what T holds: a full "
                "backward hook, a checkpoint, an autograd.Function without setup_context, or an LSTM; take it "
                "out, or train with JFB(), Neumann() or Unroll(), which need no such product"
            ) from error
        raise
