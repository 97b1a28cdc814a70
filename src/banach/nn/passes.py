"""One forward pass: every evaluation of R sees the same dropout masks and starts from the same buffers."""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from banach.backward.mode import Unchanged
from banach.latent import Latent
from banach.nn.layers import draws_masks, is_hooked, modules_of, watched
from banach.solve.context import assigned, functorch, unwrap_derivatives

Result = TypeVar("Result")
Named = dict[str, Tensor]

# The pass that is evaluating R, per thread: backward threads evaluate too. Bare, since Dynamo does not notice
# that an attribute hides a class attribute: compiled outside a pass, R would never see one.
_current = threading.local()

# Layers with masks that were evaluated inside a pass.
_inside: weakref.WeakSet[Any] = weakref.WeakSet()


def _running() -> Any:
    """Return the `Pass` that is evaluating R in this thread, or None."""
    return getattr(_current, "running", None)


class Pass:
    """R, evaluated many times in one forward pass as if it were one layer.

    `with Pass(R) as this_pass:` is the forward pass; `this_pass.evaluate` is R, then and later. Dropout masks are
    drawn at the first evaluation and held here, not on the module, so that a network can be used many times in
    one graph. `Buffers` gives every evaluation the same buffers and writes back those of the last one.

    Recomputation and J-products after the pass read the same buffers and masks and write nothing. With
    `evaluates_later` they also read the parameters that R had in the pass, which under `functional_call` are not
    its own, in the mode it was in. (R may not checkpoint itself: it would recompute outside the pass.)
    """

    def __init__(self, R: Any, modules: list[nn.Module] | None = None, *, evaluates_later: bool = False) -> None:
        known = isinstance(R, nn.Module)
        modules = modules_of(R) if modules is None else modules
        self.R = R
        # A plain function may call layers that are not visible from here: it gets masks in case it does.
        self.masks: dict[Any, Any] | None = {} if not known or any(map(draws_masks, modules)) else None
        changing = any(module._buffers for module in modules) and any(module.training for module in modules)
        self.buffers = Buffers(R if known else watched(R), everywhere(R) if changing else {}, modules)
        recorded = evaluates_later and known and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        self.remembered = Remembered(R, modules) if recorded else None
        self.made: dict[int, tuple[Tensor, Any]] = {}  # see `once_per_pass`
        self.rows: list[Tensor] = []  # which samples are here, where an outer pass has let some go
        self.index: Tensor | None = None
        self.open = False
        self.outer: Any = None

    def __enter__(self) -> Self:
        self.open, self.outer, _current.running = True, _running(), self
        if self.masks is not None and self.outer is not None and self.outer.masks is not None:
            # R of the outer pass holds this network: its masks must last as long as the outer pass.
            self.masks = self.outer.masks.setdefault(id(self.R), {})
            self.rows = self.outer.present()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.open, _current.running = False, self.outer
        self.buffers.finish(failed=error is not None)
        self.made = {}

    def evaluate(self, u: Latent, v: Latent, index: Tensor | None = None) -> Latent:
        """Return R(u, v). `index` says which samples of the batch these are, when some have left it."""
        with self._masks_of(index):
            if self.open or self.remembered is None:
                return self.buffers.call(u, v, last=self.open)
            return self.remembered.call(u, v, self.buffers)

    def evaluate_in_solve(self, u: Latent, v: Latent, index: Tensor | None = None) -> Latent:
        """Return R(u, v), not recorded and not the last of the pass: if possible without an update of buffers."""
        if not self.buffers.norms or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.evaluate(u, v, index)
        with self._masks_of(index):
            return self.buffers.untracked(u, v)

    def dropped(self, x: Tensor, layer: Any, shape: torch.Size | None = None) -> Tensor:
        """Return x * m / (1 - p), m the layer's mask for the samples that are here, by default shaped like x.

        Called twice, a layer uses its mask twice.
        """
        assert self.masks is not None
        shape = x.shape if shape is None else shape
        key: Any = id(layer)
        if key in self.masks and self.masks[key].shape[1:] != shape[1:]:  # called at another place, too
            key = key, shape[1:]  # not always: torch.compile would make code for every length of a sequence
        if key not in self.masks:
            self.masks[key] = torch.rand(shape, dtype=torch.float32, device=x.device) < 1 - layer.p
        mask: Tensor = self.masks[key]
        here = self.present()
        batch = len(here[-1]) if here else len(mask)
        if batch != shape[0]:
            raise ValueError(
                f"dropout in R has a mask for a batch of {batch} and got a batch of {shape[0]}: one pass is one "
                "batch; where R drops, axis 0 must be the batch, or leave out compact=True"
            )
        for rows in here:
            mask = mask.index_select(0, rows)
        # At p = 1 nothing is kept and the scale would be infinite.
        return torch.where(mask, x / (1 - layer.p) if layer.p < 1 else x, x.new_zeros(()))

    def present(self) -> list[Tensor]:
        """Return the selections that lead from the whole batch to the samples that are here."""
        return self.rows if self.index is None else [*self.rows, self.index]

    def _masks_of(self, index: Tensor | None) -> AbstractContextManager[None]:
        if self.masks is None or (index is None and _running() is self):
            return nullcontext()
        return assigned([(_current, "running", self), (self, "index", index)])


