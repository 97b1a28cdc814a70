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
from banach.solve import Solution


class FastNetwork:
    """d -> (output, Solution): N(d) with the layers of the plan. Without a fixed point the Solution is None.

    By JFB and Picard or Anderson, Q, R and S are called one by one: a kernel that knows R iterates it, or an
    `Iteration`. A sample that diverges is marked (`nonfinite`, `diverged`) and keeps its last value: the loss
    shows it. Other solvers and modes go through the network itself. With bf16 weights call `refresh` before the
    passes of a step, and `collect` after their backward. A training step calls the object. `banach.compile` calls
    its parts: Q, R, S and, if `can_solve`, `solve`.
    """

    def __init__(self, net: Any, how: Plan | None = None) -> None:
        self.net, self.plan = net, plan(net) if how is None else how
        self.can_solve = bool(self.plan.own_loop)  # `solve` can be called
        predicts = self.plan.task == "prediction"
        self.whole = net if isinstance(net, ImplicitNetwork) else compiled(net, self.plan)
        self.bf16 = Bf16Weights({})
        if not (self.can_solve or predicts):
            return
        parts = parts_of(net, self.plan)
        if self.plan.bf16_weights:
            self.bf16 = Bf16Weights(parts)
            parts = self.bf16.modules
        self.frozen = frozen_copy(parts["R"])
        if predicts:
            parts["R"] = self.frozen
        # Not bound methods of the network: compiled parts are called in its place.
        self.Q, self.R, self.S = (compiled(part, self.plan) for part in parts.values())
        if self.can_solve:
            coupled = uses_batch_statistics(net.R) if net.coupled is None else net.coupled
            R = compiled(self.frozen, self.plan)
            fused = bool(self.plan.fused_step)
            self.iteration = Iteration(R, net.solver, net.tolerance, coupled=coupled, fused=fused)

    def __call__(self, d: Any) -> tuple[Any, Solution | None]:
        if not self.plan.own_loop:
            return run_network(self.whole, as_inputs(d))
        v = self.Q(*as_inputs(d))
        found = self.solve(detach(v))
        return self.S(self.R(found.value, v)), found

    def refresh(self) -> None:
        """Take up the weights that the optimizer changed. Call it before a step."""
        self.bf16.refresh()

    def collect(self) -> None:
        """Give the network's parameters their gradients. Call it after the backward passes of a step."""
        self.bf16.collect()

    @torch.no_grad()
    def solve(self, v: Latent, z0: Latent | None = None) -> Solution:
        """Find u = R(u, v) from z0, by default the network's start."""
        if z0 is None and not (self.plan.kernel and self.net.start is zeros):
            z0 = self.net.start(v)
        if self.plan.kernel:
            from banach.kernels import latent_solve

            return latent_solve(self.net.R, v, z0, tolerance=self.net.tolerance)
        return self.iteration(promoted(z0), v)


def promoted(z: Latent) -> Latent:
    """Return z in at least fp32 under autocast, as in `solve`: rounding to bf16 alone can exceed the tolerance."""
    if not torch.is_autocast_enabled(leaves(z)[0].device.type):
        return z
    return map_leaves(lambda leaf: leaf.to(torch.promote_types(leaf.dtype, torch.float32)), z)
