"""One forward pass: every evaluation of R sees the same dropout masks and starts from the same buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from banach.backward.reads import Reads
from banach.latent import Latent
from banach.nn.hooks import is_hooked
from banach.nn.watch import first_watch, is_compiled
from banach.solve.context import is_transformed

Result = TypeVar("Result")
Masks = dict[Any, Any]


# The pass that is evaluating R, per thread: backward threads evaluate too. Bare, since Dynamo does not notice
# that an attribute hides a class attribute: compiled outside a pass, R would never see one.
_current = threading.local()


def _running() -> Pass | None:
    return getattr(_current, "running", None)


class Pass:
    """R, evaluated many times in one forward pass as if it were one layer.

    Buffers (running statistics, spectral norm's vectors) start from the same snapshot at every evaluation,
    and only what the last evaluation of the pass left in them is written back: one update per pass.
    Dropout masks are drawn at the first evaluation and held here, not on the module, so that a network can
    be used many times in one graph. Recomputation and J-products after the pass read the same snapshot and
    masks and write nothing; with `later=True` they also read the parameters that R had in the pass, which under
    `functional_call` are not its own, and in the mode it was in; they are refused where what a plain function
    reads was changed in place. (R may not checkpoint itself: what it recomputes, it recomputes outside the pass.)
    `once=True` promises one evaluation after the iteration: where batch norm alone has buffers it then writes to
    its own, and nothing has to be copied. (If that evaluation fails, some of them may have been updated.)

    `with Pass(R) as one:` is the forward pass; `one.evaluate` is R, then and later. A pass that is never
    entered writes nothing at all.
    """

    def __init__(
        self, R: Any, modules: list[nn.Module] | None = None, *, later: bool = False, once: bool = False
    ) -> None:
        known = isinstance(R, nn.Module)
        if modules is None:
            modules = modules_of(R)
        buffers, special = _training_buffers(R, modules), special_layers(modules)
        self.R = R
        # A plain function may call layers that nobody can see from here: it gets masks in case it does.
        self.masks: Masks | None = {} if not known or any(map(draws_masks, special)) else None
        self.norms = _batch_norms(special, buffers) if buffers else None
        self.writes = once and self.norms is not None and _writable(modules, buffers.values())
        self.snapshot = {} if self.writes else {name: part.detach().clone() for name, part in buffers.items()}
        recorded = later and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        self.then = Then(R, modules) if recorded and known else None
        self.reads = Reads(R) if recorded and not known else None
        self.scratch: dict[str, Tensor] | None = None  # the buffers of evaluations that are not recorded
        self.latest: dict[str, Tensor] | None = None
        self.made: dict[int, tuple[Tensor, Any]] = {}
        self.rows: list[Tensor] = []  # which samples are here, where an outer pass has let some go
        self.index: Tensor | None = None
        self.open = False
        self.outer: Pass | None = None
        self.watch = first_watch(R)

    def __enter__(self) -> Pass:
        if self.watch is not None:
            self.watch.__enter__()
        self.open, self.outer, _current.running = True, _running(), self
        if self.masks is not None and self.outer is not None and self.outer.masks is not None:
            # R of the outer pass holds this network: its masks must last as long as the outer pass.
            self.masks = self.outer.masks.setdefault(id(self.R), {})
            self.rows = self.outer.present()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.watch is not None:
            self.watch.__exit__(kind, error, trace)
        self.open, _current.running = False, self.outer
        if self.reads is not None:
            self.reads.leave_out_changed()
        if self.latest is not None and error is None:
            self._write_back(self.latest)
        self.latest = self.scratch = None
        self.made = {}

    def evaluate(self, u: Latent, v: Latent, index: Tensor | None = None) -> Latent:
        """R(u, v). `index` says which samples of the batch these are, when some have left it."""
        if self.masks is None or (index is None and _running() is self):
            return self._call(u, v)
        with self._here(index):
            return self._call(u, v)

    def iterate(self, u: Latent, v: Latent, index: Tensor | None = None) -> Latent:
        """R(u, v), not recorded and not the last of the pass: so what it would leave in buffers is not even made.

        Where batch norm alone has buffers it is told not to track; that costs nothing, and swapping buffers does.
        """
        if self.norms is None or not (self.writes or _bare()):
            return self.evaluate(u, v, index)
        with _untracked(self.norms, hidden=self.writes):
            if self.masks is None or (index is None and _running() is self):
                return self.R(u, v)
            with self._here(index):
                return self.R(u, v)

    def mask(self, layer: nn.Module, shape: torch.Size, keep: float, device: torch.device) -> Tensor:
        """The mask of this layer, for the samples that are here. Called twice, a layer uses it twice."""
        assert self.masks is not None
        key = (id(layer), shape[1:])
        if key not in self.masks:
            self.masks[key] = torch.rand(shape, device=device) < keep
        mask: Tensor = self.masks[key]
        for rows in self.present():
            mask = mask.index_select(0, rows)
        if mask.shape != shape:
            raise ValueError(
                f"dropout in R has a mask for a batch of {mask.shape[0]} and got a batch of {shape[0]}: one pass "
                "is one batch; where R drops, axis 0 must be the batch, or leave out compact=True"
            )
        return mask

    def present(self) -> list[Tensor]:
        """Selections that lead from the whole batch to the samples that are here."""
        return self.rows if self.index is None else [*self.rows, self.index]

    def _call(self, u: Latent, v: Latent) -> Latent:
        if not self.open and self.then is not None and self.then.differs():
            with self.then.modes():
                return torch.func.functional_call(self.R, {**self.then.parameters, **self._buffers()}, (u, v))
        if not self.open and self.reads is not None:
            self.reads.check()
        if self.writes and self.open and self.norms is not None:
            with _aliased(self.norms):
                return self.R(u, v)
        if not self.snapshot:
            return self.R(u, v)
        buffers = self._buffers()
        value = torch.func.functional_call(self.R, buffers, (u, v))
        if self.open:
            self.latest = buffers
        return value

    def _buffers(self) -> dict[str, Tensor]:
        """The snapshot again. A recorded evaluation gets a copy of its own, since its graph may hold it."""
        if not self.open or torch.is_grad_enabled():
            return {name: buffer.clone() for name, buffer in self.snapshot.items()}
        if self.scratch is None:
            self.scratch = {name: buffer.clone() for name, buffer in self.snapshot.items()}
        else:
            _copy_all(self.scratch, self.snapshot)
        return dict(self.scratch)

    def _write_back(self, buffers: dict[str, Tensor]) -> None:
        own = dict(self.R.named_buffers())
        # By `data`: a batch norm that Q has too may have saved its buffers, which its backward pass does not read.
        _copy_all({name: buffer.data for name, buffer in own.items()}, buffers)

    @contextmanager
    def _here(self, index: Tensor | None) -> Iterator[None]:
        before, _current.running, self.index = _running(), self, index
        try:
            yield
        finally:
            _current.running, self.index = before, None


class PlainPass:
    """A pass of an R that has neither masks nor buffers: there is nothing to keep, and R is called as it is."""

    masks = None

    def __init__(self, R: Any) -> None:
        self.iterate = self.evaluate = R.forward if _calls_forward(R) else R

    def __enter__(self) -> PlainPass:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _calls_forward(R: nn.Module) -> bool:
    """Return True if R(u, v) is R.forward(u, v): nothing hooks it or compiles it."""
    plain = type(R).__call__ is nn.Module.__call__ and R._compiled_call_impl is None
    return plain and not is_hooked(R) and not torch.compiler.is_compiling()


def forward_pass(
    R: Any, modules: list[nn.Module], special: list[nn.Module], *, later: bool, once: bool
) -> Pass | PlainPass:
    """Return the pass that R, with these modules and special layers, needs."""
    plain = bool(modules) and not special and not later
    if plain and not any([module._buffers for module in modules]) and first_watch(R) is None:  # noqa: C419 (faster)
        return PlainPass(R)
    return Pass(R, modules, later=later, once=once)


class Then:
    """R in a forward pass: its parameters, and the mode of every module."""

    def __init__(self, R: nn.Module, modules: list[nn.Module]) -> None:
        self.R = R
        self.parameters = dict(R.named_parameters())
        # A lazy one is filled in the pass itself.
        self.versions = {name: p._version for name, p in self.parameters.items() if not is_lazy(p)}
        self.training = [(module, module.training) for module in modules]

    def differs(self) -> bool:
        """Is R another one now? Refused where it was changed in place: what it was is gone.

        Not asked where parameters are of a kind of their own, such as sharded ones: who keeps them brings them.
        """
        now = dict(self.R.named_parameters())
        if not all(
            type(tensor) in (Tensor, nn.Parameter) for tensor in (*now.values(), *self.parameters.values())
        ):
            return False
        for name, version in self.versions.items():
            if self.parameters[name]._version != version:
                raise RuntimeError(
                    f"R's parameter {name} was changed in place between the forward and the backward pass, which "
                    "needs it as it was: call backward() before the optimizer's step()"
                )
        same = all(now.get(name) is tensor for name, tensor in self.parameters.items())
        return not same or any(module.training != mode for module, mode in self.training)

    @contextmanager
    def modes(self) -> Iterator[None]:
        now = [(module, module.training) for module, _ in self.training]
        try:
            for module, mode in self.training:
                module.training = mode
            yield
        finally:
            for module, mode in now:
                module.training = mode


def modules_of(R: Any) -> list[nn.Module]:
    """Return the modules of R, each once. Every pass needs them, and `R.modules()` also makes their names."""
    if not isinstance(R, nn.Module):
        return []
    if torch.compiler.is_compiling():
        return list(R.modules())
    found: dict[nn.Module, None] = {}
    waiting = [R]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting += [part for part in module._modules.values() if part is not None]
    return list(found)


def special_layers(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that normalise by the batch or draw at random. Of most networks there are none."""
    if torch.compiler.is_compiling():
        return modules
    return [module for module in modules if _is_special[type(module)]]


_SPECIAL = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RReLU,
)


