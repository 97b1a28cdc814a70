"""The buffers of R in one pass: every evaluation starts from the same values, and the last one is written back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from banach.latent import Latent


class Buffers:
    """Gives every evaluation of R the same buffers, such as running statistics and spectral norm's vectors.

    Evaluations run on copies. If batch norm alone has buffers they run on R itself: all but the last do not track
    statistics, and an evaluation that does begins with those of the start.
    """

    def __init__(self, R: Any, modules: list[nn.Module]) -> None:
        owners = [m for m in modules if m._buffers and any(part is not None for part in m._buffers.values())]
        if not any([module.training for module in modules]):  # noqa: C419 (faster)
            owners = []
        self.R = R
        self.norms = owners if all(map(_is_tracking, owners)) else []
        own = (part for module in owners for part in module._buffers.values() if part is not None)
        self.own = list(dict.fromkeys(own))
        self.snapshot = [part.detach().clone() for part in self.own]
        self.latest: list[Tensor] | None = None

    def call(self, u: Latent, v: Latent, *, last: bool) -> Latent:
        """Return R(u, v), and keep what it leaves in its buffers if it may be the last evaluation of the pass."""
        if not self.snapshot:
            return self.R(u, v)
        if last and self.norms and not torch.compiler.is_compiling():
            self._restore(self.snapshot)
            return self.R(u, v)
        buffers = self.fresh()
        value = torch.func.functional_call(self.R, buffers, (u, v))
        if last:
            self.latest = list(buffers.values())
        return value

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
        """End the pass: write back what the last evaluation left, or what was there before a failure."""
        values = self.latest
        if failed:
            values = self.snapshot if self.norms else None
        if values is not None:
            self._restore(values)
        self.latest = None

    def _restore(self, values: list[Tensor]) -> None:
        """Write the buffers, by `data`: graphs may have saved those of batch norm, which they do not read."""
        for dtype in {tensor.dtype: None for tensor in values}:  # one kernel per type, not per buffer
            pairs = [pair for pair in zip(self.own, values, strict=True) if pair[1].dtype == dtype]
            torch._foreach_copy_([own.data for own, _ in pairs], [value for _, value in pairs])


def on_copies(part: Callable[..., Any], *arguments: Any) -> Any:
    """Return part(*arguments); a module runs on copies of its buffers, which stay as they are."""
    if not isinstance(part, nn.Module):
        return part(*arguments)
    buffers = {name: buffer.detach().clone() for name, buffer in part.named_buffers()}
    return torch.func.functional_call(part, buffers, arguments)


def _is_tracking(module: Any) -> bool:
    """Return True for a batch norm that updates its buffers, which are only its statistics."""
    plain = type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and len(module._buffers) == 3
    return plain and module.training and module.track_running_stats and not module.running_mean.is_inference()
