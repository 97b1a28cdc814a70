"""Jacobian-based training as the authors' code has it, for the row of the second table that repeats it.

Three things go with its conjugate gradients, and the paper tells of none. Before every solve the convolutions of
R are scaled down if R stretches noise by more than gamma. A batch whose equations are not all solved to the
tolerance is left out: no weight changes. And a step of CG applies the normal matrix three times, where once
suffices, so it takes six products: that is in the paper's seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vecdot
from torch.optim.optimizer import register_optimizer_step_pre_hook

from banach.backward.adjoint import Adjoint
from banach.backward.krylov import ratio
from banach.nn.passes import uses_batch_statistics

SCALED, LEFT_OUT = "R scaled down", "batch left out"  # counted, if the mode has a report that counts


class ReleasedCG:
    """On A' A w = A' g from w = A' g, at least one step, until all samples have |A' (g - A w)| at the tolerance.

    So at a loose tolerance it is one step, which `NormalCG` would not make: that starts from w = g and asks
    first. `at_least`: steps that are made even if the tolerance is met before; more than 1 is not as released.
    `met` says whether the last solve came to the tolerance.
    """

    met = True

    def __init__(self, at_least: int = 1) -> None:
        self.at_least = at_least

    def solve(self, equation: Adjoint) -> Tensor:
        def normal(x: Tensor) -> Tensor:
            return equation.At(equation.A(x))

        w = right = equation.At(equation.g)
        p = r = right - normal(w)
        power, self.met = vecdot(r, r), False
        for step in range(1, equation.tolerance.max_steps + 1):
            alpha = ratio(power, vecdot(p, normal(p)))
            w, r = w + alpha * p, r - alpha * normal(p)
            missed = ~(equation.size(normal(w) - right) <= equation.threshold)  # what is not a number is missed
            self.met = equation.idle(missed, step)
            if self.met and step >= self.at_least:
                break
            power, before = vecdot(r, r), power
            p = r + ratio(power, before) * p
        # As released: w is used as it is, so the residual of w = g is not measured to compare it with.
        equation.start = torch.full_like(equation.unit, torch.inf)
        return w

    def __repr__(self) -> str:  # how the last solve went is no part of a job's identity
        return "ReleasedCG()" if self.at_least == 1 else f"ReleasedCG(at_least={self.at_least})"


@torch.no_grad()
def scale_down(R: Any, v: Tensor) -> bool:
    """If R stretches noise, at u = 0 and v with noise, by more than gamma, all its convolutions shrink alike; a
    block has two of them in a row, and only one of them is reckoned with. Was it so?
    """
    noise, there = torch.randn_like(v), v + torch.randn_like(v)
    moved = R(noise, there) - R(torch.zeros_like(v), there)
    stretch = float(_mean_pixel(moved) / _mean_pixel(noise))
    if stretch <= R.gamma:
        return False
    for layer in (layer for layer in R.modules() if isinstance(layer, nn.Conv2d)):
        for parameter in layer.parameters():
            parameter.mul_((R.gamma / stretch) ** (1 / len(R.blocks)))
    return True


@contextmanager
def as_released(net: Any) -> Iterator[None]:
    """What goes with `ReleasedCG`, while a network with that mode is trained.

    R with batch norm is not scaled: it does not stretch noise by more than gamma, and its statistics would be
    those of noise.
    """
    cg, report = net.backward.method, net.backward.report
    count: Counter[str] = report if isinstance(report, Counter) else Counter()

    def before_the_solve(Q: nn.Module, inputs: Any, v: Tensor) -> None:
        if Q.training and torch.is_grad_enabled() and not uses_batch_statistics(net.R):
            count[SCALED] += scale_down(net.R, v.detach())

    own, any_one = {id(parameter) for parameter in net.parameters()}, next(net.R.parameters())

    def before_the_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not own.issuperset(id(p) for group in optimizer.param_groups for p in group["params"]):
            return  # of another network
        sound = any_one.grad is not None and bool(any_one.grad.isfinite().all())  # else g was not finite
        if not cg.met or not sound:
            optimizer.zero_grad(set_to_none=True)  # such weights stay as they are, and so do their moments
            count[LEFT_OUT] += 1

    hooks = net.Q.register_forward_hook(before_the_solve), register_optimizer_step_pre_hook(before_the_step)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _mean_pixel(images: Tensor) -> Tensor:
    """The mean, over images and pixels, of the norm over channels."""
    return torch.linalg.vector_norm(images, dim=1).mean()
