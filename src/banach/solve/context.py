"""What surrounds a solve: grad mode, forward mode, autocast, torch.func, Dynamo, a capture; rounding of T."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from banach.latent import Space

F = TypeVar("F", bound=Callable[..., Any])
# Before torch 2.11 autocast keeps weights that it has cast without a gradient.
_KEEPS_CASTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11)

# Names of torch that some versions lack: is_exporting is new in 2.7, the others are private.
_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
is_transformed: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_dynamo_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
functorch: Any = torch._C._functorch
is_functorch_wrapped_tensor: Callable[[Tensor], bool] = functorch.is_functorch_wrapped_tensor


def is_compiling() -> bool:
    """Return True if Dynamo traces this call, or compiles the functions that a loop with host checks calls."""
    return torch.compiler.is_compiling() or _dynamo_callback() not in (None, False)


def is_exporting() -> bool:
    """Return True inside torch.export. (torch 2.11 also says so under torch.compile, where the loop is traced.)"""
    return _exporting() and not torch.compiler.is_dynamo_compiling()


def unwrap_derivatives(tensor: Tensor, of: Callable[[int], bool] = lambda level: True) -> Tensor:
    """Return the tensor inside the wrappers of grad, vjp and jvp of these levels, down to the next one of vmap."""
    while is_functorch_wrapped_tensor(tensor) and not functorch.is_batchedtensor(tensor):
        if not of(functorch.maybe_get_level(tensor)):
            break
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def no_derivatives(function: F) -> F:
    """Make the function run without gradients and tangents: torch's context managers, at a fraction of their time.

    The evaluation of `attach` that follows must not find weights which torch has cached without a gradient.
    """

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return function(*arguments, **named)
        recorded, carried = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        torch._C._set_grad_enabled(False)
        torch._C._set_fwd_grad_enabled(False)
        try:
            return function(*arguments, **named)
        finally:
            torch._C._set_grad_enabled(recorded)
            torch._C._set_fwd_grad_enabled(carried)
            if recorded and parametrize._cache:  # of `parametrize.cached()`
                known = parametrize._cache.items()
                parametrize._cache = {key: kept for key, kept in known if kept is not None and kept.requires_grad}
            if recorded and _KEEPS_CASTS:
                torch.clear_autocast_cache()

    return cast(F, run)


def rounding(space: Space) -> float:
    """Return eps of the type T computes in: autocast's, TF32's where that is allowed, else the latent's own."""
    if space.autocast and space.dtype != torch.float64:  # which autocast leaves alone
        return float(torch.finfo(torch.get_autocast_dtype(space.device.type)).eps)
    if space.device.type == "cuda" and space.dtype == torch.float32 and _tf32_allowed():
        return 2.0**-10  # TF32's
    return float(torch.finfo(space.dtype).eps)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Turn autocast off: norms, histories and Gram matrices are computed in the type of the rows."""
    kind = device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)  # meta tensors have none
    return torch.autocast(kind, enabled=False) if on else nullcontext()


def with_autocast_of(space: Space, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under the autocast that is on now, wherever it is called from; not re-entrant."""
    if not space.autocast:
        return function
    kind = space.device.type
    context = torch.autocast(kind, dtype=torch.get_autocast_dtype(kind))  # made once: that queries the device

    def under_autocast(*arguments: Any) -> Any:
        with context:
            return function(*arguments)

    return under_autocast


def _tf32_allowed() -> bool:
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    try:
        return any(switch.allow_tf32 for switch in switches)
    except RuntimeError:  # set through the newer per-operator switches, which refuse to be read by the old name
        newer = (torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv", None))
        return any(getattr(switch, "fp32_precision", "ieee") == "tf32" for switch in newer)


# loop(body, active, steps, cycle=, max_steps=, stop_at=): call body() while more than `stop_at` entries of
# `active` (samples,) are True and `steps` (int32, no axes) is below `max_steps`. A body takes `cycle` steps, which
# the loop adds to `steps`. `loop_at_least_once` does this in a warm-up, and `Recording.loop` in a capture, as a
# while node.
Loop = Callable[..., None]

_current = threading.local()


@contextmanager
def assigned(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes inside the block, given as (object, name, value). One that was missing is None afterwards."""
    before = [(owner, name, getattr(owner, name, None)) for owner, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        yield
    finally:
        for change in before:
            setattr(*change)


def loops_by(
    loop: Loop, invert: Callable[[Tensor], Tensor | None] = lambda M: None
) -> AbstractContextManager[None]:
    """Run the loops of solves with host checks by `loop`, in the block and in this thread.

    `invert` returns the inverses of a batch of matrices without a host sync, None if it cannot.
    """
    return assigned([(_current, "loop", loop), (_current, "invert", invert)])


def constant_weights() -> AbstractContextManager[None]:
    """Say that T is differentiated in the latent only, in the block and in this thread."""
    return assigned([(_current, "constant_weights", True)])


def weights_are_constant() -> bool:
    """Return True if T is differentiated in the latent only, which may be cheaper."""
    return bool(getattr(_current, "constant_weights", False))


def device_loop() -> Loop | None:
    """Return the loop of the capture or warm-up that this thread is in, None outside of both."""
    return getattr(_current, "loop", None)


def device_inverse(M: Tensor) -> Tensor | None:
    """Return the inverses that the capture or warm-up of this thread computes, None if it does not."""
    return _current.invert(M)
