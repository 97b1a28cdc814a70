"""Products with the Jacobian of T at one point, and with its transpose, counted."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from banach.backward.transforms import Axes
from banach.latent import Latent, Space, detach, leaves, leaves_like, map_leaves, rebuild
from banach.solve.context import constant_weights
from banach.solve.mixing import differ

# torch.func's errors for what plain autograd takes: hooks, old Functions, LSTMs, autocast attention, CSR matrices
_REFUSED = (
    *("functorch transforms", "Expected a proper Tensor but got None"),
    *("expected scalar type", "tensors do not have strides"),
)
plain_attention = partial(sdpa_kernel, SDPBackend.MATH)  # the fast kernels have no second derivative


class Jacobian:
    """J = df/dx at x, as products with rows: one evaluation of f, then none.

    `products` counts one for every sample of a batched product; so does `count`, a tensor, also in a CUDA graph.
    J' is the pullback of f, and J the pullback of that: J' is linear, so one recorded product with it is enough,
    at any vector. (Forward mode would evaluate f again for every product.) Rows are in units of their own, `unit`
    (samples, 1), and f sees them in common ones. They are plain; f sees them with the axes that vmap put on x or
    on a cotangent.

    Pullbacks come from torch.func; from plain autograd where f holds what torch.func refuses, such as an LSTM or a
    full backward hook, which is then called once per product. Where J needs a second derivative that attention
    lacks, f is evaluated again with the plain one.
    """

    def __init__(
        self,
        f: Callable[[Any], Latent],
        x: Latent,
        space: Space,
        *,
        unit: Tensor | float = 1.0,
        axes: Axes = Axes(),
        count: Tensor | None = None,
    ) -> None:
        self.space, self.unit, self.axes, self.products, self.count = space, unit, axes, 0, count
        self._f, self._x = lambda x: typed(f(x), space), x  # does not hold self: no reference cycle
        self._vjp: Callable[..., Any] = torch.func.vjp
        self._push: Any = None  # the pullback of a product with J', once one is recorded
        with explained(_EVER):
            self._retried(self._evaluate)

    def transposed(self, w: Tensor, *, record: bool = False) -> Tensor:
        """J' w. `record=True` keeps what `forward` needs, which would otherwise cost another product."""
        nest = self._to_nest(w)
        with explained(_EVER):
            product = self._record(nest) if record else self._retried(lambda: self._pull(nest))
        return self._to_rows(product[0], "J'")

    def forward(self, v: Tensor) -> Tensor:
        """J v."""
        if self._push is None:
            self.transposed(torch.ones_like(v), record=True)
        return self._to_rows(self._pushed(self._to_nest(v)), "J")

    def is_cut(self, eps: float, g: Tensor | None = None) -> bool:
        """Does f change with x where g is not zero, but not by its derivative? Asked where J or J' g is zero."""
        rows, before = self.space.rows(self._x), self.space.rows(self.value)
        moved = rows + eps**0.5 * rows.abs().amax(1, keepdim=True).clamp(min=1)
        there = Jacobian(self._f, self.space.nest(moved), self.space)  # relu and z^2 are flat at 0, not there
        g = torch.ones_like(before) if g is None else g
        after = torch.where(g == 0, before, self.space.rows(there.value))
        return differ(before, after, self.space) and not there.transposed(g).any()

    def _to_nest(self, rows: Tensor) -> Latent:
        self.products += self.space.batch * self.axes.count
        if self.count is not None:
            self.count += self.space.batch * self.axes.count
        return self.space.nest(self.axes.mapped(rows * self.unit))

    def _to_rows(self, product: Latent, what: str) -> Tensor:
        return self.axes.plain(self.space.rows(product, what)) / self.unit

    def _evaluate(self) -> None:
        with torch.no_grad(), eagerly(), constant_weights():
            self.value, self._pull = self._vjp(self._f, self._x)[:2]

    def _retried(self, action: Callable[[], Any]) -> Any:
        """Run it, and once more with plain autograd if torch.func refuses what f holds."""
        try:
            return action()
        except RuntimeError as error:
            if self._vjp is plain_vjp or not any(words in str(error) for words in _REFUSED):
                raise
        self._vjp = plain_vjp
        self._evaluate()
        return action()

    def _record(self, w: Latent) -> Any:
        """Return (J' w,), and keep what a product with J needs."""

        def recorded() -> Any:
            product, self._push = self._vjp(self._pull, w)[:2]
            return product

        with explained(_TWICE):
            product = self._retried(recorded)
            if self._vjp is plain_vjp:  # may take a part of J' for a constant; if not, <J J' w, w> is |J' w|^2
                nests = product[0], self._pushed(product[0]), w
                p, Jp, rows = (self.space.rows(nest).cpu().double() for nest in nests)
                own, other = float((p * p).sum()), float((Jp * rows).sum())
                if abs(own - other) > 0.1 * own:
                    raise RuntimeError("J, by double backward, is not implemented for an operation in T")
        return product

    def _pushed(self, v: Latent) -> Latent:
        """Return J v."""
        with explained(_TWICE):
            try:
                return self._push((v,))[0]
            except RuntimeError as error:
                if "scaled_dot_product" not in str(error):  # whose fast kernels have no second derivative
                    raise
            with plain_attention():
                self._evaluate()
                self._record(self.value)
            return self._push((v,))[0]


