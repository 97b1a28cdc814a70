"""The buffers of R in one pass: every evaluation starts from the same values, and the last one is written back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from banach.latent import Latent
from banach.nn.layers import is_compiled
from banach.solve.context import is_transformed

Named = dict[str, Tensor]


class Buffers:
    """Calls R on copies of its buffers, such as running statistics and spectral norm's vectors.

    If batch norm alone has buffers, evaluations that are not the last need no copies: batch norm is set not to
    track. With `attaches_once`, which promises one evaluation after the iteration, that evaluation then writes to
    R's own buffers. (If it fails, some of them may have been updated.)
    """

    def __init__(self, R: Any, modules: list[nn.Module], special: list[nn.Module], *, attaches_once: bool) -> None:
        changing = any(module._buffers for module in modules) and any(module.training for module in modules)
        own = dict(R.named_buffers()) if changing else {}
        self.R = R
        self.norms = _batch_norms(special, own)
        self.owned = [norm._buffers for norm in self.norms]  # as they are now: another thread may hide them later
        self.direct = attaches_once and len(self.norms) > 0 and _is_writable(modules, own.values())
        self.snapshot = {} if self.direct else {name: part.detach().clone() for name, part in own.items()}
        self.latest: Named | None = None

    def call(self, u: Latent, v: Latent, *, last: bool) -> Latent:
        """Return R(u, v), and keep what it leaves in its buffers if it may be the last evaluation of the pass."""
        if self.direct and last:
            with self._altered(track=True, buffers=_aliases):
                return self.R(u, v)
        if not self.snapshot:
            return self.R(u, v)
        buffers = self.fresh()
        value = torch.func.functional_call(self.R, buffers, (u, v))
        if last:
            self.latest = buffers
        return value

    def fresh(self) -> Named:
        """Return the snapshot again, as a copy: the graph of an evaluation may hold it."""
        return {name: buffer.clone() for name, buffer in self.snapshot.items()}

    @property
    def skips_updates(self) -> bool:
        """True if an evaluation that is not recorded can run on R itself, without updating its buffers."""
        bare = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return len(self.norms) > 0 and (self.direct or bare)

    def untracked(self) -> AbstractContextManager[None]:
        """Keep batch norm from updating its statistics. Where R runs on its own buffers, hide those too."""
        return self._altered(track=False, buffers=dict.fromkeys if self.direct else None)

    @contextmanager
    def _altered(self, *, track: bool, buffers: Callable[[Any], Any] | None) -> Iterator[None]:
        """Let batch norms that track do so or not, with other buffers made of their own ones (None: their own)."""
        for norm, owned in zip(self.norms, self.owned, strict=True):
            norm.__dict__["track_running_stats"] = track
            if buffers is not None:
                norm.__dict__["_buffers"] = buffers(owned)
        try:
            yield
        finally:
            for norm, owned in zip(self.norms, self.owned, strict=True):
                norm.__dict__["track_running_stats"] = True
                norm.__dict__["_buffers"] = owned

    def finish(self, *, failed: bool) -> None:
        """End the pass: write back what the last evaluation left."""
        if self.latest is not None and not failed:
            # By `data`: a batch norm that Q has too may have saved its buffers, which its backward pass does not
            # read.
            own, latest = {name: buffer.data for name, buffer in self.R.named_buffers()}, self.latest
            for dtype in {tensor.dtype: None for tensor in latest.values()}:  # one kernel per type, not per buffer
                names = [name for name, tensor in latest.items() if tensor.dtype == dtype]
                torch._foreach_copy_([own[name] for name in names], [latest[name] for name in names])
        self.latest = None


def on_copies(part: Callable[..., Any], *arguments: Any) -> Any:
    """Return part(*arguments); a module runs on copies of its buffers, which stay as they are."""
    if not isinstance(part, nn.Module):
        return part(*arguments)
    buffers = {name: buffer.detach().clone() for name, buffer in part.named_buffers()}
    return torch.func.functional_call(part, buffers, arguments)


def _batch_norms(modules: list[nn.Module], buffers: Named) -> list[nn.Module]:
    """Return the batch norms that track, if all buffers are theirs; else an empty list."""
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norms = [m for m in modules if type(m) in plain and m.training and m.track_running_stats] if buffers else []
    own = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return norms if all(id(buffer) in own for buffer in buffers.values()) else []


def _is_writable(modules: list[nn.Module], buffers: Iterable[Tensor]) -> bool:
    """Return True if R can run on its own buffers. False inside torch.func and if Dynamo compiles part of R."""
    if torch.compiler.is_compiling() or is_transformed() or is_compiled(modules):
        return False
    return not any(buffer.is_inference() for buffer in buffers)


def _aliases(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return the same memory under other version counters.

    A later pass writes to it. Autograd would take that for a change of a tensor that this graph has saved.
    """
    return {name: None if part is None else part.data for name, part in buffers.items()}
