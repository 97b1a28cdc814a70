"""A network at a depth that is chosen beforehand: the host is asked nothing, so the whole can be captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from banach.backward import JFB
from banach.fast.fuse import fused_parts, stacks_of
from banach.fast.half import HalfWeights
from banach.fast.twin import has_traceless_twin, traceless_twin
from banach.fast.whole import WholeSolve
from banach.fast.windows import products_in_tf32, wants_windows, with_windows
from banach.latent import Latent, Space, detach, leaves, map_leaves
from banach.network import ImplicitNetwork, as_inputs, is_as_written
from banach.nn.passes import uses_batch_statistics
from banach.solve import Picard, Tolerance

_MOST = 0.95  # of independent samples are to meet the tolerance; the slowest few do not set the depth of all


@dataclass(frozen=True, eq=False)
class Reached:
    """What a fixed depth came to. All but `excess` are per sample, as those of a `Solution`.

    `excess` holds residual / tolerance at this depth and one step on, over the batch: what sets the next depth.
    None where the iteration found its own depth.
    """

    residual: Tensor
    converged: Tensor
    nonfinite: Tensor
    steps: Tensor
    excess: Tensor | None


class FixedDepth:
    """(d, depth) -> (output, Reached): N(d) with `depth` evaluations of R before the one that is differentiated.

    By Picard and JFB the iteration is bare: no sample freezes, nothing is measured before the last step, and that
    step's evaluation by JFB tells the next residual for nothing. A sample that leaves the finite numbers is told
    (`nonfinite`) and not put back, so that the loss shows it. An R that the kernels know is iterated by one of
    them, which stops by itself: `whole` is then not None, and the depth that is given means nothing. Every other
    solver and mode goes through the network itself with a tolerance that never asks. `half` keeps bf16 weights for
    use under autocast: then call `refresh` before the passes of a step, and `collect` after their backward passes.
    """

    half: HalfWeights | None = None
    whole: WholeSolve | None = None

    def __init__(
        self, net: ImplicitNetwork, wrap: Callable[[Any], Any] = lambda part: part, *, half: bool = False
    ) -> None:
        self.net, self.tolerance = net, net.tolerance
        self.bare = is_bare(net)
        self.damping = net.solver.damping if type(net.solver) is Picard else 0.0
        if self.bare:
            self.whole = WholeSolve.of(net)
            named = fused_parts(net, whole=self.whole is not None) if half else (net.Q, net.R, net.S)
            parts = dict(zip("QRS", named, strict=True))
            if half or not products_in_tf32():  # those are cuDNN's
                parts = {name: with_windows(part) if wants_windows(part) else part for name, part in parts.items()}
            self.half = HalfWeights(parts) if half else None
            parts = parts if self.half is None else self.half.modules
            # Not bound methods of the network: compiled parts are called in its place.
            self.Q, self.R, self.S = (wrap(part) for part in parts.values())
            self.twin = wrap(traceless_twin(parts["R"]))
            self.tell = wrap(self._figures)
            self.coupled = uses_batch_statistics(net.R) if net.coupled is None else net.coupled

    def __call__(self, d: Any, depth: int) -> tuple[Any, Reached]:
        return self._bare(d, depth) if self.bare else self._through_network(d, depth)

    def refresh(self) -> None:
        """Before a step: weights are what the optimizer made of them."""
        if self.half is not None:
            self.half.refresh()

    def collect(self) -> None:
        """After the backward passes of a step: the network's parameters have their gradients."""
        if self.half is not None:
            self.half.collect()

    def _bare(self, d: Any, depth: int) -> tuple[Any, Reached]:
        v = self.Q(*as_inputs(d))
        if self.whole is not None:
            found = self.whole(detach(v))
            reached = Reached(found.residual, found.converged, found.nonfinite, found.steps, None)
            return self.S(self.R(found.value, v)), reached
        with torch.no_grad():
            for stack in stacks_of(self.twin):
                stack.forget()
            constant = detach(v)
            z = before = promoted(self.net.start(constant))
            for _ in range(depth):
                z, before = self._step(z, constant), z
        u = self.R(z, v)
        with torch.no_grad():
            residual, converged, nonfinite, excess = self.tell(before, z, detach(u))
            steps = torch.full((), depth, device=residual.device)
            batch = len(leaves(z)[0])
            numbers = residual, converged, nonfinite, steps
            residual, converged, nonfinite, steps = (part.expand(batch) for part in numbers)
            reached = Reached(residual, converged, nonfinite, steps, excess)
        return self.S(u), reached

    def _step(self, z: Latent, v: Latent) -> Latent:
        Tz = self.twin(z, v)
        if not self.damping:
            return Tz
        return map_leaves(lambda a, b: torch.lerp(b.to(a.dtype), a, self.damping), z, Tz)

    def _figures(self, before: Latent, z: Latent, after: Latent) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual, convergence, what is not finite, and excess, from z_{k-1}, z_k and T(z_k)."""
        space = Space.of(z, coupled=self.coupled)
        residual, allowed = measure(space, self.tolerance, before, z, self.damping)
        next_residual, next_allowed = measure(space, self.tolerance, z, after, 0.0)
        excess = torch.stack([_worst(residual / allowed), _worst(next_residual / next_allowed)])
        return residual, residual <= allowed, ~are_finite(residual, allowed), excess

    def _through_network(self, d: Any, depth: int) -> tuple[Any, Reached]:
        net, tolerance = self.net, self.tolerance
        net.tolerance = replace(tolerance, max_steps=depth, check_every=0)
        try:
            output, found = net(*as_inputs(d), solution=True)
        finally:
            net.tolerance = tolerance
        # It is known at which step every sample froze, so the excess of that depth is 1.
        deepest = _worst(found.steps.double())
        excess = torch.where(_worst((~found.converged).double()) > 0, 2.0, 0.8 ** (depth - deepest))
        excesses = torch.stack([excess, 0.8 * excess])
        return output, Reached(found.residual, found.converged, found.nonfinite, found.steps, excesses)


def is_bare(net: Any) -> bool:
    """Is it a network whose parts can be called one by one?"""
    known = is_as_written(net) and type(net.solver) is Picard and type(net.backward) is JFB
    return known and has_traceless_twin(net.R)


def promoted(z: Latent) -> Latent:
    """Under autocast an iterate is in fp32, as in `solve`: in bf16 its rounding alone can exceed the tolerance.
    One in float64 stays so, as autocast leaves it.
    """
    parts = leaves(z)
    if not torch.is_autocast_enabled(parts[0].device.type):
        return z
    return map_leaves(lambda leaf: leaf.to(torch.promote_types(leaf.dtype, torch.float32)), z)


def measure(space: Space, tolerance: Tolerance, z: Latent, Tz: Latent, damping: float) -> tuple[Tensor, Tensor]:
    """The residual per sample, and what is allowed of it: NaN where that is infinite, since nothing meets it."""
    residual = residual_of(space, tolerance, z, Tz, damping)
    if not tolerance.rtol:
        return residual, torch.full_like(residual, tolerance.atol)
    size = tolerance.norm.scale(space) * tolerance.norm.measure(space.rows(Tz), space)
    return residual, torch.nan_to_num(tolerance.atol + tolerance.rtol * size, nan=torch.nan, posinf=torch.nan)


def residual_of(space: Space, tolerance: Tolerance, z: Latent, Tz: Latent, damping: float) -> Tensor:
    """(samples,): the residual at z, from the step to Tz. A damped step is 1 - damping of the residual."""
    size = tolerance.norm.measure(space.rows(Tz) - space.rows(z), space)
    return size * (tolerance.norm.scale(space) / (1 - damping))


def are_finite(residual: Tensor, allowed: Tensor) -> Tensor:
    """(samples,): as in `solve`, one whose T(z) is beyond all bounds is not."""
    return residual.isfinite() & allowed.isfinite()


def _worst(values: Tensor) -> Tensor:
    """The largest value, but for the share of samples that may lag behind; NaN stays NaN."""
    if len(values) < 20:
        return values.max().double()
    return values.double().kthvalue(int(len(values) * _MOST)).values
