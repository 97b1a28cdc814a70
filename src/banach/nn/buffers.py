"""The buffers of R in one pass: every evaluation starts from the same values, and the last one is written back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from banach.latent import Latent

Named = dict[str, Tensor]


class Buffers:
    """Calls R on copies of its buffers, such as running statistics and spectral norm's vectors.

    If batch norm alone has buffers, evaluations that are not the last need no copies: batch norm does not track
    its statistics then.
    """

    def __init__(self, R: Any, modules: list[nn.Module]) -> None:
        changing = any(module._buffers for module in modules) and any(module.training for module in modules)
        own = everywhere(R) if changing else {}
        self.R = R
        self.norms = _batch_norms(modules, own)
        one_of = {id(part): name for name, part in own.items()}  # of the names of a shared tensor one
        self.names = {name: one_of[id(part)] for name, part in own.items()}
        self.snapshot = {name: own[name].detach().clone() for name in one_of.values()}
        self.latest: Named | None = None

    def call(self, u: Latent, v: Latent, *, last: bool) -> Latent:
        """Return R(u, v), and keep what it leaves in its buffers if it may be the last evaluation of the pass."""
        if not self.snapshot:
            return self.R(u, v)
        buffers = self.fresh()
        value = torch.func.functional_call(self.R, buffers, (u, v), tie_weights=False)  # see `everywhere`
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
                # By `data`: a batch norm that Q has too may have saved it, and its backward pass does not read it.
                own[name].data.copy_(buffer)
        self.latest = None


def on_copies(part: Callable[..., Any], *arguments: Any) -> Any:
    """Return part(*arguments); a module runs on copies of its buffers, which stay as they are."""
    if not isinstance(part, nn.Module):
        return part(*arguments)
    own = everywhere(part)
    copies = {id(buffer): buffer.detach().clone() for buffer in own.values()}
    buffers = {name: copies[id(buffer)] for name, buffer in own.items()}
    return torch.func.functional_call(part, buffers, arguments, tie_weights=False)


def everywhere(module: nn.Module, kind: str = "_buffers") -> Named:
    """Return buffers, or `_parameters`, by name: one that two layers share has two names, for `functional_call`.

    A layer of two names is listed once: `functional_call`, which ties them by itself, would leave a copy in it.
    """
    parts = ((prefix, getattr(part, kind)) for prefix, part in module.named_modules())
    places = ((f"{prefix}.{key}".lstrip("."), one) for prefix, held in parts for key, one in held.items())
    return {name: one for name, one in places if one is not None}


def _batch_norms(modules: list[nn.Module], buffers: Named) -> list[nn.Module]:
    """Return the batch norms that track, if all buffers are theirs; else an empty list."""
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norms = [m for m in modules if type(m) in plain and m.training and m.track_running_stats] if buffers else []
    own = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return norms if all(id(buffer) in own for buffer in buffers.values()) else []
