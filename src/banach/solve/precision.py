"""The rounding of the arithmetic that T is computed in, and a loop's own arithmetic kept out of autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from banach.latent import Space

TF32_EPS = 2.0**-10

is_transformed: Callable[[], bool]  # is this inside a torch.func transform?
try:  # not public, so perhaps not there in every version
    from torch._C import _are_functorch_transforms_active as is_transformed
except ImportError:

    def is_transformed() -> bool:
        return True


def rounding(space: Space) -> float:
    """eps of the type T computes in: autocast's, TF32's where that is allowed, else the latent's own."""
    if space.autocast and space.dtype != torch.float64:  # which autocast leaves alone
        return float(torch.finfo(torch.get_autocast_dtype(space.device.type)).eps)
    if space.device.type == "cuda" and space.dtype == torch.float32 and _tf32_allowed():
        return TF32_EPS
    return float(torch.finfo(space.dtype).eps)


def without_autocast(space: Space) -> AbstractContextManager[Any]:
    """Norms, histories and Gram matrices are computed in the type of the rows, never in autocast's."""
    return torch.autocast(space.device.type, enabled=False) if space.autocast else nullcontext()


def with_autocast_of(space: Space, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called under the autocast that is in force now, wherever it is called from."""
    if not space.autocast:
        return function
    kind = space.device.type
    dtype = torch.get_autocast_dtype(kind)

    def under_autocast(*arguments: Any) -> Any:
        with torch.autocast(kind, dtype=dtype):
            return function(*arguments)

    return under_autocast


def _tf32_allowed() -> bool:
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    try:
        return any(switch.allow_tf32 for switch in switches)
    except RuntimeError:  # set through the newer per-operator switches, which refuse to be read by the old name
        newer = (torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv", None))
        return any(getattr(switch, "fp32_precision", "ieee") == "tf32" for switch in newer)