class _Classes(dict[type, bool]):
    """For every class that was looked at: do its modules normalise by the batch or draw at random?"""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, _SPECIAL) or hasattr(kind, "one_mask_per_pass")
        return self[kind]


_is_special = _Classes()


def _training_buffers(R: Any, modules: list[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers of R, if a module of it is in train mode and may write to them."""
    if not any(module._buffers for module in modules) or not any(module.training for module in modules):
        return {}
    return dict(R.named_buffers())


def _batch_norms(modules: list[nn.Module], buffers: dict[str, Tensor]) -> list[nn.Module] | None:
    """The batch norms that track, if all buffers are theirs; None if others have some, or there are none."""
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norms = [m for m in modules if type(m) in plain and m.training and m.track_running_stats]
    own = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return norms if norms and all(id(buffer) in own for buffer in buffers.values()) else None


def _writable(modules: list[nn.Module], buffers: Iterable[Tensor]) -> bool:
    """Can R be called as it is, buffers and all? Not inside torch.func, nor where Dynamo compiles some of it."""
    if torch.compiler.is_compiling() or is_transformed() or is_compiled(modules):
        return False
    return not any(buffer.is_inference() for buffer in buffers)


def _bare() -> bool:
    """Is nothing recorded here, and nothing compiled?"""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


@contextmanager
def _untracked(norms: list[nn.Module], *, hidden: bool) -> Iterator[None]:
    """`hidden`: nor can anyone else write to their buffers."""
    own = [norm._buffers for norm in norms]
    for norm, buffers in zip(norms, own, strict=True):
        norm.__dict__["track_running_stats"] = False
        if hidden:
            norm.__dict__["_buffers"] = dict.fromkeys(buffers)
    try:
        yield
    finally:
        for norm, buffers in zip(norms, own, strict=True):
            norm.__dict__["track_running_stats"] = True
            norm.__dict__["_buffers"] = buffers


@contextmanager
def _aliased(norms: list[nn.Module]) -> Iterator[None]:
    """The same memory with counts of its own: what is written to it afterwards is no matter of this graph's."""
    own = [norm._buffers for norm in norms]
    for norm, buffers in zip(norms, own, strict=True):
        norm.__dict__["_buffers"] = {name: None if part is None else part.data for name, part in buffers.items()}
    try:
        yield
    finally:
        for norm, buffers in zip(norms, own, strict=True):
            norm.__dict__["_buffers"] = buffers


def running_pass() -> Pass | None:
    """The pass that is evaluating R right now in this thread, if it keeps masks."""
    now = _running()
    return now if now is not None and now.masks is not None else None


def once_per_pass(owner: nn.Module, source: Tensor, make: Callable[[], Result]) -> Result:
    """make(), or what it gave earlier in this pass for the same source: a weight need be scaled only once.

    Evaluations that are recorded make their own, which their graph needs.
    """
    now = _running()
    if now is None or not now.open or torch.is_grad_enabled():
        return make()
    kept = now.made.get(id(owner))
    if kept is None or kept[0] is not source:
        kept = now.made[id(owner)] = (source, make())
    return kept[1]


def draws_masks(module: nn.Module) -> bool:
    """Does this module drop at random, in the state it is in?"""
    return module.training and bool(getattr(module, "one_mask_per_pass", False)) and bool(getattr(module, "p", 0))


def uses_batch_statistics(R: Any, modules: list[nn.Module] | None = None) -> bool:
    """Does R mix the samples of a batch, in the state it is in? Batch norm does, unless it uses its buffers."""
    for module in modules_of(R) if modules is None else modules:
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
            module.training or (module.running_mean is None and module.running_var is None)
        ):
            return True
    return False


def _copy_all(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    """One kernel per type rather than one per buffer: this happens in every pass, or at every step of one."""
    for dtype in {tensor.dtype: None for tensor in source.values()}:
        names = [name for name, tensor in source.items() if tensor.dtype == dtype]
        torch._foreach_copy_([target[name] for name in names], [source[name] for name in names])
