"""What `fit` adds to the loss of a network with a fixed point: a penalty on dT/du, and losses on iterates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from banach.fast.step import at_least_fp32
from banach.latent import leaves
from banach.network import ImplicitNetwork
from banach.nn import Observed, finite_difference_penalty, fixed_point_correction, jacobian_penalty, observe
from banach.train.precision import autocast
from banach.train.settings import Settings


@dataclass(frozen=True)
class Penalties:
    """The penalties of some settings, as a part of a `TrainStep`."""

    settings: Settings

    @staticmethod
    def of(settings: Settings) -> Penalties | None:
        """Return the penalties, None if the settings have none."""
        return Penalties(settings) if settings.jacobian_penalty or settings.correction else None

    @property
    def products(self) -> int:
        """J-products that the penalty makes, per sample and step."""
        return int(self.settings.jacobian_penalty > 0 and not self.settings.finite_difference)

    def check(self, net: Any) -> None:
        """Refuse a network that has no fixed point."""
        if not isinstance(net, ImplicitNetwork) or net.tolerance.max_steps == 0:
            needs = "jacobian_penalty and correction need a network with a fixed point"
            raise ValueError(f"{needs}, got {type(net).__name__} without one; set both to 0")

    def observing(self, net: Any) -> AbstractContextManager[Observed]:
        """Observe the forward pass in the block."""
        return observe(net, self.settings.correction_steps if self.settings.correction else ())

    def added(self, seen: Observed, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what is added to the loss of an observed pass, in the precision of the pass."""
        settings, first = self.settings, leaves(seen.z)[0]
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

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say what to do where a penalty's gradient fails because R has no second derivative."""
        try:
            yield
        except RuntimeError as error:
            why, advice = str(error), "set finite_difference=True (--finite-difference)"
            if not self.products or not ("once_differentiable" in why or "is not implemented" in why):
                raise
            needs = "jacobian_penalty needs second derivatives of R, and a layer of R has none"
            raise RuntimeError(f"{needs} ({why[:200]}); {advice}") from error
