"""The buffers of R in one pass: every evaluation starts from the same values, and the last one is written back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from banach.latent import Latent


class Buffers:
    """Calls R on copies of its buffers, such as running statistics and spectral norm's vectors.

    If batch norm alone has buffers, evaluations that are not the last need no copies: batch norm does not track
    its statistics then.
    """

    def __init__(self, R: Any, modules: list[nn.Module]) -> None:
        changing = any([module.training for module in modules])  # noqa: C419 (faster)
        owners = [module for module in modules if module._buffers] if changing else []
        found = [(m, name, part) for m in owners for name, part in m._buffers.items() if part is not None]
        self.R = R
        self.own = list(dict.fromkeys(part for _, _, part in found))
        self.places = [(module, name) for module, name, _ in found]
        norms = list(dict.fromkeys(module for module, _ in self.places))
        self.norms = norms if len(self.own) == len(found) and all(map(_is_tracking, norms)) else []
        self.snapshot = [part.detach().clone() for part in self.own]
        self.latest: list[Tensor] | None = None

    def call(self, u: Latent, v: Latent, *, last: bool) -> Latent:
        """Return R(u, v), and keep what it leaves in its buffers if it may be the last evaluation of the pass."""
        if not self.snapshot:
            return self.R(u, v)
        if self.norms and not torch.compiler.is_compiling():
            copies = [part.clone() for part in self.snapshot]
            try:
                self._set(copies)
                value = self.R(u, v)
            finally:
                self._set(self.own)
        else:
            named = self.fresh()
            value, copies = torch.func.functional_call(self.R, named, (u, v)), list(named.values())
        if last:
            self.latest = copies
        return value

    def _set(self, values: list[Tensor]) -> None:
        """Give batch norms these buffers: what functional_call does, in a fraction of its time."""
        for (norm, name), value in zip(self.places, values, strict=True):
            setattr(norm, name, value)

    def fresh(self) -> dict[str, Tensor]:
        """Return the snapshot again, by name, as a copy: the graph of an evaluation may hold it."""
        names = (name for name, _ in self.R.named_buffers())
        return {name: buffer.clone() for name, buffer in zip(names, self.snapshot, strict=True)}

    @property
    def skips_updates(self) -> bool:
        """True if an evaluation that is not recorded can run on R itself, without updating its buffers."""
        return len(self.norms) > 0 and not torch.is_grad_enabled() and not torch.compiler.is_compiling()

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
            # By `data`: a batch norm that Q has too may have saved its buffers, which its backward pass does not
            # read.
            pairs = [(own.data, value) for own, value in zip(self.own, self.latest, strict=True)]
            for dtype in {value.dtype: None for _, value in pairs}:  # one kernel per type, not per buffer
                some = [pair for pair in pairs if pair[1].dtype == dtype]
                torch._foreach_copy_([own for own, _ in some], [value for _, value in some])
        self.latest = None


def on_copies(part: Callable[..., Any], *arguments: Any) -> Any:
    """Return part(*arguments); a module runs on copies of its buffers, which stay as they are."""
    if not isinstance(part, nn.Module):
        return part(*arguments)
    buffers = {name: buffer.detach().clone() for name, buffer in part.named_buffers()}
    return torch.func.functional_call(part, buffers, arguments)


def _is_tracking(module: Any) -> bool:
    """Return True for a batch norm that updates its buffers, which are only its statistics."""
    plain = type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and len(module._buffers) == 3
    return plain and module.training and module.track_running_stats
