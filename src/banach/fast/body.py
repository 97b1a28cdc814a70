"""FastNetwork: a network whose parts are called one by one, without a host sync, so that it can be captured."""

from __future__ import annotations

from typing import Any

import torch

from banach.fast.iteration import Iteration
from banach.fast.plan import Plan, plan
from banach.fast.step import run_network
from banach.fast.weights import Bf16Weights, compiled, frozen_copy, parts_of
from banach.latent import Latent, detach, leaves, map_leaves
from banach.network import ImplicitNetwork, as_inputs, zeros
from banach.nn.layers import uses_batch_statistics
from banach.solve import Solution, solve


class FastNetwork:
    """d -> (output, Solution): N(d) with the layers of the plan. Without a fixed point the Solution is None.

    By JFB, Q, R and S are called one by one: a kernel that knows R iterates it, or an `Iteration`, or `solve`.
    Other modes go through the network itself. With bf16 weights call `bf16.refresh()` before the passes of a step,
    and `bf16.collect()` after their backward.
    """

    def __init__(self, net: Any, how: Plan | None = None) -> None:
        self.net, self.plan = net, plan(net) if how is None else how
        self.whole = net if isinstance(net, ImplicitNetwork) else compiled(net, self.plan)
        self.bf16 = Bf16Weights({})
        predicts = self.plan.task == "prediction"
        if not (self.plan.own_loop or predicts):
            return
        parts = parts_of(net, self.plan)
        if self.plan.bf16_weights:
            self.bf16 = Bf16Weights(parts)
            parts = self.bf16.modules
        frozen = frozen_copy(parts["R"])
        if predicts:
            parts["R"] = frozen
        # Not bound methods of the network: compiled parts are called in its place.
        self.Q, self.R, self.S = (compiled(part, self.plan) for part in parts.values())
        self.iterated = self.R if predicts else compiled(frozen, self.plan)

    def __call__(self, d: Any) -> tuple[Any, Solution | None]:
        if not self.plan.own_loop:
            return run_network(self.whole, as_inputs(d))
        v = self.Q(*as_inputs(d))
        found = self.solve(detach(v))
        return self.S(self.R(found.value, v)), found

    @torch.no_grad()
    def solve(self, v: Latent, z0: Latent | None = None, *, checked: bool = False) -> Solution:
        """Find u = R(u, v) from z0, by default the network's start. `checked`: by `solve`, with host checks."""
        net, tolerance, plan = self.net, self.net.tolerance, self.plan
        kernel, fused = plan.kernel and not checked, plan.fused_step and not checked
        if z0 is None and not (kernel and net.start is zeros):
            z0 = net.start(v)
        if kernel:
            from banach.kernels import latent_solve

            return latent_solve(net.R, v, z0, tolerance=tolerance)
        if fused:
            return Iteration(self.iterated, net.solver, tolerance)(promoted(z0), v)
        coupled = uses_batch_statistics(net.R) if net.coupled is None else net.coupled
        compact = checked and not plan.graph and tolerance.check_every != 0 and len(leaves(v)[0]) > 0
        how: Any = {"tolerance": tolerance, "coupled": coupled, "compact": compact}
        return solve(self.iterated, promoted(z0), net.solver, inputs=(v,), **how)


def promoted(z: Latent) -> Latent:
    """Return z in at least fp32 under autocast, as in `solve`: rounding to bf16 alone can exceed the tolerance."""
    if not torch.is_autocast_enabled(leaves(z)[0].device.type):
        return z
    return map_leaves(lambda leaf: leaf.to(torch.promote_types(leaf.dtype, torch.float32)), z)