class PlainPass(nullcontext[None]):
    """A pass of an R without masks and buffers: nothing has to be kept, and R is called directly."""

    masks = enter_result = None  # the second is what nullcontext's __init__, which is not called, would set

    def __init__(self, R: nn.Module) -> None:
        called = type(R).__call__ is nn.Module.__call__ and R._compiled_call_impl is None and not is_hooked(R)
        self.evaluate_in_solve = self.evaluate = R.forward if called and not torch.compiler.is_compiling() else R


def forward_pass(R: Any, modules: list[nn.Module], *, plain: bool, evaluates_later: bool) -> Pass | PlainPass:
    """Return the pass that R needs. `plain`: its modules, if it has some, are no special layers."""
    if modules and plain and not evaluates_later and not any([m._buffers for m in modules]):  # noqa: C419 (faster)
        return PlainPass(R)
    return Pass(R, modules, evaluates_later=evaluates_later)


class Remembered:
    """R as it was in a forward pass: its parameters, and the mode of every module."""

    def __init__(self, R: nn.Module, modules: list[nn.Module]) -> None:
        self.R = R
        self.parameters = everywhere(R, "_parameters")
        # Not lazy ones, which are filled in the pass itself.
        kept = ((f"R's parameter {name}", p) for name, p in self.parameters.items() if not is_lazy(p))
        self.unchanged = Unchanged(kept, "call backward() before the optimizer's step()")
        self.training = [(module, module.training) for module in modules]

    def differs(self) -> bool:
        """Return True if R has other parameters or modes now. Refuse parameters that were changed in place.

        False for parameters of other types, such as sharded ones: the library that shards them restores them.
        """
        now = everywhere(self.R, "_parameters")
        if not all(type(p) in (Tensor, nn.Parameter) for p in (*now.values(), *self.parameters.values())):
            return False
        self.unchanged.check()
        same = all(now.get(name) is tensor for name, tensor in self.parameters.items())
        return not same or any(module.training != mode for module, mode in self.training)

    def call(self, u: Latent, v: Latent, buffers: "Buffers") -> Latent:
        """Return R(u, v) with the parameters, modes and buffers of the pass."""
        if self.differs():
            named = {**self.parameters, **buffers.fresh()}
            with assigned([(module, "training", mode) for module, mode in self.training]):
                value = torch.func.functional_call(self.R, named, (u, v), tie_weights=False)
        else:
            value = buffers.call(u, v, last=False)
        self._unwrap_attributes()
        return value

    def _unwrap_attributes(self) -> None:
        """Unwrap what R has just stored on itself inside a vjp: torch can neither copy nor pickle its wrappers."""
        running = functorch.peek_interpreter_stack()
        for attributes in () if running is None else [module.__dict__ for module, _ in self.training]:
            for name, value in list(attributes.items()):
                if isinstance(value, Tensor):
                    attributes[name] = unwrap_derivatives(value, lambda level: level == running.level())


def pass_of(layer: Any) -> Pass | None:
    """Return the pass that holds the layer's mask; None outside a pass, and where the layer does not drop."""
    if not layer.training or layer.p == 0:  # before the pass is read: Dynamo would compile for pass and no pass
        return None
    now, compiling = _running(), torch.compiler.is_compiling()
    if now is None or now.masks is None:
        was_inside = not compiling and layer in _inside
        if was_inside and torch._C._current_graph_task_id() != -1:  # the backward pass is running
            lost = "dropout in R was recomputed outside its pass, by a checkpoint inside R, and has lost its mask"
            raise RuntimeError(f"{lost}: use Unroll(checkpoint=True) instead")
        return None
    if not compiling:
        _inside.add(layer)
    return now