def typed(value: Latent, space: Space) -> Latent:
    """Return the value in the structure and the dtype of the space: autocast may have shortened parts of it."""
    return rebuild(space.template, [part.to(space.dtype) for part in space.check(value)])


def plain_vjp(f: Callable[[Any], Latent], x: Latent) -> tuple[Latent, Callable[[Latent], tuple[Latent]]]:
    """Return f(x) and its pullback, as torch.func.vjp does, by plain autograd."""
    with torch.enable_grad():
        x = map_leaves(lambda leaf: leaf.detach().requires_grad_(), x)
        value = f(x)
    outputs = leaves(value)
    recorded = [output.requires_grad for output in outputs]

    def pull(w: Latent) -> tuple[Latent]:
        cotangents = leaves_like(value, w, "the cotangent")
        if not any(recorded):
            return (map_leaves(torch.zeros_like, x),)
        found = torch.autograd.grad(
            list(compress(outputs, recorded)),
            leaves(x),
            list(compress(cotangents, recorded)),
            retain_graph=True,
            create_graph=torch.is_grad_enabled() and any(part.requires_grad for part in cotangents),
            materialize_grads=True,
        )
        return (rebuild(x, found),)

    return detach(value), pull


_stances: list[Any] = []
_one_at_a_time = threading.Lock()


@contextmanager
def eagerly() -> Iterator[None]:
    """Run a compiled T as it was written, since torch.func cannot be traced through.

    The stance is of the whole process: of several threads the first sets it, and the last puts it back.
    """
    with _one_at_a_time:
        _stances.append(None if _stances else torch.compiler.set_stance("force_eager"))  # takes effect at once
    try:
        yield
    finally:
        with _one_at_a_time:
            if (stance := _stances.pop()) is not None:
                stance.__exit__(None, None, None)


# Why a map cannot be differentiated: our sentences, and parts of the torch errors that they replace.
_WRITES = (
    "T writes to a tensor that it closes over, such as the running statistics of a batch norm in train mode: use "
    "ImplicitNetwork, which keeps them, or eval mode; to measure a module, give the module itself as T"
)
_CHECKPOINT = (
    "T holds a checkpoint, or hooks on saved tensors, such as save_on_cpu, are on: products with J allow neither; "
    "take it out, end such a block before backward(), or train with JFB(), Neumann() or Unroll()"
)
_ONCE = (
    "products with J, which NormalCG() needs, take second derivatives of T, and an operation in T has none: use "
    "Implicit(GMRES()), or Anderson() as its method, which take products with J' alone"
)
_EVER = {"mutate a captured Tensor": _WRITES, "saved tensor hooks": _CHECKPOINT}
_TWICE = dict.fromkeys(("is not implemented", "once_differentiable", "ouble backward"), _ONCE)


@contextmanager
def explained(causes: Mapping[str, str]) -> Iterator[None]:
    """Replace torch's message by ours where the cause is one of these; it stands for {why} in ours."""
    try:
        yield
    except RuntimeError as error:
        for words, sentence in causes.items():
            if words in str(error):
                raise RuntimeError(sentence.format(why=str(error)[:200])) from error
        raise
