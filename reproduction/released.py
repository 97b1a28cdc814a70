"""Jacobian-based training as the authors' released code does it, for the timing pair of the second table.

Its conjugate gradients (CG) come with three things that the paper does not mention. Before every solve the
convolutions of R are scaled down if R amplifies noise by more than gamma. A batch whose equations are not all
solved to the tolerance is skipped. And a step of CG applies the normal matrix three times where once suffices: six
J-products, which are part of the paper's seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vecdot
from torch.optim.optimizer import register_optimizer_step_pre_hook

from banach import Implicit, Status
from banach.backward.adjoint import Adjoint
from banach.backward.krylov import ratio
from banach.nn.passes import uses_batch_statistics

SCALED, SKIPPED = "R scaled down", "batch skipped"


class Adjoints(Counter[str]):
    """A `report` for `Implicit` that counts how the samples' adjoint equations ended."""

    def __call__(self, products: int, residual: Tensor, status: tuple[Status, ...]) -> None:
        self.update(f"adjoint {end.name}" for end in status)


class ReleasedCG:
    """CG on A' A w = A' g from w = A' g, at least one step, until |A' (g - A w)| is small for all samples.

    `met`: whether the last solve converged.
    """

    met = True

    def solve(self, equation: Adjoint) -> Tensor:
        """Return w."""

        def normal(x: Tensor) -> Tensor:
            return equation.At(equation.A(x))

        w = right = equation.At(equation.g)
        p = r = right - normal(w)
        power, self.met = vecdot(r, r), False
        for step in range(1, equation.tolerance.max_steps + 1):
            alpha = ratio(power, vecdot(p, normal(p)))
            w, r = w + alpha * p, r - alpha * normal(p)
            missed = ~(equation.size(normal(w) - right) <= equation.threshold)  # NaN counts as missed
            self.met = equation.idle(missed, step)
            if self.met:
                break
            power, before = vecdot(r, r), power
            p = r + ratio(power, before) * p
        # The released code uses w as it is, so it must not be compared with the residual of w = g.
        equation.start = torch.full_like(equation.unit, torch.inf)
        return w


@torch.no_grad()
def scale_down(R: Any, v: Tensor) -> bool:
    """Scale all convolutions of R down if R amplifies noise by more than gamma; return True if it did.

    A block has two convolutions in a row; as in the released code, the factor is computed as if it had one.
    """
    noise, there = torch.randn_like(v), v + torch.randn_like(v)
    moved = R(noise, there) - R(torch.zeros_like(v), there)
    gain = float(_mean_pixel(moved) / _mean_pixel(noise))
    if gain <= R.gamma:
        return False
    for layer in (layer for layer in R.modules() if isinstance(layer, nn.Conv2d)):
        for parameter in layer.parameters():
            parameter.mul_((R.gamma / gain) ** (1 / len(R.blocks)))
    return True


def conditions(net: Any) -> AbstractContextManager[None]:
    """Return a context in which a network with `ReleasedCG` trains as released; it does nothing for others."""
    mode = getattr(net, "backward", None)
    released = isinstance(mode, Implicit) and isinstance(mode.method, ReleasedCG)
    return as_released(net) if released else nullcontext()


@contextmanager
def as_released(net: Any) -> Iterator[None]:
    """Scale R down before solves and skip batches whose solve failed.

    R with batch norm is not scaled: it does not amplify noise by more than gamma.
    """
    cg, counts = net.backward.method, net.backward.report
    own, any_one = {id(parameter) for parameter in net.parameters()}, next(net.R.parameters())

    def before_the_solve(Q: nn.Module, inputs: Any, v: Tensor) -> None:
        if Q.training and torch.is_grad_enabled() and not uses_batch_statistics(net.R):
            counts[SCALED] += scale_down(net.R, v.detach())

    def before_the_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not own.issuperset(id(p) for group in optimizer.param_groups for p in group["params"]):
            return  # the optimizer of another network
        finite = any_one.grad is not None and bool(any_one.grad.isfinite().all())
        if not cg.met or not finite:
            optimizer.zero_grad(set_to_none=True)  # no gradient: weights and moments stay as they are
            counts[SKIPPED] += 1

    hooks = net.Q.register_forward_hook(before_the_solve), register_optimizer_step_pre_hook(before_the_step)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _mean_pixel(images: Tensor) -> Tensor:
    """Return the mean, over images and pixels, of the norm over channels."""
    return torch.linalg.vector_norm(images, dim=1).mean()