def once_per_pass(owner: nn.Module, source: Tensor, make: Callable[[], Result]) -> Result:
    """Return make(), or what it gave earlier in this pass for the same source: a weight need be scaled only once.

    Evaluations that are recorded make their own, which their graph needs.
    """
    now = _running()
    if now is None or not now.open or torch.is_grad_enabled():
        return make()
    kept = now.made.get(id(owner))
    if kept is None or kept[0] is not source:
        kept = now.made[id(owner)] = (source, make())
    return kept[1]


class Buffers:
    """Calls R on copies of its buffers, such as running statistics and spectral norm's vectors.

    If batch norm alone has buffers, evaluations that are not the last need no copies: batch norm does not track
    its statistics then. A buffer that requires grad is not copied.
    """

    def __init__(self, R: Any, own: Named, modules: Sequence[nn.Module] = ()) -> None:
        plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        norms = [m for m in modules if own and type(m) in plain and m.training and m.track_running_stats]
        theirs = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
        self.R, self.norms = R, norms if all(id(buffer) in theirs for buffer in own.values()) else []
        one_of = {id(part): name for name, part in own.items() if not part.requires_grad}  # one name each
        self.names = {name: one_of[id(part)] for name, part in own.items() if id(part) in one_of}
        self.snapshot = {name: own[name].detach().clone() for name in one_of.values()}
        self.latest: Named | None = None

    def call(self, *given: Any, last: bool) -> Any:
        """Return R(u, v), and keep what it leaves in its buffers if it may be the last evaluation of the pass."""
        if not self.snapshot:
            return self.R(*given)
        buffers = self.fresh()
        value = torch.func.functional_call(self.R, buffers, given, tie_weights=False)  # see `everywhere`
        for name, one in self.names.items():
            if buffers[name].shape != self.snapshot[one].shape:  # a cache that grew, such as rotary embeddings
                self.names[name] = key = f"{one} of {name}"  # a name that shared it keeps the old one
                self.snapshot[key] = unwrap_derivatives(buffers[name].detach())
        if last:
            self.latest = buffers
        return value

    def fresh(self) -> Named:
        """Return the snapshot again, as a copy: the graph of an evaluation may hold it."""
        copies = {name: buffer.clone() for name, buffer in self.snapshot.items()}
        return {name: copies[one] for name, one in self.names.items()}

    def untracked(self, u: Latent, v: Latent) -> Latent:
        """Return R(u, v); batch norm does not update its statistics."""
        try:
            for norm in self.norms:
                norm.__dict__["track_running_stats"] = False
            return self.R(u, v)
        finally:
            for norm in self.norms:
                norm.__dict__["track_running_stats"] = True

    def finish(self, *, failed: bool) -> None:
        """End the pass: write back what the last evaluation left."""
        if self.latest is not None and not failed:
            own = everywhere(self.R)
            for name, buffer in self.latest.items():
                if own[name].shape != buffer.shape:
                    owner, _, key = name.rpartition(".")
                    self.R.get_submodule(owner)._buffers[key] = unwrap_derivatives(buffer.detach().clone())
                    continue
                try:
                    # By `data`: a batch norm that Q has too may have saved it, and its backward does not read it.
                    own[name].data.copy_(buffer)
                except RuntimeError:  # torch.func captures it, or its entries share memory: it may be a constant
                    if not torch.equal(own[name], buffer):
                        raise
        self.latest = None


def on_copies(part: Callable[..., Any], *arguments: Any) -> Any:
    """Return part(*arguments); a module runs on copies of its buffers, which stay as they are."""
    if not isinstance(part, nn.Module):
        return part(*arguments)
    return Buffers(part, everywhere(part)).call(*arguments, last=False)


def keeps_buffers(R: nn.Module, *arguments: Any) -> bool:
    """Return True if R(*arguments) writes to no buffer, not even the same values. Syncs with the host."""
    own = everywhere(R)
    fresh = {name: buffer.clone() for name, buffer in own.items()}
    given = dict(fresh)
    torch.func.functional_call(R, given, arguments, tie_weights=False)
    same = (given[name] is buffer and not buffer._version for name, buffer in fresh.items())
    return all(same) and all(
        one.layout == torch.strided and torch.equal(one, fresh[name]) for name, one in own.items()
    )


def everywhere(module: nn.Module, kind: str = "_buffers") -> Named:
    """Return buffers, or `_parameters`, by name: one that two layers share has two names, for `functional_call`.

    A layer of two names is listed once: `functional_call`, which ties them by itself, would leave a copy in it.
    """
    parts = ((prefix, getattr(part, kind)) for prefix, part in module.named_modules())
    places = ((f"{prefix}.{key}".lstrip("."), one) for prefix, held in parts for key, one in held.items())
    return {name: one for name, one in places if one is not None}
