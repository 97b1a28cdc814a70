"""FixedDepth: a network at a depth that is chosen beforehand, without a host sync, so that it can be captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from banach.fast.capture import unchanged
from banach.fast.depth import DepthControl, Ladder
from banach.fast.plan import Plan, plan
from banach.fast.weights import Bf16Weights, compiled, forget_packed, frozen_copy, parts_of
from banach.latent import Latent, Space, detach, leaves, map_leaves
from banach.network import ImplicitNetwork, as_inputs, zeros
from banach.nn.layers import uses_batch_statistics
from banach.solve import ConvergenceWarning, Solution
from banach.solve.tolerance import are_finite, measure

_MOST = 0.95  # of independent samples are to meet the tolerance; the slowest few do not set the depth of all


class FixedDepth:
    """(d, depth) -> (output, Solution, excess): N(d) with `depth` evaluations of R before the differentiated one.

    `excess` (2,) holds residual / tolerance over the batch, at this depth and one step on; it sets the next depth.
    It is None where R was iterated by a kernel, which finds the depth itself, and for modules without fixed point,
    whose Solution is None, too.

    By Picard and JFB the loop is bare: no sample freezes, nothing is measured before the last step, and JFB's
    evaluation gives the next residual at no cost. A sample that leaves the finite numbers is marked (`nonfinite`)
    and not replaced, so that the loss shows it. Other solvers and modes go through the network itself, without
    host checks. With bf16 weights call `refresh` before the passes of a step, and `collect` after their backward.
    """

    def __init__(self, net: Any, how: Plan | None = None) -> None:
        self.net, self.plan = net, plan(net) if how is None else how
        self.bf16: Bf16Weights | None = None
        self.finds_depth = not isinstance(net, ImplicitNetwork) or bool(self.plan.bare and self.plan.kernel)
        if not self.plan.bare:
            self.whole = net if isinstance(net, ImplicitNetwork) else compiled(net, self.plan)
            return
        self.damping = net.solver.damping
        parts = parts_of(net, self.plan)
        if self.plan.bf16_weights:
            self.bf16 = Bf16Weights(parts)
            parts = self.bf16.modules
        # Not bound methods of the network: compiled parts are called in its place.
        self.Q, self.R, self.S = (compiled(part, self.plan) for part in parts.values())
        self.frozen = compiled(frozen_copy(parts["R"]), self.plan)
        self.measured = compiled(self._measured, self.plan)
        self.coupled = uses_batch_statistics(net.R) if net.coupled is None else net.coupled

    def __call__(self, d: Any, depth: int) -> tuple[Any, Solution | None, Tensor | None]:
        if self.plan.bare:
            return self._by_kernel(d) if self.plan.kernel else self._bare(d, depth)
        return self._through_network(d, depth)

    def refresh(self) -> None:
        """Take up the weights that the optimizer changed. Call it before a step."""
        if self.bf16 is not None:
            self.bf16.refresh()

    def collect(self) -> None:
        """Give the network's parameters their gradients. Call it after the backward passes of a step."""
        if self.bf16 is not None:
            self.bf16.collect()

    def _by_kernel(self, d: Any) -> tuple[Any, Solution, None]:
        v = self.Q(*as_inputs(d))
        found = kernel_solve(self.net, detach(v))
        return self.S(self.R(found.value, v)), found, None

    def _bare(self, d: Any, depth: int) -> tuple[Any, Solution, Tensor]:
        v = self.Q(*as_inputs(d))
        with torch.no_grad():
            forget_packed(self.frozen)
            constant = detach(v)
            z = before = promoted(self.net.start(constant))
            for _ in range(depth):
                z, before = self._step(z, constant), z
        u = self.R(z, v)
        with torch.no_grad():
            residual, converged, nonfinite, excess = self.measured(before, z, detach(u))
            steps = torch.full((), depth, device=residual.device)
            batch = len(leaves(z)[0])
            numbers = (part.expand(batch) for part in (residual, converged, nonfinite, steps))
            found = solution_of(self.net, z, *numbers)
        return self.S(u), found, excess

    def _step(self, z: Latent, v: Latent) -> Latent:
        Tz = self.frozen(z, v)
        if not self.damping:
            return Tz
        return map_leaves(lambda a, b: torch.lerp(b.to(a.dtype), a, self.damping), z, Tz)

    def _measured(self, before: Latent, z: Latent, after: Latent) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return residual, converged, nonfinite and excess, from z_{k-1}, z_k and T(z_k)."""
        space, tolerance = Space.of(z, coupled=self.coupled), self.net.tolerance
        residual, allowed = measure(space, tolerance, before, z, self.damping)
        next_residual, next_allowed = measure(space, tolerance, z, after)
        excess = torch.stack([_most(residual / allowed), _most(next_residual / next_allowed)])
        return residual, residual <= allowed, ~are_finite(residual, allowed), excess

    def _through_network(self, d: Any, depth: int) -> tuple[Any, Solution | None, Tensor | None]:
        net = self.net
        if not isinstance(net, ImplicitNetwork):
            return self.whole(*as_inputs(d)), None, None
        tolerance = net.tolerance
        net.tolerance = replace(tolerance, max_steps=depth, check_every=0)
        try:
            output, found = net(*as_inputs(d), solution=True)
        finally:
            net.tolerance = tolerance
        # Each sample froze at a known step, so the excess at that depth is 1.
        deepest = _most(found.steps.double())
        excess = torch.where(_most((~found.converged).double()) > 0, 2.0, 0.8 ** (depth - deepest))
        return output, found, torch.stack([excess, 0.8 * excess])


def first_control(network: FixedDepth, d: Any, autocast: Callable[[], Any]) -> DepthControl | None:
    """Return a control that starts at the depth that the network needs now, None if there is none to choose.

    This solves once eagerly, with host syncs.
    """
    net = network.net
    if network.finds_depth or net.tolerance.max_steps == 0:
        return None
    with torch.no_grad(), autocast(), unchanged(net.buffers()), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # captured steps record, and do not warn
        found = net(*as_inputs(d), solution=True)[1]
    return DepthControl(Ladder.up_to(net.tolerance.max_steps), int(found.steps.max()) + 1)


def kernel_solve(net: ImplicitNetwork, v: Tensor, z0: Tensor | None = None) -> Solution:
    """Find u = R(u, v) at the network's tolerance, in one kernel launch that stops by itself.

    The weights are the network's, in the precision of autocast where it is on. No sample is called stalled.
    """
    from banach.kernels import latent_solve

    if z0 is None and net.start is not zeros:
        with torch.no_grad():
            z0 = net.start(v)
    return latent_solve(net.R, v, z0, tolerance=net.tolerance)


def solution_of(
    net: ImplicitNetwork, value: Latent, residual: Tensor, converged: Tensor, nonfinite: Tensor, steps: Tensor
) -> Solution:
    """Return the Solution of a loop without host checks, which calls no sample stalled or diverged."""
    none = _false(residual.device).expand(len(residual))
    return Solution(
        value, residual, converged, steps, none, nonfinite, none, solver=net.solver, tolerance=net.tolerance
    )


_FALSE: dict[torch.device, Tensor] = {}


def _false(device: torch.device) -> Tensor:
    """Return a constant on the device, made once: a captured step needs no kernel for it."""
    if device not in _FALSE:
        with torch.inference_mode(False):
            _FALSE[device] = torch.zeros((), dtype=torch.bool, device=device)
    return _FALSE[device]


def promoted(z: Latent) -> Latent:
    """Return z in at least fp32 under autocast, as in `solve`: rounding to bf16 alone can exceed the tolerance."""
    if not torch.is_autocast_enabled(leaves(z)[0].device.type):
        return z
    return map_leaves(lambda leaf: leaf.to(torch.promote_types(leaf.dtype, torch.float32)), z)


def _most(values: Tensor) -> Tensor:
    """Return the 95th percentile, NaN if any value is: slow samples do not set the depth of the batch."""
    if len(values) < 20:
        return values.max().double()
    return values.double().kthvalue(int(len(values) * _MOST)).values
