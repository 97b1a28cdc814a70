"""What `fit` adds to the loss of a network with a fixed point: a penalty on dT/du, and losses on iterates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from banach.latent import leaves
from banach.network import ImplicitNetwork
from banach.nn import (
    Observed,
    finite_difference_penalty,
    fixed_point_correction,
    jacobian_penalty,
    observe,
)
from banach.train.precision import at_least_fp32, autocast
from banach.train.settings import Settings


def check_penalties(net: Any, settings: Settings) -> None:
    """Refuse penalties for a network that has no fixed point."""
    if _adds(settings) and (not isinstance(net, ImplicitNetwork) or net.tolerance.max_steps == 0):
        raise ValueError(
            f"jacobian_penalty and correction need a network with a fixed point, got {type(net).__name__} without "
            "one; set both to 0"
        )


def observing(net: Any, settings: Settings) -> AbstractContextManager[Observed | None]:
    """Observe the forward pass in the block, if the settings add something to its loss."""
    if not _adds(settings):
        return nullcontext()
    return observe(net, settings.correction_steps if settings.correction else ())


def added(seen: Observed, settings: Settings, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what is added to the loss of an observed pass, in the precision of the pass."""
    first = leaves(seen.z)[0]
    total = first.new_zeros(())
    with autocast(settings.precision, first.device):
        if settings.jacobian_penalty:
            estimate = finite_difference_penalty if settings.finite_difference else jacobian_penalty
            found = estimate(seen.T, seen.z, seen.inputs, coupled=seen.coupled)
            total = total + settings.jacobian_penalty * found.mean()
        if settings.correction:
            found = fixed_point_correction(seen, lambda output: loss(at_least_fp32(output)))
            total = total + settings.correction * found
    return total


def products(settings: Settings) -> int:
    """J-products that the penalty makes, per sample and step."""
    return int(settings.jacobian_penalty > 0 and not settings.finite_difference)


@contextmanager
def explained(settings: Settings) -> Iterator[None]:
    """Say what to do where a penalty's gradient fails because R has no second derivative."""
    try:
        yield
    except RuntimeError as error:
        why = str(error)
        if products(settings) and ("once_differentiable" in why or "is not implemented" in why):
            raise RuntimeError(
                f"jacobian_penalty needs second derivatives of R, and a layer of R has none ({why[:200]}); "
                "set finite_difference=True (--finite-difference)"
            ) from error
        raise


def _adds(settings: Settings) -> bool:
    return settings.jacobian_penalty > 0 or settings.correction > 0
